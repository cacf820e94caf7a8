"""Rows of experts under export: what an expert computes of some rows is computed of all of them.

A mixture of experts selects the rows of each expert, `x[torch.where(chosen == 3)[0]]`, and adds
the expert's results to those rows again. How many there are depends on data, which the rest of a
graph can't be traced with. Where the functions between compute each row by itself, the same
follows from all rows if only the results of the selected ones are written. So a selection holds all
rows (`routed_rows.py`), and only another use than these selects.

Every expert computes all rows then. So where the experts are a module that can stay whole, as it
computes each row by itself, it does (`RowsOfExperts`).

Where a forward asks whether there are such rows, the answer is that there are: without any, all
that is selected is empty, and nothing is written. `if mask.any():` has this answer only where the
mask selects rows that are written, and where the module can't be exported else (`presumed`).

This file knows nothing about lanes, passes or the runtime.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from maskfx.compiler.capture.tracing.packings import TokenPlaces
from maskfx.compiler.capture.tracing.routed_rows import RoutedRows, RowCount, as_rows
from maskfx.compiler.capture.tracing.waiting_values import WaitingValue
from maskfx.errors import CaptureError

COUNTS = frozenset({"numel", "nelement"})
PRESUMED: ContextVar[bool] = ContextVar("PRESUMED", default=False)
Made = TypeVar("Made")
WRITTEN: ContextVar[bool] = ContextVar("WRITTEN", default=False)


class RowsOfExperts(CaptureError):
    """Rows that an expert computed are written; see `with_experts`."""


def with_experts(attempt: Callable[[], Made]) -> Made:
    """Make an attempt, and one that writes all rows of experts if they can't stay whole."""
    try:
        return attempt()
    except RowsOfExperts:
        token = WRITTEN.set(True)
        try:
            return attempt()
        finally:
            WRITTEN.reset(token)


@contextlib.contextmanager
def presumed() -> Iterator[None]:
    """Presume that masks of rows select some, in runs and exports of a module."""
    token = PRESUMED.set(True)
    try:
        yield
    finally:
        PRESUMED.reset(token)


class Presence(WaitingValue):
    """Whether a mask selects anything, which is presumed once Python asks for it."""

    def __init__(self, mask: Tensor, asked: list[Tensor]) -> None:
        self.mask, self.asked = mask, asked

    def value(self) -> Tensor:
        with torch._C.DisableTorchFunction():
            return self.mask.any()

    def item(self) -> bool:
        return bool(self)

    def __bool__(self) -> bool:
        self.asked.append(self.mask)
        return True


class RoutedPlaces(WaitingValue):
    """Where a matrix of rows and choices isn't zero, along one of its two dimensions."""

    def __init__(self, mask: Tensor, dim: int) -> None:
        self.mask, self.dim = mask, dim

    def value(self) -> Tensor:
        with torch._C.DisableTorchFunction():
            return torch.nonzero(self.mask, as_tuple=True)[self.dim]

    @property
    def rows(self) -> Tensor:
        """Which rows are selected, if these places are those of rows."""
        mask = self.mask != 0
        return mask if mask.dim() == 1 else mask.any(1 - self.dim)

    def is_of(self, mask: Tensor) -> bool:
        """Return True if these are places of as many rows as there are in a mask."""
        return not bool(self.mask.shape[self.dim] != mask.shape[0])

    @property
    def shape(self) -> tuple[RowCount, ...]:
        return (RowCount(self),)

    def __len__(self) -> Any:
        return len(self.value())

    def __getattr__(self, name: str) -> object:
        if name in COUNTS:
            return lambda: RowCount(self)
        if name == "size":
            return lambda dim=None: self.shape if dim is None else self.shape[dim]
        return getattr(self.value(), name)


SELECTED = (TokenPlaces, RoutedPlaces, RoutedRows)  # have as many rows as are selected


class Routings(TorchFunctionMode):
    """Makes rows that experts select wait until they are used, and writes all rows in their place.

    `torch.where(mask)` of a vector or a matrix gives places; rows of them are written to the places
    or to the mask that they were selected by.
    """

    def __init__(self) -> None:
        super().__init__()
        self._choices: dict[int, tuple[Tensor, Tensor]] = {}  # by id: which rows a matrix chooses
        self._asked: list[Tensor] = []  # masks that were presumed to select something
        self._written: list[Tensor] = []  # masks by which rows were written

    def check(self) -> None:
        """Raise CaptureError if a mask was presumed to select rows, and none were written by it."""
        if not all(any(mask is known for known in self._written) for mask in self._asked):
            raise CaptureError("Python branches on the values of inputs, not on rows of experts")

    def _write(self, target: Tensor, rows: RoutedRows, adds: bool) -> Tensor:
        if not WRITTEN.get():
            raise RowsOfExperts("rows of experts are selected")
        self._written += [rows.mask, rows.origin]
        return write(target, rows, adds)

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> object:
        named, name = kwargs or {}, getattr(func, "__name__", "")
        found: object = None
        if name == "where" and len(args) == 1 and not named or name == "nonzero":
            found = self._places(name, args, named)
        elif name == "__getitem__" and isinstance(args[0], Tensor):
            found = self._selected(args[0], args[1])
        elif name == "__setitem__" and isinstance(args[0], Tensor):
            rows = as_rows(args[2])
            if isinstance(rows, RoutedRows) and is_at(rows, args[1]):
                return self._write(args[0], rows, adds=False)
        elif name in ("index_add", "index_add_") and len(args) == 4 and not named:
            rows, own = as_rows(args[3]), args[1] == 0 and isinstance(args[0], Tensor)
            if own and isinstance(rows, RoutedRows) and is_at(rows, args[2]):
                target = args[0] if name == "index_add_" else args[0].clone()
                return self._write(target, rows, adds=True)
        elif name == "any" and PRESUMED.get() and len(args) == 1 and not named:
            found = Presence(args[0], self._asked)
        if found is not None:
            return found
        found = func(*args, **named)
        if name == "any" and isinstance(found, Tensor) and found.dim() == 1:
            dim = named.get("dim", args[1] if len(args) > 1 else None)
            if args[0].dim() == 2 and args[0].dtype == torch.bool and dim in (1, -1):
                self._choices[id(found)] = found, args[0]
        return found

    def _places(self, name: str, args: Sequence[Any], named: dict[str, Any]) -> object:
        """Return where a matrix, or for `where` a vector, isn't zero; None for others."""
        mask = args[0]
        if name == "nonzero" and not named.get("as_tuple", len(args) > 1 and args[1]):
            return None
        ranks = (1, 2) if name == "where" else (2,)  # a vector's may be valid tokens of a text
        if not isinstance(mask, Tensor) or mask.dim() not in ranks:
            return None
        return tuple(RoutedPlaces(mask, dim) for dim in range(mask.dim()))

    def _selected(self, source: Tensor, index: Any) -> RoutedRows | None:
        """Return the rows that places or a mask select, or None."""
        parts = index if isinstance(index, tuple) else (index,)
        if any(isinstance(part, RoutedPlaces) for part in parts):
            return rows_at(source, parts)
        if len(parts) != 1 or not isinstance(index, Tensor) or index.dtype != torch.bool:
            return None
        known = self._choices.get(id(index))
        if known is not None and known[0] is index:
            other = bool(source.shape[0] != index.shape[0])
            return None if other else RoutedRows(source, index, known[1])
        if index.dim() != 2 or source.dim() < 2:
            return None
        if bool(source.shape[0] != index.shape[0]) or bool(source.shape[1] != index.shape[1]):
            return None
        if any(index is matrix for _, matrix in self._choices.values()):
            return chosen(source, index) if source.dim() == 2 else None
        return RoutedRows(source.flatten(0, 1), index.flatten(), index)


def rows_at(source: Tensor, index: tuple[Any, ...]) -> RoutedRows | None:
    """Return the rows of a tensor that places pick, or of each row the one that is chosen."""
    lead = index[:1] == (None,) and len(index) == 2
    parts = index[1:] if lead else index
    first, rest = parts[0], parts[1:]
    if not isinstance(first, RoutedPlaces):
        return None
    found = RoutedRows(source, first.rows, first.mask, lead)
    if bool(source.shape[0] != first.rows.shape[0]):
        return None
    if rest and isinstance(rest[0], RoutedPlaces):
        if rest[0].mask is not first.mask or rest[0].dim == first.dim or source.dim() != 2:
            return None
        found, rest = chosen(source, first.mask if first.dim == 0 else first.mask.T), rest[1:]
        found.origin = first.mask
    if not all(part is None or part is Ellipsis or isinstance(part, int | slice) for part in rest):
        return None
    found.whole = found.whole[(slice(None), *rest)] if rest else found.whole
    return found


def chosen(source: Tensor, mask: Tensor) -> RoutedRows:
    """Return the value of each row that a mask chooses, one of a row at most."""
    values = torch.where(mask != 0, source, torch.zeros_like(source)).sum(1)
    return RoutedRows(values, (mask != 0).any(1), mask)


def is_at(rows: RoutedRows, index: object) -> bool:
    """Return True if these rows were selected by this mask or these places."""
    index = index[0] if isinstance(index, tuple) and len(index) == 1 else index
    if isinstance(index, RoutedPlaces):
        return index.mask is rows.origin and not rows.lead and index.is_of(rows.mask)
    if isinstance(index, TokenPlaces):
        return index.mask is rows.origin and not index.column
    return index is rows.mask or index is rows.origin


def write(target: Tensor, rows: RoutedRows, adds: bool) -> Tensor:
    """Write rows, or add them, where they were selected; return the target."""
    ranks = target.dim() - rows.whole.dim()
    kept = rows.mask.reshape(-1, *[1] * (rows.whole.dim() - 1))
    own = target.flatten(0, 1) if ranks else target
    whole = torch.where(kept, rows.whole, torch.zeros_like(own) if adds else own)
    whole = whole.reshape(target.shape)
    return target.add_(whole) if adds else target.copy_(whole)
