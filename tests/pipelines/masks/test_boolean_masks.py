"""Boolean and integer masks serve pipelines that resize their mask, which needs floats."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from tests.factories.pipelines import PIPES, SIDE, call_of, compiled, latents

KIND = "StableDiffusionInpaintPipeline"
EMPTY = np.zeros((SIDE, SIDE), np.bool_)  # the pipeline runs as it is: nothing is captured


@pytest.mark.parametrize(
    "mask",
    [EMPTY, torch.tensor(EMPTY), torch.tensor(EMPTY).long(), [EMPTY]],
    ids=["array", "tensor", "integers", "list"],
)
def test_a_mask_of_booleans_or_integers_is_accepted(mask: Any) -> None:
    given = call_of(PIPES[KIND], 0)
    found = latents(compiled(KIND), **given, mask_image=mask)
    given = call_of(PIPES[KIND], 0)
    wanted = latents(compiled(KIND), **given, mask_image=EMPTY.astype(np.float32))
    assert torch.equal(found, wanted)
