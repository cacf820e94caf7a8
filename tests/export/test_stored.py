"""A store's recorded steps, read without torch: the same values as the runtime reads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import xxhash

from maskfx.errors import CacheError
from maskfx.export.host import find_steps, read_step
from maskfx.export.host.arrays import Array
from maskfx.export.host.recording import rows_at
from maskfx.export.host.stored import HEADER, decode_step
from maskfx.runtime.cache.quantize import Encoding, Format
from maskfx.runtime.cache.rows import RowSubset, pick
from maskfx.runtime.cache.serialize import SCHEMA, decode, encode
from maskfx.runtime.cache.stores.store import Store
from maskfx.runtime.sites.masks import Masks, Reach
from tests.export.hosted import array
from tests.factories.step_caches import a_step, key

DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
FORMATS = (Format.KEEP, Format.FP16, Format.BF16, Format.INT8, Format.INT4)


def same(found: Array, wanted: torch.Tensor) -> None:
    expected = array(wanted)
    assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_are_those_that_the_runtime_reads(dtype: torch.dtype, format: Format):
    payload = encode(a_step(1, dtype), Encoding(format, format, stats=format))
    found, wanted = decode_step(payload), decode(payload)
    index = torch.tensor([0, 3, 4, 22, 23])
    for tap, rows in wanted.rows.items():
        same(rows_at(found.rows[tap], index.numpy()), pick(rows, index))
    for group, stats in wanted.stats.items():
        own = found.stats[group]
        same(rows_at(own.values, index.numpy()), pick(stats.values, index))
        same(own.total, stats.total)
        same(own.centre, stats.centre)
        same(own.size, stats.size)
    same(found.output[0], wanted.output[0])
    assert found.output[1:6] == [None, 3, 0.1, "sample", [True, [1, 2]]]
    same(found.step["timestep"], wanted.step["timestep"])
    assert (found.code, found.weights, found.sizes) == (
        wanted.program,
        wanted.weights,
        wanted.sizes,
    )
    assert found.masks is not None
    assert wanted.masks is not None
    same(found.masks[0], wanted.masks.ever)


@pytest.mark.parametrize("format", [Format.KEEP, Format.INT8])
def test_rows_of_some_sites_are_read_by_site(format: Format):
    sites, other = torch.tensor([1, 4, 5, 9], dtype=torch.int32), torch.tensor([2, 3])
    step = a_step(2)
    step.masks = None
    reach = Reach(dict.fromkeys(step.rows, sites), dict.fromkeys(step.stats, other.int()),
                  dict.fromkeys(step.stats, sites))  # fmt: skip
    kept = step.within(Masks.anywhere(4, 6), reach).packed(Encoding(format))
    payload = encode(kept)
    found, wanted = decode_step(payload), decode(payload)
    index = torch.tensor([1, 5, 9])
    for tap, rows in wanted.rows.items():
        assert isinstance(rows, RowSubset)
        same(rows_at(found.rows[tap], index.numpy()), pick(rows, index))
        with pytest.raises(CacheError, match="reads 1 sites whose rows weren't kept"):
            rows_at(found.rows[tap], np.array([1, 2]))
    for group, stats in wanted.stats.items():
        picked = pick(stats.values, torch.tensor([1, 2, 3]), some=True)
        same(rows_at(found.stats[group].values, np.array([1, 2, 3]), some=True), picked)


def store_of(folder: Path, **other: Any) -> tuple[Store, Path]:
    store, entry = Store(folder), key(schema=SCHEMA, **other)
    store.put(entry, encode(a_step(), labels=entry.labels()))
    return store, store.path(entry.digest())


def test_steps_of_a_store_are_found_by_their_labels(tmp_path: Path):
    store_of(tmp_path, template="cat", step=3)
    _, wanted = store_of(tmp_path, template="cat", step=4)
    (tmp_path / "foreign.maskfx").write_bytes(b"no entry")
    found = {step.labels["step"]: step.path for step in find_steps(tmp_path, template="cat")}
    assert sorted(found) == ["3", "4"]
    assert list(find_steps(tmp_path, template="dog")) == []
    [step] = find_steps(tmp_path, template="cat", step=4)
    assert step.path == wanted
    same(read_step(step.path, xxhash.xxh3_128_digest).output[0], a_step().output[0])


def cut(data: bytearray) -> None:
    del data[-5:]


def turn_a_bit(data: bytearray) -> None:
    data[-9] ^= 1


def rename_magic(data: bytearray) -> None:
    data[:4] = b"zzzz"


def rename_key(data: bytearray) -> None:
    data[12] ^= 1


def shorten(data: bytearray) -> None:
    del data[20:]


@pytest.mark.parametrize(
    ("damage", "wanted"),
    [
        (cut, r"holds \d+ bytes of \d+"),
        (turn_a_bit, "its hash differs"),
        (rename_magic, "no entry of a store"),
        (rename_key, "isn't the digest of its key"),
        (shorten, "shorter than a header"),
    ],
)
def test_a_damaged_file_is_refused(tmp_path: Path, damage: Any, wanted: str):
    _, path = store_of(tmp_path)
    data = bytearray(path.read_bytes())
    damage(data)
    path.write_bytes(data)
    with pytest.raises(CacheError, match=wanted):
        read_step(path, xxhash.xxh3_128_digest)


def test_a_step_of_another_schema_and_foreign_bytes_are_refused(tmp_path: Path):
    payload = encode(a_step())
    with pytest.raises(CacheError, match="are no recorded step"):
        decode_step(payload[:100])
    with pytest.raises(CacheError, match="has schema 7, this maskfx reads"):
        decode_step(payload.replace(b'\\"schema\\": 5', b'\\"schema\\": 7'))


def test_a_missing_file_is_named(tmp_path: Path):
    with pytest.raises(CacheError, match=r"gone\.maskfx can't be read"):
        read_step(tmp_path / "gone.maskfx")
    assert HEADER.size == 68


def test_rows_between_two_steps_are_interpolated():
    steps = [a_step(n) for n in (1, 2, 3)]
    own, first, second = (decode_step(encode(step)) for step in steps)
    found = own.served_by(first, second, 0.25)
    wanted = steps[0].served_by(steps[1], steps[2], 0.25)
    index = torch.tensor([0, 5, 23])
    for tap, rows in wanted.rows.items():
        np.testing.assert_allclose(
            rows_at(found.rows[tap], index.numpy()), array(pick(rows, index)), rtol=1e-5, atol=1e-6
        )
    for group, stats in wanted.stats.items():
        np.testing.assert_allclose(found.stats[group].total, array(stats.total), rtol=1e-12)
        np.testing.assert_allclose(found.stats[group].centre, array(stats.centre), rtol=1e-5)
    same(found.output[0], steps[0].output[0])
