"""Rows in a store of which another process reads those that it needs, piece by piece."""

from __future__ import annotations

import pickle
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from maskfx.errors import CacheError
from maskfx.runtime.cache import serialize, stored_steps
from maskfx.runtime.cache.quantize import Format, pack
from maskfx.runtime.cache.rows import Rows, RowSubset, StoredRows, pick, references, whole
from maskfx.runtime.cache.serialize import encode
from maskfx.runtime.cache.step_cache import StepCache
from maskfx.runtime.cache.stored_steps import decode_parts
from maskfx.runtime.cache.stores.filesystem import Disk
from maskfx.runtime.cache.stores.store import Store
from maskfx.runtime.cache.stores.store_entry import HEADER
from tests.factories.step_caches import key

PIECE, SITES = 1 << 10, 400
READS: list[tuple[int, int]] = []  # offset and bytes, of all disks


@dataclass
class NotingDisk(Disk):
    """Notes what is read at places in files."""

    reads: list[tuple[int, int]] = field(default_factory=lambda: READS)

    def read_at(self, file: int, into: memoryview, offset: int) -> int:
        READS.append((offset, len(into)))
        return super().read_at(file, into, offset)


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (serialize, stored_steps):
        monkeypatch.setattr(module, "PIECE_BYTES", PIECE)
    monkeypatch.setattr(stored_steps, "BEGINNING", 64)


def recorded() -> StepCache:
    numbers = torch.Generator().manual_seed(0)

    def rows(count: int) -> Tensor:
        return torch.randn(2, count, 24, generator=numbers)

    kept = torch.arange(0, SITES, 2, dtype=torch.int32)
    found: dict[str, Rows] = {
        "plain": rows(SITES),
        "packed": pack(rows(SITES), Format.INT8),
        "some": RowSubset(rows(len(kept)), kept),
        "small": rows(2),
    }
    return StepCache("p", {"batch": 2}, torch.float32, [], {}, rows=found)


def sent(root: Path, cache: StepCache) -> StepCache:
    """The step as another process has it that opens the store itself."""
    store = Store(root, disk=NotingDisk())
    assert store.put(key(), encode(cache))
    return opened(root)


def opened(root: Path) -> StepCache:
    parts = Store(root, disk=NotingDisk()).parts(key())
    assert parts is not None
    here = decode_parts(parts)
    assert here is not None
    with references.kept():
        there: StepCache = pickle.loads(pickle.dumps(here))
    READS.clear()
    return there


def payload_reads() -> list[int]:
    return [nbytes for _, nbytes in READS if nbytes != HEADER.size]


@pytest.mark.parametrize("tap", ["plain", "packed", "some", "small"])
def test_rows_of_some_sites_are_read_alone_and_once(tap: str, tmp_path: Path) -> None:
    cache = recorded()
    rows = sent(tmp_path, cache).rows[tap]
    assert isinstance(rows, StoredRows)
    index = torch.tensor([0] if tap == "small" else [0, 2, 4, 390])
    wanted: Any = cache.rows[tap]
    assert torch.equal(pick(rows, index), pick(wanted, index))
    read = sum(payload_reads())
    if tap != "small":
        assert 0 < read <= 16 * PIECE < rows.nbytes
    READS.clear()
    assert torch.equal(pick(rows, index[:1]), pick(wanted, index[:1]))
    assert not READS
    if tap != "some":
        assert torch.equal(whole(rows), whole(wanted))
        READS.clear()
        assert torch.equal(whole(rows), whole(wanted))
        assert not READS


def test_a_sample_reads_its_own_rows(tmp_path: Path) -> None:
    cache = recorded()
    there, index = sent(tmp_path, cache), torch.arange(SITES)
    parts = [there.of_elements([number]) for number in (1, 0)]
    assert torch.equal(pick(parts[0].rows["plain"], index), whole(cache.rows["plain"])[1:])
    half = sum(payload_reads())
    assert half < whole(cache.rows["plain"]).nbytes // 2 + 2 * PIECE
    again: StepCache
    with references.kept():
        again = pickle.loads(pickle.dumps(parts[1]))
    READS.clear()
    assert torch.equal(pick(again.rows["plain"], index), whole(cache.rows["plain"])[:1])
    assert sum(payload_reads()) < whole(cache.rows["plain"]).nbytes // 2 + 2 * PIECE


def test_a_damaged_piece_is_found_where_it_is_read(tmp_path: Path) -> None:
    cache = recorded()
    there = sent(tmp_path, cache)
    first, last = torch.tensor([100]), torch.tensor([SITES - 1])
    pick(there.rows["plain"], last)
    place = next(offset for offset, nbytes in READS if nbytes != HEADER.size)
    (path,) = tmp_path.glob("*.maskfx")
    data = bytearray(path.read_bytes())
    data[place + 5] ^= 1
    path.write_bytes(data)
    fresh = opened(tmp_path)
    assert torch.equal(pick(fresh.rows["plain"], first), pick(cache.rows["plain"], first))
    with pytest.raises(CacheError, match="are damaged"):
        pick(fresh.rows["plain"], last)
    assert not path.exists()


def test_rows_are_pickled_in_memory_without_references(tmp_path: Path) -> None:
    sent(tmp_path, recorded())
    parts = Store(tmp_path).parts(key())
    assert parts is not None
    here = decode_parts(parts)
    assert here is not None
    assert isinstance(pickle.loads(pickle.dumps(here.rows["plain"])), Tensor)
