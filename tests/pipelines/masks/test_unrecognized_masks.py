"""A mask under a name that isn't read as one: the call runs whole, and explain() has the reason."""

import logging
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import maskfx
from maskfx.pipelines.masks.unrecognized_masks import reason, unrecognized_masks
from tests.factories.pipelines import PIPES, call_of, latents, square

PICTURE = Image.new("L", (32, 32), 255)


@pytest.mark.parametrize(
    ("arguments", "found"),
    [
        ({"mask": PICTURE, "image": PICTURE}, ["mask"]),
        ({"control_mask": np.zeros((32, 32), np.uint8)}, ["control_mask"]),
        ({"masks": [torch.zeros(1, 1, 32, 32)], "prompt": "a"}, ["masks"]),
        ({"prompt_attention_mask": np.ones((1, 77)), "prompt_embeds_mask": torch.ones(1, 9)}, []),
        ({"attention_mask": torch.ones(1, 1, 9), "padding_mask_crop": 8}, []),
        ({"mask": None, "masked_image_latents": torch.zeros(1, 3, 8, 8), "mask_start": 1}, []),
        ({"prompt": "a cat with a mask", "unmasked": PICTURE}, []),
    ],
)
def test_arguments_that_look_like_a_mask(arguments: dict[str, Any], found: list[str]) -> None:
    assert unrecognized_masks(arguments) == found


def test_the_names_that_a_video_may_use_are_given() -> None:
    assert "mask_image=, mask_video=, mask= only" in reason("inpaint_mask", "P", ["num_frames"])


def test_a_renamed_mask_is_explained(caplog: pytest.LogCaptureFixture) -> None:
    name = "StableDiffusionInpaintPipeline"
    pipe = PIPES[name].build()

    class Renamed(type(pipe)):  # type: ignore[misc]
        def __call__(self, image: Any = None, mask: Any = None, **more: Any) -> Any:
            return super().__call__(image=image, mask_image=mask, **more)

    pipe.__class__ = Renamed
    pipe = maskfx.compile(pipe)
    given = call_of(PIPES[name])
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            latents(pipe, **given, mask=square(4, 12))
    told = reason("mask", "Renamed", ["mask"])
    assert f"2 calls of {told}" in maskfx.explain(pipe)
    assert [record.message for record in caplog.records].count(told) == 1


def test_text_to_image_notes_no_mask() -> None:
    name = "StableDiffusionPipeline"
    pipe = maskfx.compile(PIPES[name].build())
    latents(pipe, **call_of(PIPES[name]))
    assert "mask is recognized" not in maskfx.explain(pipe)
