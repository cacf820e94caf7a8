"""What a pipeline's signature takes, and a job's wishes under its names."""

from __future__ import annotations

from typing import Any

import pytest

from maskfx.serve.models.call_signature import CallSignature
from tests.factories.served import job


class Pipe:
    """Guidance twice: a number that the denoiser gets, and true guidance, off by itself."""

    def __call__(
        self,
        prompt: str = "",
        negative_prompt: str | None = None,
        true_cfg_scale: float = 1.0,
        guidance_scale: float = 3.5,
    ) -> None: ...


@pytest.mark.parametrize(
    ("told", "wanted"), [({}, {}), ({"true_cfg_scale": 4.0}, {"negative_prompt": ""})]
)
def test_true_guidance_that_a_folder_tells_is_on(
    told: dict[str, Any], wanted: dict[str, Any]
) -> None:
    """It is away from a negative prompt, and off without one."""
    found = CallSignature.of(Pipe(), told).arguments(job(prompt="a hat", steps=None).request)
    assert found == {"prompt": "a hat", **told, **wanted}
    said = CallSignature.of(Pipe(), told).arguments(
        job(prompt="", steps=None, negative_prompt="rain").request
    )
    assert said["negative_prompt"] == "rain"
