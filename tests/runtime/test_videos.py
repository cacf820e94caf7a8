"""Steps of denoisers that take videos: masks of frames, batches, numbers of frames."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import maskfx
from maskfx.errors import MaskError
from tests.factories.masks import MASKS
from tests.factories.own_cases import OWN
from tests.factories.own_denoisers import built
from tests.factories.own_videos import FRAMES, Film, FilmBlock, FrameByFrame, Turned
from tests.factories.zoo import Draw, Size
from tests.runtime.test_oracle import assert_kept_outside, assert_near, relative_error

NAMES = ("film-attention", "film-in-turn", "film-windows", "film-turned")
SIZE = Size(1, 8, 8)


@cache
def module_of(name: str) -> nn.Module:
    return OWN[name].build()


@cache
def denoiser_of(name: str) -> maskfx.CompiledDenoiser:
    return maskfx.compile(OWN[name].build())


def inputs(seed: int, frames: int = FRAMES, size: Size = SIZE) -> dict[str, Any]:
    draw = Draw(seed)
    sample = draw.normal(size.batch, 4, frames, size.height, size.width)
    return {"sample": sample, "timestep": draw.steps(size.batch)}


def edited(name: str, given: dict[str, Any], mask: Tensor) -> Any:
    kept = denoiser_of(name).record(**given)[1]
    return denoiser_of(name).edit([maskfx.EditStep(given, mask, kept)])[0]


@pytest.mark.parametrize("name", NAMES)
def test_a_batch_of_videos_of_all_kinds_of_members(name: str) -> None:
    denoiser, steps, wanted = denoiser_of(name), list[Any](), list[Any]()
    for seed, size in enumerate((SIZE, Size(2, 6, 10))):
        given = inputs(seed, size=size)
        kept = denoiser.record(**given)[1]
        mask = MASKS["stroke"]((FRAMES, size.height, size.width), seed)
        steps.append(maskfx.EditStep(given, mask, kept))
        wanted.append(module_of(name)(**given))
    for member in (maskfx.DenseStep, maskfx.RecordStep):
        steps.append(member(inputs(7)))
        wanted.append(module_of(name)(**inputs(7)))
    *found, recorded = denoiser.step(steps)
    for got, expected in zip([*found, recorded[0]], wanted, strict=True):
        assert_near(got, expected)


@pytest.mark.parametrize("name", NAMES)
def test_a_mask_of_one_frame_leaves_the_other_frames_alone(name: str) -> None:
    given = inputs(0)
    output, kept = denoiser_of(name).record(**given)
    changed = {**given, "sample": given["sample"] + 1}
    mask = torch.zeros(FRAMES, SIZE.height, SIZE.width, dtype=torch.bool)
    mask[1, 2:5, 3:7] = True
    step = maskfx.EditStep(changed, mask, kept, any_step=True)
    got = denoiser_of(name).edit([step])[0]
    assert_kept_outside(mask, got, output)
    assert (got - output)[:, :, mask].abs().min() > 0


@pytest.mark.parametrize("block", [Turned, FrameByFrame])
def test_masks_move_with_the_frames(block: Callable[[], FilmBlock]) -> None:
    """A changed site changes its surroundings alone, so an edit of these is the dense result."""
    module = built(lambda: Film(block()))
    denoiser, given = maskfx.compile(module), inputs(0)
    before, kept = denoiser.record(**given)
    changed = {**given, "sample": given["sample"].clone()}
    changed["sample"][:, :, 2, 4, 5] += 3
    after = module(**changed)
    mask = torch.zeros(FRAMES, SIZE.height, SIZE.width, dtype=torch.bool)
    mask[2, 1:8, 2:8] = True
    got = denoiser.edit([maskfx.EditStep(changed, mask, kept, any_step=True)])[0]
    assert relative_error(got - before, after - before) < 1e-4


def test_a_mask_without_frames_is_that_of_all_frames() -> None:
    given, mask = inputs(0), MASKS["square"]((SIZE.height, SIZE.width), 0)
    one = edited("film-attention", given, mask)
    all_frames = edited("film-attention", given, mask.expand(FRAMES, -1, -1))
    assert torch.equal(one, all_frames)
    assert denoiser_of("film-attention").mask_shape(given) == (FRAMES, SIZE.height, SIZE.width)


def test_a_mask_of_another_shape_is_refused_with_both_that_fit() -> None:
    with pytest.raises(MaskError, match=r"\(3, 8, 8\) or \(8, 8\), the same in all frames"):
        edited("film-attention", inputs(0), torch.ones(2, 8, 8, dtype=torch.bool))


def test_another_number_of_frames_is_captured_again() -> None:
    name = "film-attention"
    before = len(denoiser_of(name).compilations)
    for frames in (2, 5, 1):
        given = inputs(3, frames)
        shape = (frames, SIZE.height, SIZE.width) if frames > 1 else (SIZE.height, SIZE.width)
        assert_near(edited(name, given, MASKS["random"](shape, 1)), module_of(name)(**given))
    assert len(denoiser_of(name).compilations) == before + 3


def test_attention_along_frames_is_computed_line_by_line() -> None:
    """A place that isn't masked in any frame adds no rows and no keys to others' lines."""
    name = "film-in-turn"
    given = inputs(0)
    edited(name, given, MASKS["random"]((FRAMES, 8, 8), 0))
    [compilation] = [c for c in denoiser_of(name).compilations if c.program is not None]
    assert compilation.program is not None
    lines = {
        getattr(source, "axis", "") for source in compilation.program.interface.inputs.values()
    }
    assert {"picture", "frames"} <= lines


@pytest.mark.parametrize("name", ["film-in-turn", "motion-text-for-each-frame"])
def test_keys_projected_again_meet_the_queries_of_their_line(name: str) -> None:
    """Then keys have other active sites than queries, of all lines or of some."""
    case, module = OWN[name], OWN[name].build()
    denoiser, size = maskfx.compile(module, plans=True), case.sizes[1]
    given = case.inputs(size, 0)
    kept = denoiser.record(**given)[1]
    mask = MASKS["stroke"](case.mask_shape(size), 0)
    some = mask | MASKS["random"](case.mask_shape(size), 1)
    program = denoiser.compilations[-1].program
    assert program is not None
    regions = range(1, 1 + len(program.interface.regions))
    for sites in (torch.ones_like(mask), some):
        step = maskfx.EditStep(given, mask, kept, plan=dict.fromkeys(regions, sites))
        assert_near(denoiser.edit([step])[0], module(**given))
