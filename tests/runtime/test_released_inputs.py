"""What a denoiser keeps between steps doesn't keep the arguments of requests that have ended."""

from __future__ import annotations

import gc
from weakref import ref

import pytest
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

import maskfx
from tests.factories.zoo import ZOO, Size
from tests.runtime.test_oracle import denoiser_of


@pytest.mark.parametrize(
    "name",
    ["FluxTransformer2DModel", pytest.param("ZImageTransformer2DModel", marks=pytest.mark.slow)],
)
def test_arguments_are_released_with_their_request(name: str) -> None:
    """Two samples, whose arguments are cut into views; texts are computed once per request."""
    case, size = ZOO[name], Size(batch=2)
    denoiser = denoiser_of(name)
    inputs = case.inputs(size, 0)
    kept = denoiser.record(**inputs)[1]
    mask = torch.zeros(case.mask_shape(size), dtype=torch.bool)
    mask.view(-1)[:9] = True
    denoiser.edit([maskfx.EditStep(inputs, mask, kept)])
    held = [ref(leaf) for leaf in pytree.tree_leaves(inputs) if isinstance(leaf, Tensor)]
    del inputs
    gc.collect()
    assert not [own for r in held if (own := r()) is not None]
