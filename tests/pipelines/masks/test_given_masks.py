"""Masks with colours become masks of one number for each pixel; too many masks are refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from maskfx.errors import MaskError
from maskfx.pipelines.masks.given_masks import accepted_mask
from tests.factories.pipelines import PIPES, SIDE, call_of, compiled, latents, picture, square

KIND = "StableDiffusionInpaintPipeline"
MASK = np.zeros((6, 8), np.float32)
MASK[2:4, 3:6] = 1


def accepted(mask: Any, **more: Any) -> Any:
    return accepted_mask(mask, "mask_image", {"mask_image": mask, "image": picture(), **more})


@pytest.mark.parametrize("channels", [3, 4])
def test_colours_become_one_number(channels: int) -> None:
    colours = np.stack([MASK * 0, MASK, MASK * 0, np.ones_like(MASK)][:channels], -1)
    assert np.array_equal(accepted(colours), MASK)
    assert np.array_equal(accepted(colours[None])[0, ..., 0], MASK)
    as_bytes = (255 * colours).astype(np.uint8)
    assert np.array_equal(accepted([as_bytes])[0], 255 * MASK)
    tensor = torch.from_numpy(colours).movedim(-1, 0)
    for given in (tensor, tensor[None]):
        assert torch.equal(accepted(given).reshape(6, 8), torch.from_numpy(MASK))


def test_what_has_no_colours_stays() -> None:
    tensor = torch.from_numpy(MASK)
    for given in (MASK, MASK[None], MASK[..., None], tensor, tensor[None], square(), None):
        assert accepted(given) is given
    three = tensor.repeat(3, 1, 1)  # for three pictures they are masks
    assert accepted(three, prompt=["a", "b", "c"]) is three


def test_masks_that_no_picture_is_left_for_are_refused() -> None:
    message = r"mask_image: expected one mask, .* got 2 for 1 picture\(s\)"
    pair = torch.from_numpy(MASK)[None, None].repeat(2, 1, 1, 1)
    for given in (pair, pair.numpy(), [square(), square()]):
        with pytest.raises(MaskError, match=message):
            accepted(given, prompt=["a", "b", "c"])
        for more in ({"num_images_per_prompt": 2}, {"prompt": ["a", "b"]}, {"latents": pair}):
            assert len(accepted(given, **more)) == 2


def test_a_call_reads_the_colours_of_its_mask() -> None:
    empty = np.zeros((SIDE, SIDE, 3), np.float32)  # the pipeline runs as it is
    found = latents(compiled(KIND), **call_of(PIPES[KIND], 0), mask_image=empty)
    wanted = latents(compiled(KIND), **call_of(PIPES[KIND], 0), mask_image=empty[..., 0])
    assert torch.equal(found, wanted)
