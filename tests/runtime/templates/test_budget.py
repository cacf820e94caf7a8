"""Budgets: all that a template holds fits, and only what was allowed changes a picture."""

from __future__ import annotations

from dataclasses import replace
from math import prod
from typing import Any

import pytest
import torch
from torch import Tensor

import maskfx
from maskfx import Budget, EditStep, Masks, Templates
from maskfx.errors import InputError, MaskError
from maskfx.runtime.cache.quantize import Encoding, Format
from maskfx.runtime.cache.tier_entry import Tier
from maskfx.runtime.cache.tiers import Tiers
from maskfx.runtime.planner.blocks import find_blocks
from maskfx.runtime.planner.costs import Costs
from maskfx.runtime.templates.budget import choose, recorded_steps, region_bytes
from maskfx.runtime.templates.footprint import ENCODINGS, Footprint, encoding_of
from tests.factories import masks
from tests.factories.planned import compiled, recorded
from tests.factories.zoo import Case
from tests.passes.tools import error

MODELS = ("UNet2DConditionModel-sd15", "FluxTransformer2DModel")
STEPS, LARGE = 5, 1 << 30


def drawn(name: str) -> tuple[Case, maskfx.CompiledDenoiser, Tensor]:
    """A case, its denoiser, a mask."""
    case, denoiser = compiled(name)
    return case, denoiser, masks.stroke(case.mask_shape(case.sizes[0]), 0)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("exactly", [pytest.param(True, marks=pytest.mark.slow), False])
def test_a_template_obeys_its_budget(name: str, exactly: bool) -> None:
    case, denoiser, mask = drawn(name)
    inputs = [case.inputs(case.sizes[0], step) for step in range(STEPS)]
    steps = [recorded(name, step) for step in range(STEPS)]
    allowed = Masks.exactly(mask) if exactly else Masks.anywhere(*mask.shape)
    footprint = Footprint.of(denoiser, allowed)
    branches = steps[0].sizes["batch"]
    lossless = encoding_of("lossless", footprint.program.interface)
    whole = STEPS * branches * footprint.together(lossless)
    eight = encoding_of("8bit", footprint.program.interface)
    some = footprint.program.interface.taps_for(["inputs"] * len(denoiser.regions))
    whole_steps, others = len(recorded_steps(STEPS, 4)), STEPS - len(recorded_steps(STEPS, 4))
    least = whole_steps * footprint.together(eight, some) + others * footprint.alone
    smallest = branches * least / whole
    wanted = [
        denoiser.edit([EditStep(own, mask, kept)]) for own, kept in zip(inputs, steps, strict=True)
    ]
    seen = set()
    for share in (1.0, 0.8, 0.6, 0.4, 0.3, 0.25, 0.2, 0.15, 0.1):
        budget = Budget(share * whole, STEPS, branches, ("16bit", "8bit", "share2", "share4"))
        tiers = Tiers(host_bytes=LARGE)
        if share < smallest:
            with pytest.raises(InputError, match="don't fit"):
                Templates(denoiser, tiers, masks=allowed, budget=budget)
            continue
        templates = Templates(denoiser, tiers, masks=allowed, budget=budget)
        for step, own in enumerate(steps):
            templates.put("cat", step, own)
        keeping = templates.keeping
        assert keeping is not None
        seen.add((keeping.encoding, keeping.share))
        held = templates.tiers.counters().nbytes[Tier.HOST]
        assert 0.5 * min(share, 0.6) * whole < held <= budget.nbytes
        for step in range(STEPS):
            edit = templates.edit("cat", step, inputs[step], mask)
            assert edit is not None
            off = error(denoiser.edit([edit]), wanted[step])
            if keeping.share == 1 or step in recorded_steps(STEPS, keeping.share):
                assert off < {"lossless": 1e-5, "16bit": 5e-3, "8bit": 0.1}[keeping.encoding]
            else:
                assert off > 0
    assert ("lossless", 1) in seen
    assert {encoding for encoding, _ in seen} == {"lossless", "16bit", "8bit"}
    assert max(share for _, share in seen) > 1


@pytest.mark.parametrize("name", MODELS)
def test_keys_are_kept_where_they_save_most_time(name: str) -> None:
    _, denoiser, mask = drawn(name)
    footprint = Footprint.of(denoiser, Masks.exactly(mask))
    each = region_bytes(footprint, "16bit")
    dearer = [n for n, (keys, inputs) in enumerate(each) if keys > inputs]
    assert dearer  # where a level is masked as a whole, nothing is kept
    how = encoding_of("16bit", footprint.program.interface)
    least = footprint.together(how, footprint.program.interface.taps_for(["inputs"] * len(each)))
    blocks = find_blocks(footprint.program, footprint.sites)
    for extra, slow in ((0, 0.0), (1, 0.0), (10**9, 0.0), (10**9, 1.0)):
        room = least + extra * max(keys - inputs for keys, inputs in each)
        costs = Costs((0.0,) * len(blocks), ((1e-12,) * 3,) * len(blocks), 0.0, 0.0, slow)
        found = choose(footprint, Budget(float(room), 1, allow=("16bit",), costs=costs))
        if found.encoding == "lossless":
            continue
        wanted = {0: 0, 1: 1}.get(extra, len(dearer) if slow == 0 else 0)
        assert sum(found.regions[n] == "keys" for n in dearer) >= wanted
        assert found.nbytes <= room
    half = least + sum(keys - inputs for keys, inputs in each) / 2
    fast, slow_ = (
        choose(
            footprint,
            Budget(
                half,
                1,
                allow=("16bit",),
                costs=Costs(
                    (0.0,) * len(blocks), ((1e-12,) * 3,) * len(blocks), 0.0, 0.0, per_byte
                ),
            ),
        )
        for per_byte in (0.0, 1.0)
    )
    assert fast.encoding == slow_.encoding == "16bit"
    assert "keys" in [fast.regions[n] for n in dearer]
    assert {slow_.regions[n] for n in dearer} == {"inputs"}


def test_the_order_is_encodings_then_sharing() -> None:
    _, denoiser, mask = drawn(MODELS[1])
    footprint = Footprint.of(denoiser, Masks.exactly(mask))
    every = ("4bit", "share3", "8bit", "share2", "16bit")
    order = []
    nbytes = 9.0 * footprint.together(Encoding())
    while True:
        try:
            found = choose(footprint, Budget(nbytes, 9, allow=every))
        except InputError:
            break
        if (found.share, found.encoding) not in order:
            order.append((found.share, found.encoding))
        nbytes *= 0.97
    names = list(ENCODINGS)
    assert order == sorted(order, key=lambda one: (one[0], names.index(one[1])))
    assert order[0] == (1, "lossless")
    assert order[-1] == (3, "4bit")
    assert (1, "4bit") in order


def test_an_unmet_budget_says_the_smallest_and_what_is_closed() -> None:
    _, denoiser, mask = drawn(MODELS[0])
    footprint = Footprint.of(denoiser, Masks.anywhere(*mask.shape))
    with pytest.raises(InputError, match=r"smallest template needs .*B; allow 4bit \(.*B\) or mor"):
        choose(footprint, Budget(STEPS * footprint.together(Encoding(Format.INT8)) * 0.6, STEPS))
    with pytest.raises(InputError, match=r"allow 4bit and share\d"):
        choose(footprint, Budget(STEPS * footprint.together(Encoding(Format.INT8)) * 0.25, STEPS))
    with pytest.raises(InputError, match=r"all changes allowed .* bound the masks of later edits"):
        choose(footprint, Budget(100.0, STEPS))


def test_what_was_not_planned_for_is_refused() -> None:
    case, denoiser, mask = drawn(MODELS[0])
    anywhere = Masks.anywhere(*mask.shape)
    roomy = Templates(denoiser, Tiers(host_bytes=LARGE), masks=anywhere, budget=Budget(1e9, STEPS))
    assert roomy.keeping is not None
    assert set(roomy.keeping.regions) == {"both"}
    larger = max(case.sizes, key=lambda size: prod(case.mask_shape(size)))
    cache = denoiser.record(**case.inputs(larger, 0))[1]
    with pytest.raises(MaskError, match="of the latent's size"):
        roomy.put("cat", 0, cache)
    exact = Budget(float(STEPS * roomy.keeping.nbytes), STEPS)
    templates = Templates(denoiser, Tiers(host_bytes=LARGE), masks=anywhere, budget=exact)
    step = recorded(MODELS[0])
    templates.put("cat", 0, step)
    with pytest.raises(InputError, match="the budget has"):
        templates.put("cat", 0, replace(step, output=[*step.output, torch.ones(1000)]))


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"nbytes": 0.0, "steps": 5}, "above 0"),
        ({"nbytes": 1.0, "steps": 0}, "steps=0: give a whole number, 1 or more"),
        ({"nbytes": 1.0, "steps": 5, "allow": ("7bit",)}, "7bit"),
        ({"nbytes": 1.0, "steps": 5, "allow": ("share0",)}, "share0"),
    ],
)
def test_refuses_budgets_that_mean_nothing(wrong: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError, match=said):
        Budget(**wrong)


def test_refuses_settings_that_a_budget_decides() -> None:
    _, denoiser, mask = drawn(MODELS[1])
    anywhere, budget = Masks.anywhere(*mask.shape), Budget(1e9, STEPS)
    tiers = Tiers(host_bytes=1)
    with pytest.raises(InputError, match="leave them out"):
        Templates(denoiser, tiers, share=2, masks=anywhere, budget=budget)
    with pytest.raises(InputError, match="needs masks"):
        Templates(denoiser, tiers, budget=budget)
    packing = Tiers(host_bytes=1, encoding=Encoding(Format.INT8))
    with pytest.raises(InputError, match="how rows are packed"):
        Templates(denoiser, packing, masks=anywhere, budget=budget)


def test_every_so_many_steps_and_the_last_are_recorded() -> None:
    assert recorded_steps(10, 4) == [0, 4, 8, 9]
    assert recorded_steps(9, 4) == [0, 4, 8]
    assert recorded_steps(1, 4) == [0]
