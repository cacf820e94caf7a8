"""A recorded step as bytes: nothing is lost that may not be, and what is lost is measured."""

from __future__ import annotations

import json
from dataclasses import fields, replace
from typing import Any

import pytest
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from maskfx.errors import CacheError
from maskfx.runtime.cache.quantize import Encoding, Format, Packed
from maskfx.runtime.cache.rows import whole
from maskfx.runtime.cache.serialize import decode, encode, read_labels, relative_error
from maskfx.runtime.cache.step_cache import StepCache, with_tensors
from tests.factories.step_caches import a_step, same

FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
LIMITS = {Format.FP16: 4e-4, Format.BF16: 3e-3, Format.INT8: 1e-2, Format.INT4: 0.15}


def of_samples(seed: int = 0, dtype: torch.dtype = torch.float32) -> StepCache:
    """A step that has those of samples too."""
    return replace(a_step(seed, dtype), samples=[a_step(seed + 1, dtype, sites=6)])


def round_trip(cache: StepCache, encoding: Encoding | None = None) -> StepCache:
    return decode(encode(cache, encoding or Encoding()))


def tensors(cache: StepCache) -> dict[str, Tensor]:
    return {tap: whole(rows) for tap, rows in cache.rows.items()}


def held(cache: StepCache, tap: str) -> Packed:
    rows = cache.rows[tap]
    assert isinstance(rows, Packed)
    return rows


# Nothing is lost.


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_a_step_comes_back_to_the_last_bit(dtype: torch.dtype):
    cache = of_samples(1, dtype)
    got = round_trip(cache)
    assert same(got, cache)
    assert got.nbytes() == cache.nbytes()
    assert got.constants == cache.constants  # as validate.py compares them


def test_every_field_is_covered_by_the_step_these_tests_use():
    cache = of_samples()
    empty = [f.name for f in fields(cache) if f.name != "sums" and not getattr(cache, f.name)]
    assert empty == []


@pytest.mark.parametrize(
    "value",
    [
        torch.tensor(3),
        torch.tensor([]),
        torch.zeros(2, 0, 3, dtype=torch.float16),
        torch.tensor([True, False]),
        torch.arange(5, dtype=torch.uint8),
        torch.arange(5, dtype=torch.int16),
        torch.randn(3, 2, dtype=torch.complex64),
        torch.randn(3, 2, dtype=torch.complex128).conj(),
        torch.randn(4).to(torch.float8_e4m3fn),
        torch.arange(4).to(torch.uint32),
        torch.randn(4, 6).t(),
        torch.randn(4, 6)[1:, ::2],
        torch.randn(1, 6).expand(4, 6),
        torch.tensor([float("nan"), float("inf"), -0.0, 1e-45]),
        torch.nn.Parameter(torch.randn(3)).detach(),
    ],
    ids=lambda v: f"{v.dtype}{list(v.shape)}",
)
def test_tensors_of_all_kinds_come_back(value: Tensor):
    cache = a_step()
    cache.output, cache.rows, cache.step = [value], {"x": value}, {"t": value}
    assert same(round_trip(cache), cache)


PLAIN = st.none() | st.booleans() | st.integers() | st.floats() | st.text()
NESTED = st.recursive(
    PLAIN | st.sampled_from(FLOATS),
    lambda inner: (
        st.lists(inner) | st.lists(inner).map(tuple) | st.dictionaries(st.text(), inner, max_size=3)
    ),
    max_leaves=8,
)


@settings(max_examples=60, deadline=None, derandomize=True, database=None)
@given(values=st.lists(NESTED, max_size=4))
def test_values_that_are_no_tensors_come_back(values: list[Any]):
    cache = StepCache("p", {"batch": 1}, torch.float32, values, {}, "", list(values))
    assert same(round_trip(cache), cache)


def test_sums_are_dropped_and_follow_from_the_rows():
    cache = a_step()
    wanted = cache.total_of("halo")
    got = round_trip(cache)
    assert got.sums == {}
    assert torch.equal(got.total_of("halo"), wanted)
    assert got.nbytes() == cache.nbytes()


def test_rows_that_share_memory_are_stored_once_and_share_it_again():
    cache = a_step()
    before = len(encode(cache))
    cache.rows["again"] = cache.rows["halo"]
    cache.rows["reshaped"] = whole(cache.rows["halo"]).flatten(1)
    assert len(encode(cache)) < before + 1000
    got = round_trip(cache)
    assert same(got, cache)
    assert got.nbytes() == cache.nbytes()
    cache.rows["parts"] = whole(cache.rows["halo"]).unflatten(2, (4, -1))
    rounded = cache.packed(Encoding(rows=Format.INT8))
    got = round_trip(rounded)
    assert same(got, rounded)
    assert got.nbytes() == rounded.nbytes()
    for step in (rounded, got):
        assert whole(step.rows["reshaped"]).shape == whole(cache.rows["reshaped"]).shape
        assert whole(step.rows["parts"]).shape == whole(cache.rows["parts"]).shape
        for tap in ("again", "parts"):
            assert held(step, tap).stored.data_ptr() == held(step, "halo").stored.data_ptr()


def test_only_the_rows_of_the_taps_asked_for_are_kept():
    cache = a_step()
    got = decode(encode(cache, keep={"keys", "unknown"}))
    assert list(got.rows) == ["keys"]
    assert same(got.stats, cache.stats)
    assert got.nbytes() == cache.nbytes() - 2 * cache.rows["keys"].nbytes


def test_the_bytes_are_a_safetensors_file():
    cache = a_step()
    tensors = safetensors.torch.load(encode(cache))
    assert any(torch.equal(t, whole(cache.rows["keys"])) for t in tensors.values())


def test_labels_can_be_read_without_the_rest():
    data = encode(a_step(), labels={"template": "köln", "step": "3"})
    assert read_labels(data) == {"template": "köln", "step": "3"}
    assert read_labels(data[:50]) == {}
    assert read_labels(b"") == {}


def test_with_tensors_changes_all_and_shares_what_was_shared():
    cache = a_step()
    cache.rows["again"] = cache.rows["halo"]
    cache.total_of("keys")
    seen = []
    got = with_tensors(cache, lambda t: seen.append(t) or t.clone())  # type: ignore[func-returns-value]
    assert same(got, cache)
    assert got.nbytes() == cache.nbytes()
    assert got.rows["again"] is got.rows["halo"]
    assert not {t.data_ptr() for t in seen} & {whole(t).data_ptr() for t in got.rows.values()}
    assert got.output[6]["a"].data_ptr() != cache.output[6]["a"].data_ptr()


# What is lost, and how much.


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("format", list(LIMITS), ids=str)
def test_smaller_formats_stay_within_their_error(format: Format, dtype: torch.dtype):
    cache = a_step(2, dtype, sites=64, width=1280)
    got = round_trip(cache, Encoding(rows=format, output=format))
    for tap, rows in tensors(cache).items():
        back = whole(got.rows[tap])
        assert back.dtype == dtype
        assert back.shape == rows.shape
        assert relative_error(back, rows) < LIMITS[format]
        if rows.element_size() > (1 if format is Format.INT8 else 2):
            assert not same(back, rows)  # or this compares a thing with itself
    assert relative_error(got.output[0], cache.output[0]) < LIMITS[format]
    # what must not be rounded isn't
    for part in ("stats", "step", "constants", "sizes", "weights", "program", "dtype"):
        assert same(getattr(got, part), getattr(cache, part))


@pytest.mark.parametrize("format", list(LIMITS), ids=str)
def test_packed_rows_are_written_as_they_are_and_come_back_packed(format: Format):
    encoding = Encoding(format, format, {"halo": Format.KEEP}, stats=format)
    packed = a_step(4, sites=8).packed(encoding)
    for wanted in (Encoding(), encoding, Encoding(rows=Format.INT8)):  # nothing is rounded twice
        got = round_trip(packed, replace(wanted, stats=Format.INT8))
        assert same(got.rows["keys"], packed.rows["keys"])
        assert same(got.stats, packed.stats)
    assert same(round_trip(packed), packed)
    assert same(round_trip(a_step(4, sites=8), encoding), packed)  # rounded before or by encode


@pytest.mark.parametrize("width", [128, 640, 1280, 3072])
def test_eight_bits_halve_the_bytes_of_sixteen(width: int):
    cache = a_step(3, torch.bfloat16, sites=256, width=width, batch=1)
    cache.stats, cache.output = {}, []
    sixteen, eight = encode(cache), encode(cache, Encoding(rows=Format.INT8))
    assert len(eight) / len(sixteen) < 0.53
    rounded = cache.packed(Encoding(rows=Format.INT8)).rows
    for tap, rows in cache.rows.items():
        assert 0 < relative_error(whole(rounded[tap]), whole(rows)) < 0.01, tap


def test_a_tap_may_have_a_format_of_its_own():
    cache = a_step()
    got = round_trip(cache, Encoding(rows=Format.INT8, taps={"halo": Format.KEEP}))
    assert same(got.rows["halo"], cache.rows["halo"])
    assert not same(got.rows["keys"], cache.rows["keys"])
    assert Encoding().lossless
    assert not Encoding(taps={"halo": Format.BF16}).lossless


@settings(max_examples=60, deadline=None, derandomize=True, database=None)
@given(
    shape=st.lists(st.integers(1, 6), max_size=5),
    dtype=st.sampled_from(FLOATS),
    format=st.sampled_from(list(Format)),
    seed=st.integers(0, 1000),
)
def test_any_shape_comes_back_in_its_shape(
    shape: list[int], dtype: torch.dtype, format: Format, seed: int
):
    value = torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)
    cache = StepCache("p", {"batch": 1}, dtype, [], {}, rows={"x": value})
    got = whole(round_trip(cache, Encoding(rows=format)).rows["x"])
    assert got.dtype == dtype
    assert got.shape == value.shape
    assert relative_error(got, value) < (0.15 if format is Format.INT4 else 0.02)


def test_relative_error_measures():
    wanted = torch.tensor([3.0, 4.0])
    assert relative_error(wanted, wanted) == 0
    assert relative_error(torch.tensor([3.0, 4.5]), wanted) == pytest.approx(0.1)
    assert relative_error(torch.zeros(2), torch.zeros(2)) == 0
    assert relative_error(torch.ones(2), torch.zeros(2)) == float("inf")


# What can't be stored, and what isn't ours.


class Other:
    pass


@pytest.mark.parametrize(
    ("part", "value", "said"),
    [
        ("constants", [1, Other()], r"StepCache.constants\[1\] is a Other"),
        ("output", [[1, {2: 3}]], r"StepCache.output\[0\]\[1\] is a dict"),
        ("output", [{"a": {1, 2}}], r"StepCache.output\[0\].a is a set"),
        ("constants", [torch.Size([1])], r"StepCache.constants\[0\] is a Size"),
    ],
)
def test_refuses_what_json_has_no_word_for(part: str, value: list[Any], said: str):
    cache = a_step()
    setattr(cache, part, value)
    with pytest.raises(CacheError, match=said):
        encode(cache)


def test_refuses_another_schema():
    data = encode(a_step())
    assert data.count(b'\\"schema\\": 5,') == 1
    with pytest.raises(CacheError, match="schema 6, this maskfx reads 5; record it again"):
        decode(data.replace(b'\\"schema\\": 5,', b'\\"schema\\": 6,'))


def test_bytes_that_are_no_step_are_refused_by_name():
    for data in (b"", b"\0" * 8, b"\xff" * 100, safetensors.torch.save({"a": torch.ones(1)})):
        with pytest.raises(CacheError, match="no recorded step"):
            decode(data)


def test_a_tensor_of_another_size_than_its_bytes_is_refused():
    cache = a_step()
    cache.rows = {"x": torch.zeros(6, 1)}
    data = encode(cache)
    for said in (b'"shape":[5,1]', b'"shape":[7,1]'):
        changed = data.replace(b'"shape":[6,1]', said)
        assert changed != data
        with pytest.raises(CacheError, match="has 24 bytes for"):
            decode(changed)


@settings(max_examples=300, deadline=None, derandomize=True, database=None)
@given(
    place=st.floats(0, 1, exclude_max=True),
    value=st.integers(0, 255),
    cut=st.booleans(),
    format=st.sampled_from([Format.KEEP, Format.FP16, Format.INT8]),
)
def test_damaged_bytes_never_raise_anything_else(
    place: float, value: int, cut: bool, format: Format
):
    data = bytearray(encode(a_step(sites=2, width=32), Encoding(rows=format)))
    header = 8 + int.from_bytes(data[:8], "little")
    at = int(place * header)
    data[at] = value
    if cut:
        del data[at:]
    try:
        got = decode(data)
    except CacheError:
        return
    assert isinstance(got, StepCache)
    assert all(isinstance(rows, Tensor) for rows in map(whole, got.rows.values()))


def test_a_decoded_step_is_made_of_views_and_holds_no_more_than_it_counts():
    for encoding in (Encoding(), Encoding(rows=Format.INT8), Encoding(rows=Format.BF16)):
        data = bytearray(encode(a_step(), encoding))
        begin = torch.frombuffer(data, dtype=torch.uint8).data_ptr()
        seen: list[Tensor] = []
        got = with_tensors(decode(data), lambda t, seen=seen: seen.append(t) or t)  # type: ignore[misc]
        assert all(begin <= t.data_ptr() < begin + len(data) for t in seen)
        assert len(data) - got.nbytes() < 5000  # and the rest is the header


def test_the_document_is_readable():
    data = encode(a_step())
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    document = json.loads(header["__metadata__"]["maskfx"])
    assert list(document["rows"]) == ["keys", "values", "halo"]
