"""Rows of a recorded step: in full, packed, of some sites only, interpolated, or not read yet.

From each of these, the rows of any site that is kept can be read in full precision. Knows nothing
of programs, files and tiers.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol, runtime_checkable

import torch
import xxhash
from torch import Tensor

from maskfx.errors import CacheError
from maskfx.runtime.cache.quantize import Format, Packed, pack, select
from maskfx.runtime.cache.stores.read_speed import ReadSpeed
from maskfx.runtime.hardware.devices import CPU, Tables, moved, read_here


@dataclass(frozen=True, eq=False)
class RowSubset:
    """Rows of some sites."""

    rows: Tensor | Packed
    sites: Tensor  # sorted int32 site indices; in host memory, wherever the rows are

    @property
    def dtype(self) -> torch.dtype:
        return self.rows.dtype

    @property
    def nbytes(self) -> int:
        return self.rows.nbytes + self.sites.nbytes

    def tensors(self) -> tuple[Tensor, ...]:
        """Return the tensors that hold the rows, without the site indices in host memory."""
        return tensors_of(self.rows)

    @cached_property
    def key(self) -> bytes:
        """Return a key that is equal for the same sites, such as in the steps of one template."""
        return xxhash.xxh3_128_digest(self.sites.numpy().data)

    def mapped(self, change: Callable[[Tensor], Tensor]) -> RowSubset:
        """Return the rows with each tensor changed, e.g. moved."""
        rows = self.rows
        inner = change(rows) if isinstance(rows, Tensor) else rows.mapped(change)
        return RowSubset(inner, self.sites)

    def places(self, index: Tensor) -> Tensor:
        """Return where these sites' rows lie among the kept ones; raise if one isn't kept."""
        places, here = self._find(index)
        if not bool(here.all()):
            raise CacheError(
                f"an edit reads {int((~here).sum())} sites whose rows weren't kept; record the "
                "step again, with Masks that allow this mask"
            )
        return places

    def places_here(self, index: Tensor) -> Tensor:
        """Return where the rows of these sites lie, without those that aren't kept."""
        places, here = self._find(index)
        return places[here]

    def _find(self, index: Tensor) -> tuple[Tensor, Tensor]:
        if not len(self.sites):
            return index, torch.zeros(len(index), dtype=torch.bool)
        wanted = index.to(self.sites.dtype)
        places = torch.searchsorted(self.sites, wanted).clamp_(max=len(self.sites) - 1)
        return places, self.sites[places] == wanted

    def whole(self) -> Tensor:
        raise CacheError(
            f"this edit reads the rows of all sites, but only those of {len(self.sites)} were "
            "kept; record the step again"
        )


@dataclass(frozen=True, eq=False)
class InterpolatedRows:
    """Rows interpolated linearly between two steps."""

    first: Rows
    second: Rows
    weight: float  # of the second

    @property
    def dtype(self) -> torch.dtype:
        return self.first.dtype

    @property
    def nbytes(self) -> int:
        return self.first.nbytes + self.second.nbytes

    def tensors(self) -> tuple[Tensor, ...]:
        return (*tensors_of(self.first), *tensors_of(self.second))

    def mapped(self, change: Callable[[Tensor], Tensor]) -> InterpolatedRows:
        """Return the rows with each tensor changed, e.g. moved."""
        return InterpolatedRows(
            mapped(self.first, change), mapped(self.second, change), self.weight
        )

    def whole(self) -> Tensor:
        return self.mixed(whole(self.first), whole(self.second))

    def mixed(self, first: Tensor, second: Tensor) -> Tensor:
        """Interpolate between values of the two steps; integers are the first step's."""
        return torch.lerp(first, second, self.weight) if first.is_floating_point() else first


class StoredValue(Protocol):
    """Rows in a store, read once; several taps may be made of the same ones."""

    @property
    def nbytes(self) -> int:
        """Their bytes in the store."""
        ...

    @property
    def is_read(self) -> bool: ...

    @property
    def speed(self) -> ReadSpeed:
        """How fast the store is read."""
        ...

    def fetch(self) -> None:
        """Bring their bytes into memory; `read` raises what goes wrong."""
        ...

    def read(self) -> Tensor | Packed:
        """Return the rows, from memory after the first call; raise CacheError if they are gone."""
        ...


@runtime_checkable
class RangedValue(Protocol):
    """A `StoredValue` of which the rows of some sites can be read alone."""

    def read_rows(self, sites: Tensor, elements: Sequence[int] | None) -> Tensor | Packed:
        """Return all rows, of which those of these sites and batch elements have their values."""
        ...


@dataclass(frozen=True)
class Elements:
    """Picks elements of a batch from a tensor that has it; other values stay.

    Args:
        chosen: The numbers of the elements; adjacent ones share the memory of the tensor.
        batch: The number of all elements.
    """

    chosen: tuple[int, ...]
    batch: int | None

    def __call__(self, value: Any) -> Any:
        if not isinstance(value, Tensor) or value.dim() == 0 or value.shape[0] != self.batch:
            return value
        first = self.chosen[0] if self.chosen else 0
        if self.chosen == tuple(range(first, first + len(self.chosen))):
            return value.narrow(0, first, len(self.chosen))
        return value.index_select(0, torch.tensor(self.chosen, device=value.device))


@dataclass(frozen=True)
class OfElements:
    """Makes rows by `made`, and changes each tensor of them that has a batch axis."""

    made: Callable[[Tensor | Packed], Rows]
    change: Callable[[Tensor], Tensor]

    def __call__(self, value: Tensor | Packed) -> Rows:
        return by_element(self.made(value), self.change)


class References(threading.local):
    """Whether this thread pickles rows in a store by reference, for processes that can read it."""

    allowed = False

    @contextmanager
    def kept(self) -> Iterator[None]:
        before, self.allowed = self.allowed, True
        try:
            yield
        finally:
            self.allowed = before


references = References()


@dataclass(frozen=True, eq=False)
class StoredRows:
    """Rows that lie in a store, and are read when they are first used.

    Args:
        value: The rows in the store.
        shown: Rows without values (on the device `meta`) of the same shape and format.
        made: Makes these rows of those in the store.
        elements: The elements of the store's batch that these rows are of, if known.
    """

    value: StoredValue
    shown: Tensor | Packed | RowSubset
    made: Callable[[Tensor | Packed], Rows]
    elements: tuple[int, ...] | None = None

    @property
    def dtype(self) -> torch.dtype:
        return self.shown.dtype

    @property
    def nbytes(self) -> int:
        return self.shown.nbytes

    @property
    def unread(self) -> int:
        """Return the bytes that are still to be read from the store."""
        return 0 if self.value.is_read else self.value.nbytes

    @cached_property
    def found(self) -> Rows:
        """The rows in memory; the first use reads them."""
        return self.made(self.value.read())

    def at(self, index: Tensor) -> Rows:
        """Return the rows in memory, of which those of some sites are read at least."""
        if self.value.is_read or not isinstance(self.value, RangedValue):
            return self.found
        places = self.shown.places(index) if isinstance(self.shown, RowSubset) else index
        return self.made(self.value.read_rows(places, self.elements))

    def tensors(self) -> tuple[Tensor, ...]:
        """Return the tensors that hold the rows, without values before they are read."""
        return tensors_of(self.found if self.value.is_read else self.shown)

    def mapped(self, change: Callable[[Tensor], Tensor]) -> StoredRows:
        """Return the rows with each tensor changed, e.g. moved, when it is read."""
        made = self.made
        return StoredRows(self.value, self.shown, lambda value: mapped(made(value), change))

    def whole(self) -> Tensor:
        return whole(self.found)

    def __reduce__(self) -> tuple[object, ...]:
        """Pickle rows in memory, as another process may not have the store; see `References`."""
        if references.allowed and self.unread and getattr(self.value, "elsewhere", False):
            return StoredRows, (self.value, self.shown, self.made, self.elements)
        return as_they_are, (self.found,)


def as_they_are(rows: Rows) -> Rows:
    return rows


Rows = Tensor | Packed | RowSubset | InterpolatedRows | StoredRows


def in_memory(
    rows: Rows, index: Tensor | None = None
) -> Tensor | Packed | RowSubset | InterpolatedRows:
    """Return rows in memory; those in a store are read, with an index those of these sites."""
    while isinstance(rows, StoredRows):
        rows = rows.found if index is None else rows.at(index)
    return rows


def stored_parts(rows: Rows) -> tuple[StoredValue, ...]:
    """Return what has to be read from a store before these rows can be used."""
    if isinstance(rows, InterpolatedRows):
        return (*stored_parts(rows.first), *stored_parts(rows.second))
    return (rows.value,) if isinstance(rows, StoredRows) and rows.unread else ()


class RowTables(Tables):
    """Caches a batch's index tables, and the places of rows in recordings that keep only some."""

    def __init__(self) -> None:
        super().__init__()
        self._places: dict[tuple[int, bytes, bool], tuple[Tensor, Tensor]] = {}

    def places(self, part: RowSubset, index: Tensor, some: bool = False) -> Tensor:
        """Return where a part has the rows of these sites; with `some`, omit missing ones."""
        key = id(index), part.key, some
        if key not in self._places:
            found = part.places_here(index) if some else part.places(index)
            self._places[key] = index, found
        return self._places[key][1]


def pick(
    rows: Rows,
    index: Tensor,
    device: torch.device | None = None,
    picks: RowTables | None = None,
    some: bool = False,
) -> Tensor:
    """Return the rows of these sites, (batch, picked, ...), in full precision.

    Args:
        rows: The rows, in any form.
        index: The sites.
        device: The device to move the rows to, packed rows in their format; by default they stay.
        picks: Caches index tables on devices.
        some: Leave out sites whose rows weren't kept, instead of raising CacheError.
    """
    picks = picks or RowTables()
    rows = in_memory(rows, index)
    if isinstance(rows, InterpolatedRows):
        first = pick(rows.first, index, device, picks, some)
        return rows.mixed(first, pick(rows.second, index, device or first.device, picks, some))
    if isinstance(rows, RowSubset):
        return pick(rows.rows, picks.places(rows, index, some), device, picks)

    def crossed(held: Tensor) -> Tensor:
        chosen = select(read_here(held), picks.on(index, held.device))
        return chosen if device is None else moved(chosen, device)

    return crossed(rows) if isinstance(rows, Tensor) else rows.mapped(crossed).whole()


def device_of(rows: Rows) -> torch.device:
    """Return the device of rows; of interpolated rows, that of the first step."""
    if isinstance(rows, InterpolatedRows):
        return device_of(rows.first)
    if isinstance(rows, StoredRows) and not rows.value.is_read:
        return CPU
    return tensors_of(rows)[0].device


def whole(rows: Rows) -> Tensor:
    """Return all rows in full precision."""
    return rows if isinstance(rows, Tensor) else rows.whole()


def tensors_of(rows: Rows) -> tuple[Tensor, ...]:
    """Return the tensors that hold the rows."""
    return (rows,) if isinstance(rows, Tensor) else rows.tensors()


def memory_of(rows: Rows) -> tuple[Tensor, ...]:
    """Return all tensors that rows occupy: their values, and which sites they belong to."""
    if isinstance(rows, InterpolatedRows):
        return (*memory_of(rows.first), *memory_of(rows.second))
    if isinstance(rows, StoredRows):
        return memory_of(rows.found if rows.value.is_read else rows.shown)
    return (*tensors_of(rows), rows.sites) if isinstance(rows, RowSubset) else tensors_of(rows)


def mapped(rows: Rows, change: Callable[[Tensor], Tensor]) -> Rows:
    """Return the rows with each tensor changed, e.g. moved."""
    return change(rows) if isinstance(rows, Tensor) else rows.mapped(change)


def by_element(rows: Rows, change: Callable[[Tensor], Tensor]) -> Rows:
    """Return the rows with each tensor that has a batch axis changed."""
    if isinstance(rows, InterpolatedRows):
        first, second = by_element(rows.first, change), by_element(rows.second, change)
        return InterpolatedRows(first, second, rows.weight)
    if isinstance(rows, StoredRows):
        shown, elements = by_element(rows.shown, change), None
        assert not isinstance(shown, InterpolatedRows | StoredRows), "values are of one step"
        if isinstance(change, Elements) and change.batch is not None:
            known = tuple(range(change.batch)) if rows.elements is None else rows.elements
            elements = tuple(known[number] for number in change.chosen)
        return StoredRows(rows.value, shown, OfElements(rows.made, change), elements)
    if isinstance(rows, RowSubset):
        inner = rows.rows
        changed = change(inner) if isinstance(inner, Tensor) else inner.mapped(change)
        return RowSubset(changed, rows.sites)
    return mapped(rows, change)


def row_bytes(rows: Rows) -> int:
    """Return the bytes of one site of every batch element, as they are stored."""
    if isinstance(rows, InterpolatedRows):
        return row_bytes(rows.first) + row_bytes(rows.second)
    if isinstance(rows, StoredRows):
        return row_bytes(rows.shown)
    inner = rows.rows if isinstance(rows, RowSubset) else rows
    return inner.nbytes // max(tensors_of(inner)[0].shape[1], 1)


def packed(rows: Rows, wanted: Format) -> Rows:
    """Return the rows in a format; rows that are packed already stay unchanged."""
    if isinstance(rows, RowSubset):
        inner = rows.rows
        return RowSubset(pack(inner, wanted), rows.sites) if isinstance(inner, Tensor) else rows
    return pack(rows, wanted) if isinstance(rows, Tensor) else rows
