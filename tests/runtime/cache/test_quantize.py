"""Packed rows: what a format does to values, and that edits by them are as by whole ones."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import maskfx
from maskfx.errors import CacheError
from maskfx.runtime.batch import flops
from maskfx.runtime.cache import quantize as packed_module
from maskfx.runtime.cache.quantize import Encoding, Format, Packed, pack
from maskfx.runtime.cache.rows import Rows, pick, tensors_of, whole
from maskfx.runtime.cache.serialize import relative_error
from maskfx.runtime.cache.step_cache import StepCache, with_tensors
from maskfx.runtime.cache.stores.store import Store
from maskfx.runtime.cache.tier_entry import Tier
from maskfx.runtime.cache.tiers import Tiers
from tests.factories.masks import MASKS
from tests.factories.step_caches import a_step, key, same
from tests.factories.zoo import ZOO, slow_unet
from tests.runtime.test_changed_inputs import other_inputs
from tests.runtime.test_oracle import denoiser_of, tensors

FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
ROUNDED = [Format.FP16, Format.BF16, Format.INT8]


def packed_rows(rows: Tensor, format: Format = Format.INT8) -> Packed:
    found = pack(rows, format)
    assert isinstance(found, Packed)
    assert found.format is format
    return found


def normal(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


# Formats.


def test_a_row_does_not_suffer_from_the_values_of_another():
    rows = normal(0, 1, 8, 256)
    alone = packed_rows(rows).whole()
    rows[0, 3] *= 1e6
    beside = packed_rows(rows).whole()
    others = [0, 1, 2, 4, 5, 6, 7]
    assert torch.equal(alone[:, others], beside[:, others])
    assert relative_error(beside[:, 3], rows[:, 3]) < 0.01


def test_an_outlier_coarsens_its_own_part_of_a_row_alone():
    rows = normal(0, 1, 64, 3072)
    rows[:, :, 7] = 50
    back = packed_rows(rows).whole()
    assert relative_error(back[:, :, 128:], rows[:, :, 128:]) < 0.01
    assert relative_error(back, rows) < 0.02  # a scale per row: 0.085


@pytest.mark.parametrize(
    ("features", "parts"), [(3072, 24), (320, 4), (2240, 20), (64, 1), (127, 1), (131, 1), (262, 1)]
)
def test_a_row_falls_into_even_parts(features: int, parts: int):
    scale = packed_rows(normal(0, 1, 2, features)).scale
    assert scale is not None
    assert scale.shape == (1, 2, parts)


@pytest.mark.parametrize(
    ("features", "parts", "bits"), [(640, 10, 4.25), (320, 5, 4.25), (160, 4, 4.4), (94, 2, 4.35)]
)
def test_four_bits_lie_two_to_a_byte(features: int, parts: int, bits: float):
    rows = normal(0, 2, 30, features)
    four = packed_rows(rows, Format.INT4)
    assert four.scale is not None
    assert four.scale.shape == (2, 30, parts)
    assert 8 * four.nbytes / rows.numel() == pytest.approx(bits, abs=0.01)
    assert 0.03 < relative_error(four.whole(), rows) < 0.12
    steps = torch.arange(-7, 8.0).repeat(10)[: features // 2 * 2]
    steps[::47] = 7  # so that each part reaches its last step
    exact = steps.expand(2, 30, -1)
    assert torch.equal(packed_rows(exact, Format.INT4).whole(), exact)


def test_pieces_give_what_the_whole_gives(monkeypatch):
    rows = normal(0, 2, 50, 96)
    at_once = packed_rows(rows).whole()
    monkeypatch.setattr("maskfx.ops.unpack.CACHED", 300)
    assert torch.equal(packed_rows(rows).whole(), at_once)


@pytest.mark.parametrize(
    ("value", "wanted", "used"),
    [
        (torch.full((2, 3, 64), 1e5), Format.FP16, Format.BF16),  # too large for fp16
        (torch.full((2, 3, 64), 1e300, dtype=torch.float64), Format.FP16, Format.KEEP),
        (torch.full((2, 3, 64), float("nan")), Format.INT8, Format.KEEP),
        (torch.full((2, 3, 64), float("nan")), Format.INT4, Format.KEEP),
        (torch.full((2, 3, 64), 1e6), Format.INT4, Format.INT8),  # its scale is no float16
        (torch.ones(2, 3, 65), Format.INT4, Format.INT8),  # two to a byte don't go
        (torch.ones(2, 3, 4), Format.INT4, Format.FP16),
        (torch.full((2, 3, 64), float("inf")), Format.INT8, Format.KEEP),
        (torch.full((2, 3, 64), float("inf")), Format.FP16, Format.FP16),
        (torch.ones(2, 3, 4), Format.INT8, Format.FP16),  # a scale each would be larger
        (torch.ones(2, 3), Format.INT8, Format.FP16),
        (torch.ones(2, 3, 64, dtype=torch.float16), Format.BF16, Format.KEEP),
        (torch.ones(2, 3, 64, dtype=torch.float8_e4m3fn), Format.INT8, Format.KEEP),
        (torch.ones(2, 3, 64, dtype=torch.int32), Format.INT8, Format.KEEP),
        (torch.zeros(0, 3, 64), Format.INT8, Format.KEEP),
        (torch.ones(64), Format.INT8, Format.KEEP),  # no sites
        (torch.tensor(1.0), Format.INT8, Format.KEEP),
    ],
)
def test_what_does_not_fit_a_format_gets_one_that_it_fits(
    value: Tensor, wanted: Format, used: Format
):
    rows = pack(value, wanted)
    if not isinstance(rows, Packed):
        assert used is Format.KEEP
        assert rows is value
        return
    assert rows.format is used
    back, value = rows.whole().double(), value.double()
    assert torch.equal(back.isfinite(), value.isfinite())
    if value.isfinite().all():
        assert relative_error(back, value) < 0.01


def test_zeros_and_tiny_rows_stay_small():
    rows = torch.zeros(1, 3, 128)
    rows[0, 1] = 1e-42
    rows[0, 2, 5] = -3.0
    small = packed_rows(rows)
    assert small.scale is not None
    assert small.scale.min() > 0  # dividing by 0 gives what no 8-bit step stands for
    back = small.whole()
    assert back[0, 0].abs().max() == 0
    assert back[0, 1].abs().max() < 1e-41
    assert torch.equal(back[0, 2], rows[0, 2])


@pytest.mark.parametrize(
    ("features", "ratio"), [(128, 0.5156), (160, 0.525), (320, 0.525), (640, 0.5156), (64, 0.5312)]
)
def test_eight_bits_take_half_of_sixteen_and_their_scales(features: int, ratio: float):
    rows = normal(1, 2, 10, features)
    sixteen, eight = packed_rows(rows, Format.FP16), packed_rows(rows)
    assert sixteen.nbytes == rows.nbytes / 2
    assert eight.nbytes / sixteen.nbytes == pytest.approx(ratio, abs=1e-3)
    assert relative_error(eight.whole(), rows) < 0.01
    assert relative_error(sixteen.whole(), rows) < 4e-4


# Picking.


@settings(max_examples=80, deadline=None, derandomize=True, database=None)
@given(
    batch=st.integers(1, 3),
    shape=st.sampled_from([(), (5,), (32,), (2, 160), (3, 131)]),
    dtype=st.sampled_from(FLOATS),
    format=st.sampled_from(list(Format)),
    index=st.lists(st.integers(0, 6), max_size=9),
    laid_out=st.booleans(),
)
def test_picked_rows_are_those_of_the_whole(
    batch: int,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    format: Format,
    index: list[int],
    laid_out: bool,
):
    value = normal(len(index), batch, 7, *shape).to(dtype)
    if not laid_out and shape:
        value = value.transpose(1, -1).contiguous().transpose(1, -1)
    rows = pack(value, format)
    sites = torch.tensor(index, dtype=torch.long)
    picked = pick(rows, sites)
    assert picked.dtype == dtype
    assert picked.shape == (batch, len(index), *shape)
    assert torch.equal(picked, whole(rows).index_select(1, sites))
    assert whole(rows).shape == value.shape


def test_no_other_row_is_widened(monkeypatch):
    rows = packed_rows(normal(0, 1, 1000, 64))
    widened: list[int] = []
    module: Any = packed_module
    widen = module.widen

    def watched(stored: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
        widened.append(stored.shape[1])
        return widen(stored, scale, dtype)

    monkeypatch.setattr(packed_module, "widen", watched)
    pick(rows, torch.tensor([3, 1]))
    assert widened == [2]


@pytest.mark.parametrize(
    "change",
    [
        {"scale": None},
        {"format": Format.FP16},
        {"shape": (63,)},
        {"stored": torch.zeros(1, 3, 64)},
        {"stored": torch.zeros(3, 64, dtype=torch.int8)},
        {"scale": torch.zeros(1, 2, 1)},
        {"scale": torch.zeros(1, 3, 5)},
        {"scale": torch.zeros(1, 3, 0)},
        {"scale": torch.zeros(1, 3, 1, dtype=torch.float16)},
    ],
)
def test_parts_that_do_not_fit_are_refused(change: dict[str, Any]):
    rows = packed_rows(normal(0, 1, 3, 64))
    with pytest.raises(CacheError, match="record the step again"):
        replace(rows, **change)


# A recorded step.


def unpacked(cache: StepCache) -> StepCache:
    """The same step with rows in full precision."""
    rows: dict[str, Rows] = {tap: whole(rows) for tap, rows in cache.rows.items()}
    stats = {k: replace(s, values=whole(s.values)) for k, s in cache.stats.items()}
    return replace(cache, rows=rows, stats=stats, sums={})


@pytest.mark.parametrize("format", ROUNDED, ids=str)
def test_a_step_is_rounded_once_and_only_where_told(format: Format):
    cache = a_step()
    cache.total_of("keys")
    got = cache.packed(Encoding(rows=format, taps={"halo": Format.KEEP}))
    assert isinstance(got.rows["keys"], Packed)
    assert got.rows["keys"].format is format
    assert got.rows["halo"] is cache.rows["halo"]
    for part in ("stats", "step", "constants", "sizes", "weights", "program", "dtype", "output"):
        assert same(getattr(got, part), getattr(cache, part))
    again = got.packed(Encoding(rows=Format.INT8, output=format, taps={"halo": Format.KEEP}))
    assert all(again.rows[tap] is got.rows[tap] for tap in got.rows)
    assert cache.packed(Encoding()) is cache
    assert isinstance(cache.rows["keys"], Tensor)  # the recording itself isn't touched


def test_statistics_are_rounded_if_told_and_their_sums_never():
    cache = a_step()
    got = cache.packed(Encoding(stats=Format.INT8))
    assert same(got.rows, cache.rows)
    for stats_key, stats in got.stats.items():
        wanted = cache.stats[stats_key]
        assert isinstance(stats.values, Packed)
        assert 0 < relative_error(whole(stats.values), whole(wanted.values)) < 0.01
        assert stats.total is wanted.total
        assert stats.centre is wanted.centre
    assert cache.nbytes() - got.nbytes() == sum(
        cache.stats[k].values.nbytes - s.values.nbytes for k, s in got.stats.items()
    )
    again = got.packed(Encoding(stats=Format.FP16, rows=Format.FP16))
    assert all(again.stats[k] is s for k, s in got.stats.items())


def test_outputs_are_rounded_too_if_told():
    cache = a_step()
    got = cache.packed(Encoding(output=Format.INT8))
    assert same(got.rows, cache.rows)
    assert isinstance(got.output[0], Tensor)
    assert 0 < relative_error(got.output[0], cache.output[0]) < 0.01
    assert same(got.output[1:], cache.output[1:])


def test_only_the_rows_asked_for_are_packed():
    cache = a_step()
    for encoding in (Encoding(), Encoding(rows=Format.INT8)):
        assert list(cache.packed(encoding, {"keys", "unknown"}).rows) == ["keys"]
    assert list(cache.rows) == ["keys", "values", "halo"]


def test_bytes_count_values_and_scales_and_what_is_shared_once():
    cache = a_step(sites=64, width=1280)
    eight, sixteen = (cache.packed(Encoding(rows=f)) for f in (Format.INT8, Format.FP16))
    rest = cache.nbytes() - sum(t.nbytes for t in map(whole, cache.rows.values()))
    by_hand = sum(t.nbytes for rows in eight.rows.values() for t in tensors_of(rows))
    assert eight.nbytes() == rest + by_hand
    assert (eight.nbytes() - rest) / (sixteen.nbytes() - rest) == pytest.approx(0.5156, abs=1e-3)
    cache.rows["again"] = cache.rows["halo"]
    cache.rows["parts"] = whole(cache.rows["halo"]).unflatten(2, (8, -1))
    shared = cache.packed(Encoding(rows=Format.INT8))
    assert shared.nbytes() == eight.nbytes()
    assert same(whole(shared.rows["parts"]).flatten(2), whole(shared.rows["halo"]))
    cache.rows["own"] = whole(cache.rows["halo"]).clone()
    assert cache.packed(Encoding(rows=Format.INT8)).nbytes() > eight.nbytes()


def test_sums_are_those_of_the_rounded_rows():
    cache = a_step()
    cache.total_of("halo")
    got = cache.packed(Encoding(rows=Format.INT8))
    assert torch.equal(got.total_of("halo"), unpacked(got).total_of("halo"))
    assert not torch.equal(got.total_of("halo"), cache.total_of("halo"))


def test_with_tensors_changes_values_and_scales_and_shares_what_was_shared():
    cache = a_step()
    cache.rows["again"] = cache.rows["halo"]
    packed = cache.packed(Encoding(rows=Format.INT8))
    seen: list[Tensor] = []
    got = with_tensors(packed, lambda t: seen.append(t) or t.clone())  # type: ignore[func-returns-value]
    assert same(got, packed)
    assert got.nbytes() == packed.nbytes()
    assert seen
    old = {t.data_ptr() for rows in packed.rows.values() for t in tensors_of(rows)}
    new = [t for rows in got.rows.values() for t in tensors_of(rows)]
    assert not old & {t.data_ptr() for t in new}
    assert {id(t) for t in tensors_of(got.rows["again"])} == {
        id(t) for t in tensors_of(got.rows["halo"])
    }


# Edits: the same, to the last bit, as from the same rows in full precision.

MODELS = [
    "UNet2DConditionModel-sd15",  # windows, keys and values, statistics
    "FluxTransformer2DModel",
    "SanaTransformer2DModel",  # products summed over sites
]


def an_edit(name: str, seed: int, kind: str, cache: StepCache) -> maskfx.EditStep:
    """An edit with another text and latent than the recorded ones."""
    case = ZOO[name]
    size = case.sizes[seed % len(case.sizes)]
    mask = MASKS[kind](case.mask_shape(size), seed)
    return maskfx.EditStep(other_inputs(name, size, 900 + seed, seed), mask, cache)


def record(name: str, seed: int) -> StepCache:
    case = ZOO[name]
    size = case.sizes[seed % len(case.sizes)]
    return denoiser_of(name).record(**case.inputs(size, seed))[1]


def same_tensors(one: Any, two: Any) -> bool:
    pairs = zip(tensors(one), tensors(two), strict=True)
    return all(torch.equal(a, b) for a, b in pairs)


@pytest.mark.parametrize("format", [Format.FP16, Format.INT8, Format.INT4], ids=str)
@pytest.mark.parametrize("name", slow_unet(MODELS))
def test_an_edit_does_not_see_that_rows_are_packed(name: str, format: Format) -> None:
    limit = {Format.FP16: 1e-3, Format.INT8: 0.02, Format.INT4: 0.25}[format]
    for seed, kind in ((0, "stroke"), (2, "random")):
        cache = record(name, seed)
        packed = cache.packed(Encoding(rows=format, stats=format))
        held = [*packed.rows.values(), *(stats.values for stats in packed.stats.values())]
        assert all(isinstance(rows, Packed) for rows in held)
        seen, wanted, lossless = (
            denoiser_of(name).edit([an_edit(name, seed, kind, c)])[0]
            for c in (packed, unpacked(packed), cache)
        )
        assert same_tensors(seen, wanted)
        assert not same_tensors(seen, lossless)  # or nothing of the recording was read
        error = relative_error(tensors(seen)[0], tensors(lossless)[0])
        assert error < limit


@pytest.mark.parametrize("name", slow_unet(MODELS))
def test_packed_and_unpacked_members_share_a_batch(name: str) -> None:
    formats = (Format.INT8, Format.KEEP, Format.FP16, Format.INT8, Format.BF16)
    caches = [record(name, i).packed(Encoding(rows=f, stats=f)) for i, f in enumerate(formats)]
    assert isinstance(next(iter(caches[1].rows.values())), Tensor)
    results = []
    for members in (caches, list(map(unpacked, caches))):
        steps: list[Any] = [an_edit(name, i, "stroke", c) for i, c in enumerate(members)]
        steps += [maskfx.RecordStep(ZOO[name].inputs(ZOO[name].sizes[0], 77))]
        results.append(denoiser_of(name).step(steps))
    (seen, (output, recorded)), (wanted, (_, again)) = ((r[:-1], r[-1]) for r in results)
    assert all(same_tensors(a, b) for a, b in zip(seen, wanted, strict=True))
    assert same(recorded, again)
    assert tensors(output)


@pytest.mark.parametrize("name", slow_unet(MODELS[:2]))
def test_an_edit_is_the_same_from_memory_and_from_disk(name: str, tmp_path: Path) -> None:
    encoding = Encoding(rows=Format.INT8, output=Format.BF16, stats=Format.FP16)
    caches = [record(name, 0), record(name, 5)]
    room = max(cache.packed(encoding).nbytes() for cache in caches)
    tiers = Tiers(Store(tmp_path), host_bytes=room, encoding=encoding)
    tiers.put(key(step=0), caches[0])
    seen = []
    for _ in range(2):
        found = tiers.get(key(step=0))
        assert found is not None
        result = denoiser_of(name).edit([an_edit(name, 0, "stroke", found.cache)])[0]
        seen.append((found.tier, result))
        tiers.put(key(step=1), caches[1])
    assert [tier for tier, _ in seen] == [Tier.HOST, Tier.DISK]
    whole_rows = unpacked(caches[0].packed(encoding))
    wanted = denoiser_of(name).edit([an_edit(name, 0, "stroke", whole_rows)])[0]
    assert all(same_tensors(result, wanted) for _, result in seen)


class Mean(nn.Module):
    """A mean over the picture: an edit reads the sum of the rest's rows."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.out = nn.Conv2d(4, 32, 1), nn.Conv2d(32, 4, 1)

    def forward(self, sample: Tensor, timestep: Tensor) -> tuple[Tensor]:
        value = F.silu(self.into(sample) + timestep.view(-1, 1, 1, 1) / 1000)
        return (self.out(value * value.mean((2, 3), keepdim=True)),)


def test_sums_over_sites_are_those_of_packed_rows() -> None:
    torch.manual_seed(0)
    denoiser = maskfx.compile(Mean().eval().requires_grad_(False))
    inputs = {"sample": normal(0, 2, 4, 8, 12), "timestep": torch.tensor([7, 7])}
    cache = denoiser.record(**inputs)[1]
    interface = next(iter(denoiser.programs.values())).interface
    assert set(flops.tap_kinds(interface).values()) == {"sums"}
    packed = cache.packed(Encoding(rows=Format.INT8))
    mask = MASKS["stroke"]((8, 12), 0)
    other = {**inputs, "sample": normal(1, 2, 4, 8, 12)}
    seen, wanted, lossless = (
        denoiser.edit([maskfx.EditStep(other, mask, c)])[0]
        for c in (packed, unpacked(packed), cache)
    )
    assert same_tensors(seen, wanted)
    assert 0 < relative_error(seen[0], lossless[0]) < 1e-3


def test_rows_loaded_for_a_plan_may_be_packed() -> None:
    name = "FluxTransformer2DModel"
    case = ZOO[name]
    denoiser = maskfx.compile(case.build(), plans=True)
    cache = denoiser.record(**case.inputs(case.sizes[0], 0))[1]
    packed = cache.packed(Encoding(rows=Format.INT8))
    step = an_edit(name, 0, "stroke", packed)
    plan = {1: step.mask | True, 3: step.mask | MASKS["random"](case.mask_shape(case.sizes[0]), 3)}
    seen, wanted, lossless = (
        denoiser.edit([replace(step, cache=c, plan=plan)])[0]
        for c in (packed, unpacked(packed), cache)
    )
    assert same_tensors(seen, wanted)
    assert not same_tensors(seen, lossless)

    # Inputs alone serve every plan: what has no keys and values is projected from them.
    kinds = flops.tap_kinds(next(iter(denoiser.programs.values())).interface)
    inputs = {tap for tap, kind in kinds.items() if kind == "inputs of keys and values"}
    assert 0 < len(inputs) < len(packed.rows)
    lean = cache.packed(Encoding(rows=Format.INT8), keep=inputs)
    every = {i + 1: step.mask | True for i in range(len(denoiser.regions))}
    seen, wanted = (denoiser.edit([replace(step, cache=c, plan=every)])[0] for c in (lean, packed))
    assert same_tensors(seen, wanted)
    assert same_tensors(denoiser.edit([replace(step, cache=lean)])[0], wanted)
