"""Recorded steps whose rows stay in a store until an edit reads them.

All else of a step is read at once. A step that was stored without checksums of its tensors can't be
read like this.
"""

from __future__ import annotations

import contextlib
import mmap
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from math import prod
from threading import Lock
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from maskfx.errors import CacheError
from maskfx.ir.json_values import Document
from maskfx.runtime.cache.quantize import Packed
from maskfx.runtime.cache.rows import RowSubset, StoredRows
from maskfx.runtime.cache.serialize import (
    CHECK,
    LENGTH,
    PIECE_BYTES,
    PIECES,
    SUM_BYTES,
    SUMS,
    StepReader,
    check_of,
    piece_sum,
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

    @property
    def elsewhere(self) -> bool:
        """Whether another process of this machine can read them."""
        return self.reader.parts.elsewhere

    def __reduce__(self) -> tuple[object, ...]:
        return RangedTensors, (self.reader, self.ref, self.nbytes)

    def _unchecked(self, name: str) -> Tensor:
        if name not in self._fetched:
            self._fetched[name] = self.reader.bytes_of(name)
        return self.reader.shown(name)

    def _checked(self, name: str) -> Tensor:
        return self.reader.checked(name, self._fetched.get(name))


@dataclass(eq=False)
class RangedTensors(StoredTensors):
    """Tensors of which the rows of some sites are read alone, each piece once.

    Memory is taken for pieces that are read.
    """

    _pieces: dict[str, TensorPieces] = field(default_factory=dict)

    def fetch(self) -> None:
        """Do nothing: what is read is known at the first use."""

    def read(self) -> Tensor | Packed:
        found = self.read_rows(torch.arange(self.ref["shape"][1]), None)
        self._found = found
        return found

    def read_rows(self, sites: Tensor, elements: Sequence[int] | None) -> Tensor | Packed:
        batch, count = self.ref["shape"][:2]
        chosen = range(batch) if elements is None else elements
        rows = np.concatenate([sites.numpy() + number * count for number in chosen])

        def at_rows(name: str) -> Tensor:
            if name not in self._pieces:
                self._pieces[name] = TensorPieces(self.reader, name)
            return self._pieces[name].at(rows, batch * count)

        with self._lock:
            found = self._found
            return self.reader.values(self.ref, at_rows) if found is None else found


class TensorPieces:
    """A tensor of which pieces are read when rows of them are wanted.

    Args:
        reader: Reads it.
        name: Its name.
    """

    def __init__(self, reader: PartReader, name: str) -> None:
        self._reader, self._name = reader, name
        self._begin, end, dtype, shape = reader.place(name)
        self._nbytes, self._sums = end - self._begin, reader.piece_sums.get(name)
        self._missing = np.ones(-(-self._nbytes // PIECE_BYTES), bool)
        self._memory: Any = None
        self._tensor: Tensor | None = None
        if self._sums is not None:
            self._memory = mmap.mmap(-1, self._nbytes)
            count = prod(shape)
            self._tensor = torch.frombuffer(self._memory, dtype=dtype, count=count).reshape(shape)

    def at(self, rows: NDArray[np.int64], total: int) -> Tensor:
        """Return the tensor; these of its `total` rows are there."""
        if self._sums is None or self._nbytes % total:
            if self._tensor is None or self._missing.any():
                self._tensor = self._reader.checked(self._name)
                self._missing[:] = False
        else:
            self._read(wanted_pieces(rows, self._nbytes // total, len(self._missing)))
        assert self._tensor is not None
        return self._tensor

    def _read(self, wanted: NDArray[np.bool_]) -> None:
        new = np.flatnonzero(wanted & self._missing)
        for run in np.split(new, np.flatnonzero(np.diff(new) > 1) + 1):
            if len(run):
                start = int(run[0]) * PIECE_BYTES
                stop = min((int(run[-1]) + 1) * PIECE_BYTES, self._nbytes)
                self._take(start, self._reader.parts.read(self._begin + start, self._begin + stop))
        self._missing[new] = False

    def _take(self, start: int, data: Buffer) -> None:
        """Check the pieces of a range and keep them."""
        assert self._sums is not None
        view = memoryview(data)
        for at in range(0, len(view), PIECE_BYTES):
            piece = view[at : at + PIECE_BYTES]
            wanted = self._sums[(start + at) // PIECE_BYTES]
            if piece_sum(self._name, start + at, piece) != wanted:
                raise self._reader.damaged(self._name, len(piece))
        self._memory[start : start + len(view)] = view


def wanted_pieces(rows: NDArray[np.int64], width: int, pieces: int) -> NDArray[np.bool_]:
    """Return which pieces of a tensor have bytes of these rows, each of `width` bytes."""
    firsts, lasts = rows * width // PIECE_BYTES, (rows * width + width - 1) // PIECE_BYTES
    steps = np.zeros(pieces + 1, np.int64)
    np.add.at(steps, firsts, 1)
    np.add.at(steps, lasts + 1, -1)
    found: NDArray[np.bool_] = steps.cumsum()[:-1] > 0
    return found


@dataclass(frozen=True)
class TapRows:
    """Makes rows of a tap of the values in the store.

    Args:
        shape: The shape of the rows.
        sites: The sites that were kept; None: all.
    """

    shape: tuple[int, ...]
    sites: Tensor | None

    def __call__(self, value: Tensor | Packed) -> Tensor | Packed | RowSubset:
        rows: Tensor | Packed
        if isinstance(value, Packed):
            rows = replace(value, shape=self.shape[2:])
        else:
            rows = value.reshape(self.shape)
        return rows if self.sites is None else RowSubset(rows, self.sites)


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
        self.piece_sums = self._pieces_of(bytes.fromhex(self.metadata.get(PIECES, "")))
        self._known: dict[str, StoredTensors] = {}

    def __reduce__(self) -> tuple[object, ...]:
        return PartReader, (self.parts, self._data)

    def _pieces_of(self, sums: bytes) -> dict[str, list[bytes]]:
        """Return the checksums of the pieces of each large tensor."""
        found, at = {}, 0
        for name in sorted(self._sums) if sums else ():
            begin, end, *_ = self.place(name)
            if end - begin > PIECE_BYTES:
                count = -(-(end - begin) // PIECE_BYTES)
                starts = range(at, at + count * SUM_BYTES, SUM_BYTES)
                found[name] = [sums[start : start + SUM_BYTES] for start in starts]
                at += count * SUM_BYTES
        return found

    def tap_rows(self, ref: Document) -> StoredRows:
        """Return the rows of a tap, which are read at their first use."""
        at = ref["at"]
        if at not in self._known:
            names = [name for name in (at, at + ".scale") if name in self._sums]
            nbytes = sum(end - begin for begin, end, *_ in map(self.place, names))
            self._known[at] = StoredTensors(self, ref, nbytes)
        shown = self.values(ref, self.shown)
        sites = self.tensor(ref["sites"]) if "sites" in ref else None

        made = TapRows(tuple(ref["shape"]), sites)
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
            raise self.damaged(name, end - begin)
        if not data:
            return torch.empty(shape, dtype=dtype)
        return torch.frombuffer(data, dtype=dtype, count=prod(shape)).reshape(shape)

    def damaged(self, name: str, nbytes: int) -> CacheError:
        """Remove the entry, and return the error of bytes that aren't what was written."""
        self.parts.is_damaged()
        return CacheError(
            f"rows of a recorded step are damaged (tensor {name}, {nbytes} bytes); the step is "
            "removed; record its template again"
        )
