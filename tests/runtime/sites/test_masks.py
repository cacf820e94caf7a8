"""What edits under known masks can read: no picture changes, and nothing else is kept."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import maskfx
from maskfx.errors import CacheError, MaskError
from maskfx.ir.programs.sources import Halo, Loaded, Rest, RestStats
from maskfx.runtime.cache.quantize import LOSSLESS, Encoding, Format
from maskfx.runtime.cache.rows import RowSubset
from maskfx.runtime.cache.serialize import decode, encode
from maskfx.runtime.cache.step_cache import StepCache
from maskfx.runtime.sites.active import ActiveSites
from maskfx.runtime.sites.mask import Mask
from maskfx.runtime.sites.masks import Masks, find_reach
from tests.factories import masks
from tests.factories.planned import compiled, recorded
from tests.factories.zoo import slow_unet
from tests.passes.tools import error

MODELS = (
    "UNet2DConditionModel-sd15",
    "FluxTransformer2DModel",
    "SD3Transformer2DModel",
    "SanaTransformer2DModel",
)


def part_of(denoiser: maskfx.CompiledDenoiser, cache: StepCache, allowed: Masks) -> StepCache:
    interface = denoiser.programs[cache.program].interface
    return cache.within(allowed, find_reach(interface, cache.sizes, allowed))


def block(shape: tuple[int, ...], share: float) -> Tensor:
    """Sites in one piece, in the middle."""
    count = int(torch.tensor(shape).prod())
    if len(shape) == 1:
        return (torch.arange(count) - count / 2).abs() < share * count / 2
    sides = [(torch.arange(n) - n / 2).abs() < share**0.5 * n / 2 for n in shape]
    return sides[0][:, None] & sides[1][None]


@pytest.mark.parametrize("name", slow_unet(MODELS))
def test_edits_read_nothing_that_is_left_out(name: str) -> None:
    (case, denoiser), cache = compiled(name), recorded(name)
    shape = case.mask_shape(case.sizes[0])
    ever, always = block(shape, 0.4), block(shape, 0.1)
    inputs = case.inputs(case.sizes[0], 0)
    regions = range(1, len(denoiser.regions) + 1)
    for allowed, some in (
        (Masks.inside(ever), (ever, ever & masks.random(shape, 1, 0.5))),
        (Masks(ever, always), (ever, always, always | ever & masks.random(shape, 2, 0.5))),
        (Masks.exactly(ever), (ever,)),
    ):
        kept = decode(encode(part_of(denoiser, cache, allowed)))
        assert kept.nbytes() < cache.nbytes() or not bool(allowed.always.any())
        assert kept.masks is not None
        assert torch.equal(kept.masks.ever, allowed.ever)
        assert torch.equal(kept.masks.always, allowed.always)
        for mask in some:
            for plan in ({}, {r: mask | True for r in regions}, {r: mask | ever for r in regions}):
                seen, wanted = (
                    denoiser.edit([maskfx.EditStep(inputs, mask, c, plan=plan)])
                    for c in (kept, cache)
                )
                assert error(seen, wanted) < 1e-5


@pytest.mark.parametrize("name", slow_unet(MODELS[:2]))
def test_a_reach_is_what_all_allowed_masks_read_together(name: str) -> None:
    (case, denoiser), cache = compiled(name), recorded(name)
    shape = case.mask_shape(case.sizes[0])
    ever, always = block(shape, 0.3), block(shape, 0.05)
    interface = denoiser.programs[cache.program].interface
    reach = find_reach(interface, cache.sizes, Masks(ever, always))
    read: dict[Any, set[int]] = {}
    single = [always | torch.eye(ever.numel(), dtype=torch.bool)[i].view(shape)
              for i in ever.flatten().nonzero()[:, 0]]  # fmt: skip
    for mask in (*single, ever, always):
        sites = ActiveSites(interface.pyramid, cache.sizes, Mask(mask))
        for source in interface.inputs.values():
            match source:
                case Rest(tap, segments):
                    seen = sites.laid_out(segments, sites.rest)
                case Halo(tap, window):
                    seen = sites.window(window)[1]
                case _:
                    continue
            read.setdefault(tap, set()).update(seen.tolist())
    for tap, sites_read in read.items():
        loaded = any(isinstance(s, Loaded) and s.tap == tap for s in interface.inputs.values())
        kept = set(reach.rows[tap].tolist()) if tap in reach.rows else None
        assert kept is None or sites_read <= kept
        if kept is not None and not loaded:  # a stride may make a target's sources active with it
            assert len(kept) <= 1.1 * len(sites_read) + 1


def test_statistics_are_kept_where_they_may_be_taken_off() -> None:
    (case, denoiser), cache = compiled(MODELS[0]), recorded(MODELS[0])
    mask = block(case.mask_shape(case.sizes[0]), 0.3)
    kept = part_of(denoiser, cache, Masks.exactly(mask))
    assert any(
        isinstance(s, RestStats) for s in denoiser.programs[cache.program].interface.inputs.values()
    )
    assert all(
        isinstance(s.values, RowSubset) and not len(s.values.sites) for s in kept.stats.values()
    )


@pytest.mark.parametrize("encoding", [LOSSLESS, Encoding(Format.INT8, stats=Format.FP16)])
def test_a_part_packs_and_comes_back(encoding: Encoding) -> None:
    (case, denoiser), cache = compiled(MODELS[0]), recorded(MODELS[0])
    mask = block(case.mask_shape(case.sizes[0]), 0.3)
    kept = part_of(denoiser, cache, Masks.inside(mask)).packed(encoding)
    again = decode(encode(kept))
    assert again.nbytes() == kept.nbytes()
    step = maskfx.EditStep(case.inputs(case.sizes[0], 1), mask, kept, any_step=True)
    later = maskfx.EditStep(step.inputs, mask, again, any_step=True)
    assert error(denoiser.edit([step]), denoiser.edit([later])) == 0


def test_other_masks_are_refused() -> None:
    (case, denoiser), cache = compiled(MODELS[1]), recorded(MODELS[1])
    shape = case.mask_shape(case.sizes[0])
    ever, always = block(shape, 0.3), block(shape, 0.1)
    kept = part_of(denoiser, cache, Masks(ever, always))
    inputs = case.inputs(case.sizes[0], 0)
    for mask in (~ever, ever & ~always):
        with pytest.raises(MaskError, match="other Masks"):
            denoiser.edit([maskfx.EditStep(inputs, mask, kept)])
    for mask in (ever & False, ever | True):  # these read nothing
        denoiser.edit([maskfx.EditStep(inputs, mask, kept)])
    with pytest.raises(MaskError, match="of the latent's size"):
        part_of(denoiser, cache, Masks.anywhere(3, 3))
    kept = replace(kept, masks=None)
    with pytest.raises(CacheError, match="weren't kept"):
        denoiser.edit([maskfx.EditStep(inputs, ~ever, kept)])
    with pytest.raises(CacheError, match="only those of"):
        next(rows for rows in kept.rows.values() if isinstance(rows, RowSubset)).whole()


@pytest.mark.parametrize(
    ("ever", "always", "said"),
    [
        (torch.ones(2, 2), torch.zeros(2, 2), "boolean"),
        (torch.ones(2, 2) > 0, torch.zeros(3, 2) > 0, "inside of"),
        (torch.zeros(2, 2) > 0, torch.ones(2, 2) > 0, "inside of"),
        (torch.zeros(2, 2) > 0, torch.zeros(2, 2) > 0, "empty"),
    ],
)
def test_masks_that_mean_nothing_are_refused(ever: Tensor, always: Tensor, said: str) -> None:
    with pytest.raises(MaskError, match=said):
        Masks(ever, always)
