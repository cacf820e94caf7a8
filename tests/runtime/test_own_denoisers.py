"""Denoisers as users write them: edits are right, and what isn't narrowed is named.

Each case is compiled once and checked by one test, because compiling is the slow part.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import maskfx
from maskfx.compiler.compile import Compilation
from maskfx.runtime.batch import flops
from tests.factories.masks import MASKS, full
from tests.factories.own_cases import OWN, QUICK
from tests.factories.own_lines import LOCAL
from tests.factories.own_windows import MOVED
from tests.factories.zoo import Case, Size
from tests.runtime.test_oracle import assert_kept_outside, assert_near, check_edits, relative_error

KINDS = ("random", "one_site", "full", "empty")
# a site changes all of its window, or sites that those it reaches in the end don't show
REACHING = ("swin", "swin-filled", "half-swin", "far-rolls")


def quick_first(names: Iterable[str]) -> list[Any]:
    """The cases, those that aren't of the default run marked as slow."""
    return [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in names]


NAMES = quick_first(OWN)
NEAR = quick_first(name for name in (*MOVED, *LOCAL) if name not in REACHING)


def first_tensor(tree: Any) -> Tensor:
    found = [leaf for leaf in torch.utils._pytree.tree_leaves(tree) if isinstance(leaf, Tensor)]
    return found[0]


def with_other_picture(case: Case, size: Size, seed: int) -> dict[str, Any]:
    """Inputs of another seed with the step of this one."""
    inputs = case.inputs(size, seed)
    for name in ("timestep", "sigma"):
        if name in inputs:
            inputs[name] = case.inputs(size, seed - 1)[name]
    return inputs


def check_batch(denoiser: maskfx.CompiledDenoiser, module: nn.Module, case: Case) -> None:
    """Two members of different sizes share a step; other inputs under a full mask run dense."""
    steps, expected, outputs = [], [], []
    for i, size in enumerate(case.sizes[:2]):
        output, kept = denoiser.record(**case.inputs(size, 10 + i))
        mask = MASKS["stroke"](case.mask_shape(size), i)
        steps.append(maskfx.EditStep(case.inputs(size, 10 + i), mask, kept))
        expected.append(module(**case.inputs(size, 10 + i)))
        outputs.append(output)
    size = case.sizes[0]
    changed = with_other_picture(case, size, 11)
    everywhere = full(case.mask_shape(size), 0)
    steps.append(maskfx.EditStep(changed, everywhere, steps[0].cache))
    expected.append(module(**changed))
    got = denoiser.edit(steps)
    for i, (one, wanted) in enumerate(zip(got, expected, strict=True)):
        assert_near(one, wanted, f"member {i}")
    for one, step, output in zip(got, steps, outputs, strict=False):
        assert_kept_outside(step.mask, one, output)
    assert relative_error(first_tensor(got[0]), first_tensor(got[2])) > 0.01


def share_of(compilation: Compilation, ratio: float) -> float:
    """The FLOPs of an edit whose mask is a square of this share, over those of the module."""
    assert compilation.program is not None
    assert compilation.capture.module is not None
    pyramid = compilation.program.interface.pyramid
    sites = flops.square_sites(pyramid, flops.capture_sizes(pyramid), ratio)
    rows = flops.row_flops(compilation.program, sites, pyramid.batch)
    dense = flops.graph_flops(compilation.capture.module.graph)
    return sum(rows.values()) / sum(dense.values())


@pytest.mark.parametrize("name", NEAR)
def test_masks_move_with_the_sites(name: str) -> None:
    """A changed site changes few others; an edit of these is the module's result of all sites."""
    case, module = OWN[name], OWN[name].build()
    denoiser = maskfx.compile(case.build())
    for seed, size in enumerate(case.sizes):
        inputs = case.inputs(size, seed)
        before, kept = denoiser.record(**inputs)
        for y, x in ((0, 0), (size.height // 2, size.width - 2)):
            changed = {**inputs, "sample": inputs["sample"].clone()}
            changed["sample"][:, :, y, x] += 3
            after = module(**changed)
            touched = (after - before).abs().amax((0, 1)) > 1e-6
            touched[y, x] = True
            mask = F.max_pool2d(touched[None].float(), 5, 1, 2)[0] > 0
            got = denoiser.edit([maskfx.EditStep(changed, mask, kept, any_step=True)])[0]
            assert relative_error(got - before, after - before) < 1e-4
    assert all(one.program is not None for one in denoiser.compilations)


@pytest.mark.parametrize("name", NAMES)
def test_own_denoisers_edit_right_and_name_what_runs_dense(name: str) -> None:
    case = OWN[name]
    module = case.build()
    denoiser = maskfx.compile(case.build())
    check_edits(denoiser, module, case, case.sizes, KINDS)
    check_batch(denoiser, module, case)
    report = denoiser.explain()
    for compilation in denoiser.compilations:
        if case.named:
            assert compilation.reasons == {}
            assert compilation.program is not None
            assert name not in MOVED or share_of(compilation, 0.1) < 0.15
        else:
            assert compilation.reasons
            assert next(iter(compilation.reasons)) in report
