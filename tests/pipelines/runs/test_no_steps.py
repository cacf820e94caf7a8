"""A strength that leaves no step is refused, where pipelines fail in their first operator."""

from __future__ import annotations

import pytest

from maskfx.errors import InputError
from tests.factories.pipelines import PIPES, call_of, compiled, square


@pytest.mark.parametrize(
    ("name", "masked"),
    [("StableDiffusionInpaintPipeline", True), ("StableDiffusionImg2ImgPipeline", False)],
)
def test_a_strength_that_leaves_no_step_is_refused(name: str, masked: bool) -> None:
    mask = square() if masked else None
    wanted = f"{name} has no step to run with strength=0.01, num_inference_steps=5: raise strength"
    with pytest.raises(InputError, match=wanted):
        compiled(name)(**call_of(PIPES[name], 0, mask, strength=0.01, num_inference_steps=5))
