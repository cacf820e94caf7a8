"""bfloat16: an edit is about as far from float32 as the dense run in bfloat16 is."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

import maskfx
from tests.factories import masks
from tests.factories.zoo import ZOO
from tests.runtime.test_oracle import module_of, relative_error, tensors

pytestmark = pytest.mark.slow

NAMES = [
    "UNet2DConditionModel-sd15",
    "FluxTransformer2DModel",
    "SD3Transformer2DModel",
    "SanaTransformer2DModel",
]
SLACK = 3.0


def inputs_of(name: str, dtype: torch.dtype) -> dict[str, Any]:
    """Latents and text in a dtype; position ids and whole timesteps as pipelines leave them.

    Fractional times are multiplied by 1000 in the model's own dtype and then go through a sine:
    500 and 2000 are exact in bfloat16; most others would turn into another step altogether.
    """
    case = ZOO[name]
    inputs = case.inputs(case.sizes[2], 0)
    for key, value in {"timestep": 0.5, "guidance": 2.0}.items():
        if key in inputs and inputs[key].is_floating_point():
            inputs[key] = torch.full_like(inputs[key], value)

    def cast(path: Any, value: Any) -> Any:
        wide = isinstance(value, Tensor) and value.is_floating_point() and value.ndim > 1
        return value.to(dtype) if wide and "ids" not in pytree.keystr(path) else value

    result: dict[str, Any] = pytree.tree_map_with_path(cast, inputs)
    return result


@pytest.mark.parametrize("name", NAMES)
def test_bfloat16_costs_an_edit_what_it_costs_a_dense_run(name: str) -> None:
    case, size = ZOO[name], ZOO[name].sizes[2]
    module = case.build().to(torch.bfloat16)
    denoiser = maskfx.compile(module)
    inputs = inputs_of(name, torch.bfloat16)
    exact = tensors(module_of(name)(**inputs_of(name, torch.float32)))
    dense = tensors(module(**inputs))
    output, kept = denoiser.record(**inputs)
    assert denoiser.compilations[0].program is not None  # or this compares the module with itself
    got = {"recording": tensors(output)}
    for kind in (masks.stroke, masks.random, masks.border):
        mask = kind(case.mask_shape(size), 0)
        step = maskfx.EditStep(inputs, mask, kept)
        got[kind.__name__] = tensors(denoiser.edit([step])[0])
    for what, values in got.items():
        for value, plain, reference in zip(values, dense, exact, strict=True):
            assert value.dtype == plain.dtype == torch.bfloat16
            allowed = SLACK * relative_error(plain, reference)
            assert 0 < allowed < 0.3, "the test itself says nothing"
            error = relative_error(value, reference)
            assert error < allowed, f"{what}: error {error:.1e}, dense {allowed / SLACK:.1e}"
