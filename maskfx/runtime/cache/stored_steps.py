"""Recorded steps whose rows stay in a store until an edit reads them.

All else of a step is read at once. A step that was stored without checksums of its tensors can't be
read like this.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field, replace
from math import prod
from threading import Lock

import torch
from torch import Tensor

from maskfx.errors import CacheError
from maskfx.ir.json_values import Document
from maskfx.runtime.cache.quantize import Packed
from maskfx.runtime.cache.rows import RowSubset, StoredRows
from maskfx.runtime.cache.serialize import (
    CHECK,
    LENGTH,
    SUM_BYTES,
    SUMS,
    StepReader,
    check_of,
    sum_of_bytes,
)
from maskfx.runtime.cache.step_cache import StepCache
from maskfx.runtime.cache.stores.entry_parts import EntryParts
from maskfx.runtime.cache.stores.read_speed import ReadSpeed
from maskfx.runtime.cache.stores.store_entry import Buffer

BEGINNING = 1 << 16  # bytes that are read first


def decode_parts(parts: EntryParts) -> StepCache | None:
    """Return a step whose rows are read later; None if it has no checksums.

    Raises CacheError if it is damaged.
    """
    try:
        beginning = bytearray(parts.read(0, min(BEGINNING, parts.nbytes)))
        (length,) = LENGTH.unpack_from(beginning)
        end = LENGTH.size + length
        if end > parts.nbytes:
            raise ValueError(f"a header of {length} bytes in {parts.nbytes}")
        if end > len(beginning):
            beginning += parts.read(len(beginning), end)
        reader = PartReader(parts, beginning)
        return reader.step() if reader.is_checked else None
    except CacheError:
        raise
    except Exception as error:  # foreign bytes may fail in any way
        raise CacheError(
            f"an entry of {parts.nbytes} bytes is no recorded step "
            f"({type(error).__name__}: {error}); it is removed; record again"
        ) from error


@dataclass(eq=False)
class StoredTensors:
    """The tensors that rows are made of, read together at their first use (a `StoredValue`)."""

    reader: PartReader
    ref: Document
    nbytes: int
    _lock: Lock = field(default_factory=Lock)
    _fetched: dict[str, Buffer] = field(default_factory=dict)  # by the name of the tensor
    _found: Tensor | Packed | None = None

    @property
    def is_read(self) -> bool:
        return self._found is not None

    @property
    def speed(self) -> ReadSpeed:
        return self.reader.parts.speed

    def fetch(self) -> None:
        """Bring the bytes into memory; they are checked by `read`, which raises what goes wrong."""
        with self._lock, contextlib.suppress(CacheError):
            if self._found is None:
                self.reader.values(self.ref, self._unchecked)

    def read(self) -> Tensor | Packed:
        """Return the rows; raise CacheError if they are gone or damaged."""
        with self._lock:
            if self._found is None:
                self._found = self.reader.values(self.ref, self._checked)
                self._fetched.clear()
            return self._found

    def _unchecked(self, name: str) -> Tensor:
        if name not in self._fetched:
            self._fetched[name] = self.reader.bytes_of(name)
        return self.reader.shown(name)

    def _checked(self, name: str) -> Tensor:
        return self.reader.checked(name, self._fetched.get(name))


class PartReader(StepReader):
    """Reads a step from parts of an entry; `beginning` has at least the header of its payload."""

    def __init__(self, parts: EntryParts, beginning: bytearray) -> None:
        super().__init__(beginning, parts.nbytes)
        self.parts = parts
        self.is_checked = CHECK in self.metadata
        if self.is_checked and check_of(self.metadata) != self.metadata[CHECK]:
            raise CacheError("the header of a recorded step is damaged; record it again")
        sums, names = bytes.fromhex(self.metadata.get(SUMS, "")), sorted(self._header)
        each = (sums[at : at + SUM_BYTES] for at in range(0, len(sums), SUM_BYTES))
        self._sums = dict(zip((n for n in names if n != "__metadata__"), each, strict=False))
        self._known: dict[str, StoredTensors] = {}

    def tap_rows(self, ref: Document) -> StoredRows:
        """Return the rows of a tap, which are read at their first use."""
        at = ref["at"]
        if at not in self._known:
            names = [name for name in (at, at + ".scale") if name in self._sums]
            nbytes = sum(end - begin for begin, end, *_ in map(self.place, names))
            self._known[at] = StoredTensors(self, ref, nbytes)
        shown = self.values(ref, self.shown)
        sites = self.tensor(ref["sites"]) if "sites" in ref else None

        def made(value: Tensor | Packed) -> Tensor | Packed | RowSubset:
            shape = tuple(ref["shape"])
            if isinstance(value, Packed):
                rows: Tensor | Packed = replace(value, shape=shape[2:])
            else:
                rows = value.reshape(shape)
            return rows if sites is None else RowSubset(rows, sites)

        return StoredRows(self._known[at], made(shown), made)

    def shown(self, name: str) -> Tensor:
        """Return a tensor without values in the place of one that isn't read."""
        _, _, dtype, shape = self.place(name)
        return torch.empty(shape, dtype=dtype, device="meta")

    def raw(self, name: str) -> Tensor:
        """Read a tensor by its name, and check it."""
        return self.checked(name)

    def bytes_of(self, name: str) -> Buffer:
        """Read the bytes of a tensor, unless they are among the first ones."""
        begin, end, *_ = self.place(name)
        if end <= len(self._data):
            return memoryview(self._data)[begin:end]
        return self.parts.read(begin, end)

    def checked(self, name: str, data: Buffer | None = None) -> Tensor:
        """Return a tensor, whose bytes are read unless they are given, and check it."""
        begin, end, dtype, shape = self.place(name)
        if data is None:
            data = self.bytes_of(name)
        if sum_of_bytes(name, self._header[name]["dtype"], shape, data) != self._sums.get(name):
            self.parts.is_damaged()
            raise CacheError(
                f"rows of a recorded step are damaged (tensor {name}, {end - begin} bytes); the "
                "step is removed; record its template again"
            )
        if not data:
            return torch.empty(shape, dtype=dtype)
        return torch.frombuffer(data, dtype=dtype, count=prod(shape)).reshape(shape)
