"""The result of an edit as its computed rows, put back onto the recording's outputs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

import maskfx
from maskfx.runtime.batch.output_rows import OutputRows, computed_rows, whole_result
from tests.factories.masks import MASKS
from tests.factories.zoo import ZOO

NETS = [
    "FluxControlNetModel",
    pytest.param("ControlNetModel", marks=pytest.mark.slow),
    pytest.param("SD3ControlNetModel", marks=pytest.mark.slow),
    pytest.param("QwenImageControlNetModel", marks=pytest.mark.slow),
    pytest.param("UNet2DConditionModel-sdxl", marks=pytest.mark.slow),
]


def nbytes(result: Any) -> int:
    leaves = pytree.tree_leaves(result)
    rows = [leaf for leaf in leaves if isinstance(leaf, OutputRows)]
    full = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    return sum(t.nbytes for t in full) + sum(one.rows.nbytes for one in rows)


@pytest.mark.parametrize("name", NETS)
def test_rows_and_the_recording_give_the_whole_result(name: str) -> None:
    case = ZOO[name]
    denoiser = maskfx.compile(case.build())
    size = case.sizes[0]
    _, cache = denoiser.record(**case.inputs(size, 0))
    fewer = 0
    for seed, kind in enumerate(("stroke", "random", "one_site", "border", "full", "dense_random")):
        mask = MASKS[kind](case.mask_shape(size), seed)
        step = maskfx.EditStep(case.inputs(size, seed + 1), mask, cache, any_step=True)
        (result,) = denoiser.edit([step])
        for program, _, members in denoiser.groups([step]):
            lanes = program.interface.outputs
            reduced = computed_rows(result, lanes, members[0], cache.output)
            found = whole_result(reduced, cache.output)
            pairs = zip(pytree.tree_leaves(found), pytree.tree_leaves(result), strict=True)
            assert all(torch.equal(a, b) for a, b in pairs if isinstance(b, Tensor))
            share = float(mask.float().mean())
            if share < 0.4:
                fewer += nbytes(reduced) < nbytes(result)
            if kind == "one_site":
                assert nbytes(reduced) <= nbytes(result) * 0.3
            if kind == "full":
                assert nbytes(reduced) == nbytes(result)
    assert fewer


def test_a_result_of_another_shape_than_the_recording_stays_whole() -> None:
    case = ZOO["FluxControlNetModel"]
    denoiser = maskfx.compile(case.build())
    size = case.sizes[0]
    _, cache = denoiser.record(**case.inputs(size, 0))
    mask = MASKS["one_site"](case.mask_shape(size), 0)
    step = maskfx.EditStep(case.inputs(size, 0), mask, cache)
    (result,) = denoiser.edit([step])
    ((program, _, members),) = denoiser.groups([step])
    other = [torch.cat([t, t]) if isinstance(t, Tensor) else t for t in cache.output]
    found = computed_rows(result, program.interface.outputs, members[0], other)
    assert not any(isinstance(leaf, OutputRows) for leaf in pytree.tree_leaves(found))
    found = computed_rows(result, program.interface.outputs, members[0], cache.output[:1])
    assert found is result
