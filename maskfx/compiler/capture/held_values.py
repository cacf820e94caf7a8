"""Held values: arguments that are constants of a capture, because sizes depend on them.

While the module is exported, what follows from such arguments alone is computed at once. Where the
rest of the graph meets it, it is a constant; where it selects rows, the rows are cut out in pieces,
so that their number is known.

This file knows nothing about lanes, passes or the runtime.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import groupby, pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes

from maskfx.compiler.capture.arguments.roles import Argument
from maskfx.compiler.capture.arguments.value_reads import tensors_in, writes_first
from maskfx.errors import CaptureError

MAKERS = ("tensor", "as_tensor", "arange", "zeros", "ones", "full")
CUTS = ("__getitem__", "slice", "select", "narrow")
MOST = 64  # pieces that rows are cut into; more are selected by their numbers

Run = tuple[int, int]  # the first of some following rows, and their number
# what a function made of numbers, its version then, the function and its arguments
Made = tuple[object, int, Callable[..., Any], Sequence[Any], Mapping[str, Any]]
NOTHING: Made = (None, 0, torch.tensor, (), {})


@contextlib.contextmanager
def eagerly() -> Iterator[None]:
    """Compute with numbers within an export."""
    with torch._C.DisableTorchFunction(), _disable_current_modes():
        yield


class HeldValues(TorchFunctionMode):
    """Computes with the values of held arguments while a module is exported."""

    def __init__(self) -> None:
        super().__init__()
        self._held: dict[int, Tensor] = {}  # by id
        self._constants: dict[tuple[int, int], Tensor] = {}  # by id and version
        self._made: dict[int, Made] = {}  # by id

    def hold(self, value: Tensor) -> Tensor:
        self._held[id(value)] = value
        return value

    def is_held(self, value: object) -> bool:
        return isinstance(value, Tensor) and self._held.get(id(value)) is value

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        named, name = kwargs or {}, getattr(func, "__name__", "")
        given = list(tensors_in((args, named)))
        symbolic = any(isinstance(v, torch.SymInt) for v in pytree.tree_leaves((args, named)))
        if not any(map(self.is_held, given)):
            found = func(*args, **named)
            if name in MAKERS and not given and not symbolic and isinstance(found, Tensor):
                self._made[id(found)] = found, found._version, func, args, named
            return found
        known = all(self._number(value) is not None for value in given)
        if known and (name in CUTS or not symbolic):
            return self._computed(func, args, named)
        if self.is_held(args[0]) and writes_first(name):
            raise CaptureError(f"{name} writes other values into one that the capture holds")
        picks = PICKS.get(name)
        found = None if picks is None else picks(self, *args, **named)
        if found is not None:
            return None if name == "__setitem__" else found
        args, named = pytree.tree_map(self.constant, (tuple(args), dict(named)))
        return func(*args, **named)

    def _number(self, value: Tensor) -> Tensor | None:
        """Return a held value, or what was made of numbers and not written since."""
        if self.is_held(value):
            return value
        found, version, func, args, named = self._made.get(id(value), NOTHING)
        if found is not value or value._version != version:
            return None
        with eagerly():
            number: Tensor = func(*args, **named)
        return number

    def _computed(
        self, func: Callable[..., Any], args: Sequence[Any], named: Mapping[str, Any]
    ) -> Any:
        """Compute with numbers; sizes of calls among the arguments are fixed."""

        def own(value: Any) -> Any:
            if isinstance(value, slice):
                return slice(*map(own, (value.start, value.stop, value.step)))
            if isinstance(value, torch.SymInt):
                return int(value)
            return self._number(value) if isinstance(value, Tensor) else value

        args, named = pytree.tree_map(own, (tuple(args), dict(named)))
        with eagerly():
            found = func(*args, **named)
        for value in tensors_in(found):
            self.hold(value)
        return found

    def constant(self, value: Any) -> Any:
        """Return a value that the graph may hold in place of a held one."""
        if not self.is_held(value):
            return value
        key = id(value), value._version
        if key not in self._constants:
            with eagerly():
                self._constants[key] = value.clone()
        return self._constants[key]

    def places(self, index: Tensor, size: int) -> list[int]:
        """Return the places that a mask or places of a held value select of an axis."""
        with eagerly():
            if index.dtype == torch.bool:
                return [int(n) for n in index.nonzero().flatten().tolist()]
            return [int(n) + size * (n < 0) for n in index.tolist()]


def runs_of(places: Sequence[int]) -> list[Run]:
    """Return places as runs of following ones."""
    found: list[Run] = []
    for place in places:
        if found and sum(found[-1]) == place:
            found[-1] = found[-1][0], found[-1][1] + 1
        else:
            found.append((place, 1))
    return found


def rows_at(value: Tensor, dim: int, places: Sequence[int]) -> Tensor:
    """Return the rows of a dimension at these places."""
    runs = runs_of(places)
    if len(runs) > MOST:
        return value.index_select(dim, torch.tensor(list(places), device=value.device))
    parts = [value.narrow(dim, start, count) for start, count in runs or [(0, 0)]]
    return torch.cat(parts, dim) if len(parts) > 1 else parts[0].clone()


def indexed(held: HeldValues, value: Tensor, index: Any) -> tuple[Tensor, int, Tensor] | None:
    """Return a view whose dimension a held vector selects from, the dimension and the vector."""
    parts = list(index) if isinstance(index, tuple) else [index]
    chosen = [i for i, part in enumerate(parts) if held.is_held(part) and part.dim()]
    rest = [part for i, part in enumerate(parts) if i not in chosen]
    plain = all(p is None or p is Ellipsis or type(p) is int or isinstance(p, slice) for p in rest)
    if held.is_held(value) or len(chosen) != 1 or not plain:
        return None
    at = chosen[0]
    vector = parts[at]
    if vector.dim() != 1:
        return None
    before = parts[:at]
    dim = sum(p is None or isinstance(p, slice) for p in before)
    if Ellipsis in before:
        dim += value.dim() - sum(p is not None and p is not Ellipsis for p in parts)
    return value[(*before, slice(None), *parts[at + 1 :])], dim, vector


def selected(held: HeldValues, value: Tensor, index: Any) -> Tensor | None:
    """Return the rows that a held vector selects."""
    found = indexed(held, value, index)
    if found is None:
        return None
    part, dim, vector = found
    return rows_at(part, dim, held.places(vector, int(part.shape[dim])))


def written(held: HeldValues, value: Tensor, index: Any, new: Any) -> Tensor | None:
    """Write rows at the places of a held vector, between those that stay as they are."""
    found = indexed(held, value, index)
    if found is None:
        return None
    part, dim, vector = found
    size = int(part.shape[dim])
    places = held.places(vector, size)
    runs = runs_of(places)
    if len(runs) > MOST or any(a[0] + a[1] > b[0] for a, b in pairwise(runs)):
        return None
    if not isinstance(new, Tensor):
        new = torch.full((), new, dtype=part.dtype, device=part.device)
    shape = (*part.shape[:dim], len(places), *part.shape[dim + 1 :])
    new, pieces, at, taken = held.constant(new).to(part.dtype).expand(shape), [], 0, 0
    for start, count in (*runs, (size, 0)):
        if start > at:
            pieces.append(part.narrow(dim, at, start - at))
        if count:
            pieces.append(new.narrow(dim, taken, count))
        at, taken = start + count, taken + count
    part.copy_(torch.cat(pieces, dim) if len(pieces) > 1 else pieces[0])
    return value


def chosen_rows(held: HeldValues, value: Tensor, dim: int, index: Tensor) -> Tensor | None:
    """Return the rows at held places."""
    if held.is_held(value) or not held.is_held(index) or index.dim() != 1:
        return None
    return rows_at(value, dim, held.places(index, int(value.shape[dim])))


def repeated(
    held: HeldValues, value: Tensor, repeats: Any, dim: int | None = None, **named: Any
) -> Tensor | None:
    """Return rows each as often as a held vector states."""
    if held.is_held(value) or dim is None or not held.is_held(repeats) or repeats.dim() != 1:
        return None
    with eagerly():
        times = repeats.tolist()
    runs = [(many, len(list(same))) for many, same in groupby(times)]
    if len(runs) > MOST:
        return rows_at(value, dim, [i for i, many in enumerate(times) for _ in range(many)])
    parts, at = [], 0
    for many, count in runs:
        piece = value.narrow(dim, at, count)
        at += count
        if many:
            parts.append(piece if many == 1 else piece.repeat_interleave(many, dim))
    return torch.cat(parts, dim)


PICKS: dict[str, Callable[..., Tensor | None]] = {
    "__getitem__": selected,
    "__setitem__": written,
    "index_select": chosen_rows,
    "repeat_interleave": repeated,
}


@contextlib.contextmanager
def holding(
    module: nn.Module, leaves: Sequence[Argument], values: Sequence[object]
) -> Iterator[None]:
    """Give the module the values of held arguments while it is exported."""
    own = {i: v for i, (leaf, v) in enumerate(zip(leaves, values, strict=True)) if leaf.held}
    if not own:
        yield
        return
    mode = HeldValues()

    def given(
        _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        found, spec = pytree.tree_flatten(dict(kwargs))
        if len(found) != len(leaves):
            return None
        with eagerly():
            real = {i: mode.hold(value.clone()) for i, value in own.items()}  # type: ignore[attr-defined]
        return args, pytree.tree_unflatten([real.get(i, v) for i, v in enumerate(found)], spec)

    hook = module.register_forward_pre_hook(given, with_kwargs=True)
    try:
        with mode:
            yield
    finally:
        hook.remove()
