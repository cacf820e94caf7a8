"""The second oracle: edits whose inputs differ from the recorded ones, against the slow twin.

Text, latent (inside the mask and outside it) and residuals are those of another seed; timestep and
guidance are those of the recording, as at the same step of another request.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import maskfx
from tests.factories import twin
from tests.factories.masks import MASKS
from tests.factories.zoo import ZOO, Size, marked
from tests.runtime.test_oracle import (
    NAMED,
    assert_kept_outside,
    assert_near,
    denoiser_of,
    module_of,
    relative_error,
    sites_of,
    tensors,
)

OF_THE_STEP = ("timestep", "guidance", "conditioning_scale")
RAGGED = [
    "UNet2DConditionModel-residuals",
    "ControlNetModel",
    "FluxTransformer2DModel-control",
    "QwenImageTransformer2DModel",
    "SD3Transformer2DModel-control",
    "HunyuanDiT2DModel-control",
    "SanaTransformer2DModel",
]


def other_inputs(name: str, size: Size, seed: int, step_seed: int) -> dict[str, Any]:
    """Inputs of one seed at the step of another."""
    inputs = ZOO[name].inputs(size, seed)
    step = ZOO[name].inputs(size, step_seed)
    return {key: step[key] if key in OF_THE_STEP else inputs[key] for key in inputs}


def by_the_twin(name: str, size: Size, old: int, new: int, mask: Tensor) -> Any:
    """What an edit means; skips the test where the twin has no answer."""
    case, module = ZOO[name], module_of(name)
    recording = twin.record(module, case.inputs(size, old))[1]
    inputs = other_inputs(name, size, new, old)
    try:
        return twin.edit(module, inputs, mask, recording, text_first=case.text_first)
    except (ValueError, NotImplementedError) as reason:
        pytest.skip(f"the twin says: {reason}")


def assert_agrees(mask: Tensor, got: Any, expected: Any, output: Any, what: object) -> None:
    """As the twin where masked (measured there alone), as the record elsewhere."""
    one, two = ([v[sites_of(mask, v)] for v in tensors(tree)] for tree in (got, expected))
    assert_near(one, two, what)
    assert_kept_outside(mask, got, output, what)


@pytest.mark.parametrize("name", marked(NAMED))
def test_changed_inputs_mean_what_the_twin_says(name: str) -> None:
    case = ZOO[name]
    for seed, (size, kind) in enumerate(
        [(case.sizes[1], "stroke"), (case.sizes[2], "random"), (case.sizes[-1], "square")]
    ):
        old, new = 100 + seed, 200 + seed
        mask = MASKS[kind](case.mask_shape(size), seed)
        expected = by_the_twin(name, size, old, new, mask)
        output, kept = denoiser_of(name).record(**case.inputs(size, old))
        step = maskfx.EditStep(other_inputs(name, size, new, old), mask, kept)
        got = denoiser_of(name).edit([step])[0]
        assert_agrees(mask, got, expected, output, f"{kind} at {size}")

        # The rule of the rest matters: recomputing everything gives another picture.
        dense = module_of(name)(**other_inputs(name, size, new, old))
        at = sites_of(mask, tensors(dense)[0])
        assert relative_error(tensors(dense)[0][at], tensors(expected)[0][at]) > 1e-3


@pytest.mark.parametrize("name", marked(RAGGED))
def test_a_ragged_batch_of_changed_inputs(name: str) -> None:
    case, denoiser = ZOO[name], denoiser_of(name)
    kinds = ("stroke", "random", "one_site", "border", "dense_random")
    steps, expected, outputs = [], [], []
    for i, kind in enumerate(kinds):
        size = case.sizes[i % len(case.sizes)]
        old, new = 300 + i, 400 + i
        mask = MASKS[kind](case.mask_shape(size), i)
        expected.append(by_the_twin(name, size, old, new, mask))
        output, kept = denoiser.record(**case.inputs(size, old))
        outputs.append(output)
        steps.append(maskfx.EditStep(other_inputs(name, size, new, old), mask, kept))
    got = denoiser.edit(steps)
    for i, step in enumerate(steps):
        assert_agrees(step.mask, got[i], expected[i], outputs[i], f"member {i}, {kinds[i]}")


@pytest.mark.parametrize("name", marked(["UNet2DConditionModel-sd15", "FluxTransformer2DModel"]))
def test_the_latent_outside_the_mask_does_not_matter(name: str) -> None:
    case, size = ZOO[name], ZOO[name].sizes[0]
    mask = MASKS["stroke"](case.mask_shape(size), 5)
    kept = denoiser_of(name).record(**case.inputs(size, 500))[1]
    inputs = other_inputs(name, size, 501, 500)
    latent = "sample" if "sample" in inputs else "hidden_states"
    far = torch.where(sites_of(mask, inputs[latent]), inputs[latent], 100 * inputs[latent])
    spoilt = {**inputs, latent: far}
    one, two = (
        tensors(denoiser_of(name).edit([maskfx.EditStep(i, mask, kept)])[0])
        for i in (inputs, spoilt)
    )
    assert all(torch.equal(a, b) for a, b in zip(one, two, strict=True))


@pytest.mark.parametrize("name", marked(["UNet2DConditionModel-sd15", "FluxTransformer2DModel"]))
def test_tensors_changed_in_place_are_seen(name: str) -> None:
    """Text is computed once for each request: by what the tensor holds, not by which one it is."""
    case, size = ZOO[name], ZOO[name].sizes[0]
    denoiser = denoiser_of(name)
    inputs, mates = case.inputs(size, 510), case.inputs(size, 511)
    first = denoiser.batch([inputs, mates])[0]
    inputs["encoder_hidden_states"].mul_(-2.0)
    expected = module_of(name)(**inputs)
    assert relative_error(tensors(expected)[0], tensors(first)[0]) > 1e-3
    assert_near(denoiser.batch([inputs, mates])[0], expected)


@pytest.mark.parametrize("name", marked(["UNet2DConditionModel-sd15", "FluxTransformer2DModel"]))
def test_inference_tensors_changed_in_place_are_seen(name: str) -> None:
    """These count no versions, so a change doesn't show but in the values."""
    case, size = ZOO[name], ZOO[name].sizes[0]
    with torch.inference_mode():
        inputs = case.inputs(size, 520)
        denoiser_of(name).batch([inputs])
        inputs["encoder_hidden_states"].mul_(-2.0)
        assert_near(denoiser_of(name).batch([inputs])[0], module_of(name)(**inputs))
