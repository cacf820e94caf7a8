"""The result of an edit as its computed rows, put back onto the recording's outputs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

import maskfx
from maskfx.runtime.batch.output_rows import OutputRows, whole_result
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
        (reduced,) = denoiser.edit([replace(step, rows=True)])
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


def test_members_of_a_batch_get_rows_or_outputs_as_each_asks() -> None:
    case = ZOO["FluxControlNetModel"]
    denoiser = maskfx.compile(case.build())
    size = case.sizes[0]
    _, cache = denoiser.record(**case.inputs(size, 0))
    masks = [MASKS[kind](case.mask_shape(size), 0) for kind in ("one_site", "stroke")]
    steps = [maskfx.EditStep(case.inputs(size, 1), m, cache, any_step=True) for m in masks]
    wanted = denoiser.edit(steps)
    found = denoiser.edit([replace(steps[0], rows=True), steps[1]])
    first, second = map(pytree.tree_leaves, found)
    assert any(isinstance(leaf, OutputRows) for leaf in first)
    assert not any(isinstance(leaf, OutputRows) for leaf in second)
    for one, other in zip(found, wanted, strict=True):
        whole = pytree.tree_leaves(whole_result(one, cache.output))
        pairs = zip(whole, pytree.tree_leaves(other), strict=True)
        assert all(torch.equal(a, b) for a, b in pairs if isinstance(b, Tensor))
