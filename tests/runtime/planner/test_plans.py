"""Plans: which keys and values are loaded and which projected again is data of one graph."""

import pytest
import torch
from torch import Tensor

import maskfx
from maskfx.ir.programs.sources import Enter
from tests.factories import masks
from tests.factories.planned import compiled
from tests.factories.zoo import ZOO, Case, marked
from tests.passes.test_cut_keys import Block, block_inputs
from tests.passes.tools import error

CASES = {"FluxTransformer2DModel", "ChromaTransformer2DModel-boolmask", "UNet2DConditionModel-sd15"}
CASES |= {"SD3Transformer2DModel", "UNet2DConditionModel-sdxl", "PixArtTransformer2DModel"}
NAMES = [n for n in ZOO if n in CASES]


def plans_of(regions: int, mask: Tensor, index: int) -> dict[int, Tensor]:
    """Some regions load all keys, some project all again, some project a part."""
    plan = {}
    for region in range(1, regions + 1):
        choice = (region + index) % 3
        if choice == 1:
            plan[region] = torch.ones_like(mask)
        elif choice == 2:
            plan[region] = mask | (torch.rand(mask.shape) < 0.4)
    return plan


def members(
    case: Case, denoiser: maskfx.CompiledDenoiser, changed: bool, planned: bool
) -> list[maskfx.EditStep]:
    out = []
    for index, size in enumerate(case.sizes):
        torch.manual_seed(index)
        _, cache = denoiser.record(**case.inputs(size, index))
        inputs = case.inputs(size, index + 10 * changed)
        mask = masks.random(case.mask_shape(size), index)
        plan = plans_of(len(denoiser.regions), mask, index) if planned else {}
        out.append(maskfx.EditStep(inputs, mask, cache, any_step=True, plan=plan))
    return out


@pytest.mark.parametrize("name", marked(NAMES))
def test_every_plan_is_lossless_in_one_graph(name: str) -> None:
    (case, planned), (_, plain) = compiled(name), compiled(name, plans=False)
    same = planned.edit(members(case, planned, changed=False, planned=True))
    assert len(planned.regions) > 0
    for index, (size, output) in enumerate(zip(case.sizes, same, strict=True)):
        assert error(output, plain.module(**case.inputs(size, index))) < 1e-4
    found = planned.edit(members(case, planned, changed=True, planned=True))
    wanted = plain.edit(members(case, plain, changed=True, planned=False))
    assert error(found, wanted) < 1e-5
    assert len(planned.programs) == 1


@pytest.mark.slow
def test_projects_what_the_plan_says() -> None:
    denoiser = maskfx.compile(Block(), plans=True)
    _, cache = denoiser.record(**block_inputs())
    mask = torch.arange(12) < 3
    for plan, rows in (({}, 2 * 3), ({1: torch.arange(12) < 7}, 2 * 7), ({1: mask | True}, 2 * 12)):
        frames = set(denoiser._executor.frames)
        denoiser.edit([maskfx.EditStep(block_inputs(), mask, cache, plan=plan)])
        [new] = [f for k, f in denoiser._executor.frames.items() if k not in frames]
        entries = [s for s in new.interface.inputs.values() if isinstance(s, Enter)]
        [table] = map(new.layout.table, entries)
        assert len(table) == rows


@pytest.mark.slow
def test_explains_a_graph_with_cuts() -> None:
    denoiser = maskfx.compile(Block(), plans=True, example_inputs=block_inputs())
    text = denoiser.explain()
    assert "inputs of keys and values" in text
    assert "@" not in text


@pytest.mark.slow
def test_refuses_plans_that_do_not_fit() -> None:
    denoiser = maskfx.compile(Block(), plans=True)
    inputs = block_inputs()
    _, cache = denoiser.record(**inputs)
    mask = torch.arange(12) < 3
    with pytest.raises(maskfx.InputError, match="region 2, but there are regions 1 to 1"):
        denoiser.edit([maskfx.EditStep(inputs, mask, cache, plan={2: mask})])
    with pytest.raises(maskfx.MaskError, match="covers EditStep.mask"):
        denoiser.edit([maskfx.EditStep(inputs, mask, cache, plan={1: ~mask})])
    with pytest.raises(maskfx.MaskError, match="boolean"):
        denoiser.edit([maskfx.EditStep(inputs, mask, cache, plan={1: mask.float()})])
