"""Packed tokens that a module makes a picture of: its sides are integer arguments."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import maskfx
from maskfx.compiler.capture.arguments.grid_numbers import grid_numbers
from maskfx.export.denoiser import ExportedDenoiser
from maskfx.export.exporter import export
from maskfx.export.host.arguments import check_arguments
from maskfx.export.manifest import read_manifest
from tests.export.hosted import arrays
from tests.factories.masks import MASKS
from tests.factories.own_cases import OWN
from tests.factories.own_gridded import PADDED, ConvolvedTokens, PaddedTokens
from tests.factories.zoo import ZOO, Case, Size
from tests.runtime.test_oracle import assert_kept_outside, assert_near, relative_error

TOKENS, PIXELS = OWN["grid-of-tokens"], OWN["grid-in-pixels"]
HIDREAM = ZOO["HiDreamImageTransformer2DModel-packed"]


def check(denoiser: maskfx.CompiledDenoiser, case: Case, calls: list[dict[str, Any]]) -> None:
    """Edits of all calls in one step are the module's results."""
    module = case.build()
    steps, wanted = [], []
    for seed, call in enumerate(calls):
        output, kept = denoiser.record(**call)
        expected = module(**call)
        assert_near(output, expected)
        mask = MASKS["random"](denoiser.mask_shape(call), seed)
        steps.append(maskfx.EditStep(call, mask, kept))
        wanted.append(expected)
    for got, expected in zip(denoiser.edit(steps), wanted, strict=True):
        assert_near(got, expected)


def test_a_mask_has_the_sides_that_the_arguments_give() -> None:
    """One program serves grids of equal numbers of tokens, and several of them in one step."""
    denoiser = maskfx.compile(TOKENS.build())
    sizes = [Size(1, 4, 6, 5), Size(1, 6, 4, 5), Size(1, 3, 8, 5), Size(2, 5, 7, 3)]
    calls = [TOKENS.inputs(size, seed) for seed, size in enumerate(sizes)]
    check(denoiser, TOKENS, calls)
    shapes = [denoiser.mask_shape(call) for call in calls]
    assert shapes == [(4, 6), (6, 4), (3, 8), (5, 7)]
    assert [one.reasons for one in denoiser.compilations] == [{}]


def test_a_far_site_of_the_grid_stays_as_recorded() -> None:
    """Only what the mask covers changes, in the module's picture and not along its tokens."""
    denoiser = maskfx.compile(TOKENS.build())
    size = Size(1, 8, 8, 5)
    before, kept = denoiser.record(**TOKENS.inputs(size, 0))
    changed = TOKENS.inputs(size, 0)
    changed["sample"][:, 9] += 3
    mask = torch.zeros(8, 8, dtype=torch.bool)
    mask[:3, :3] = True
    got = denoiser.edit([maskfx.EditStep(changed, mask, kept)])[0]
    assert relative_error(got, before) > 1e-3
    assert_kept_outside(mask, got, before)


class Transposed(ConvolvedTokens):
    """The grid is the arguments' other way round: no rule narrows it."""

    def convolved(self, x: Tensor, *sides: int) -> Tensor:
        return super().convolved(x, *reversed(sides))


def test_tokens_column_by_column_stay_a_sequence() -> None:
    torch.manual_seed(0)
    module = Transposed().eval().requires_grad_(False)
    denoiser = maskfx.compile(module)
    call = TOKENS.inputs(Size(1, 4, 6, 5), 0)
    output, kept = denoiser.record(**call)
    assert denoiser.mask_shape(call) == (24,)
    got = denoiser.edit([maskfx.EditStep(call, MASKS["random"]((24,), 0), kept)])[0]
    assert_near(output, module(**call))
    assert_near(got, module(**call))


class Behind(PaddedTokens):
    """The picture stands behind other tokens."""

    def convolved(self, x: Tensor, *sides: int) -> Tensor:
        return x

    def mixed(self, x: Tensor, timestep: Tensor, context: Tensor) -> Tensor:
        picture = self.conv(x[:, -24:].transpose(1, 2).unflatten(2, (4, 6)))
        x = torch.cat([x[:, :-24], picture.flatten(2).transpose(1, 2)], 1)
        return super().mixed(x, timestep, context)


def test_a_picture_behind_other_tokens_has_no_sides() -> None:
    """That it stands first is presumed only where every operator agrees."""
    torch.manual_seed(0)
    module = Behind().eval().requires_grad_(False)
    denoiser = maskfx.compile(module)
    call = OWN["grid-of-padded-tokens"].inputs(Size(1, 4, 6, 5), 0)
    output, kept = denoiser.record(**call)
    assert denoiser.mask_shape(call) == (PADDED,)
    got = denoiser.edit([maskfx.EditStep(call, MASKS["random"]((PADDED,), 0), kept)])[0]
    assert_near(output, module(**call))
    assert_near(got, module(**call))


def padded(call: dict[str, Any], tokens: int) -> dict[str, Any]:
    """The call with padding behind the tokens, which attend as others do."""
    more = tokens - call["hidden_states"].shape[1]
    rows = {name: F.pad(call[name], (0, 0, 0, more)) for name in ("hidden_states", "img_ids")}
    mask = F.pad(call["hidden_states_masks"], (0, more))
    return {**call, **rows, "hidden_states_masks": mask}


@pytest.mark.slow
def test_padded_tokens_and_others_need_no_more_than_a_program_each() -> None:
    """HiDream's tokens, padded to 32, to 40 or not at all."""
    denoiser = maskfx.compile(HIDREAM.build())
    sizes = [Size(1, 4, 6, 5), Size(1, 6, 4, 5), Size(1, 4, 5, 5)]
    plain = [HIDREAM.inputs(size, seed) for seed, size in enumerate(sizes)]
    calls = [padded(plain[0], 32), padded(plain[1], 32), padded(plain[2], 40), plain[0]]
    check(denoiser, HIDREAM, calls)
    assert [one.reasons for one in denoiser.compilations] == [{}] * 3


@pytest.mark.slow
def test_samples_whose_sides_are_listed_run_one_by_one() -> None:
    denoiser = maskfx.compile(HIDREAM.build())
    call = padded(HIDREAM.inputs(Size(3, 6, 4, 5), 0), 32)
    check(denoiser, HIDREAM, [call, padded(HIDREAM.inputs(Size(1, 4, 6, 7), 0), 32)])
    assert denoiser.mask_shape(call) == (6, 4)
    assert [one.reasons for one in denoiser.compilations] == [{}]


def test_sides_in_pixels_are_counted_in_sites() -> None:
    """Sides that aren't multiples of a site run dense."""
    denoiser = maskfx.compile(PIXELS.build())
    sizes = [Size(1, 4, 6, 5), Size(1, 6, 4, 5), Size(2, 5, 7, 3)]
    calls = [PIXELS.inputs(size, seed) for seed, size in enumerate(sizes)]
    check(denoiser, PIXELS, calls)
    assert [denoiser.mask_shape(call) for call in calls] == [(4, 6), (6, 4), (5, 7)]
    assert [one.reasons for one in denoiser.compilations] == [{}]
    odd = {**calls[1], "height": calls[1]["height"] + 9}
    check(denoiser, PIXELS, [odd, calls[0]])
    assert denoiser.mask_shape(odd) == (24,)


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(TOKENS, id=TOKENS.name),
        pytest.param(PIXELS, id=PIXELS.name, marks=pytest.mark.slow),
    ],
)
def test_an_export_takes_the_sides_as_numbers(case: Case, tmp_path: Path) -> None:
    denoiser = maskfx.compile(case.build())
    denoiser.record(**case.inputs(Size(1, 4, 6, 5), 0))
    export(denoiser, tmp_path / "x")
    calls = [case.inputs(Size(1, 5, 7, 3), 0), case.inputs(Size(2, 6, 4, 5), 1)]
    check(ExportedDenoiser(case.build(), tmp_path / "x"), case, calls)
    manifest = read_manifest(tmp_path / "x")
    read = [check_arguments(manifest, arrays(call)) for call in calls]
    assert [(one.sizes["y"], one.sizes["x"]) for one in read] == [(5, 7), (6, 4)]


@pytest.mark.parametrize(
    ("values", "tokens", "found"),
    [
        ({"a": 4, "b": 6}, 24, {"a": ("y",), "b": ("x",)}),
        ({"a": 4, "b": 6}, 30, {"a": ("y",), "b": ("x",)}),
        ({"a": 4, "b": 6}, 23, {}),
        ({"a": 64, "b": 96}, 24, {"a": ("y*16",), "b": ("x*16",)}),
        ({"a": 32, "b": 48}, 24, {"a": ("y*8",), "b": ("x*8",)}),
        ({"a": 72, "b": 96}, 27, {}),
        ({"a": 2, "b": 64, "c": 96}, 48, {"a": ("frames",), "b": ("y*16",), "c": ("x*16",)}),
        ({"a": 64, "b": 96}, 25, {}),
        ({"a": 2, "b": 4, "c": 6}, 48, {"a": ("frames",), "b": ("y",), "c": ("x",)}),
        ({"a": 1, "b": 4, "c": 6}, 24, {"b": ("y",), "c": ("x",)}),
        ({"s.0.0": 4, "s.0.1": 6, "s.1.0": 4, "s.1.1": 7}, 52, {}),
        ({"a.0": 4, "b.0": 6}, 24, {}),
        ({"a": True, "b": 6}, 6, {}),
    ],
)
def test_sides_stand_together_and_have_as_many_sites(
    values: dict[str, object], tokens: int, found: dict[str, tuple[str, ...]]
) -> None:
    assert grid_numbers(list(values), list(values.values()), tokens) == found
