"""A crop around the mask: the sites that are computed are those of the pixels that are edited."""

from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from maskfx.pipelines.handlers import edit_handler
from maskfx.pipelines.masks.mask_grids import MaskGrids
from maskfx.pipelines.masks.masks import Box, frame_mask, pixel_mask
from tests.factories.pipelines import PIPES, anew, call_of, picture

FLUX = "FluxInpaintPipeline"


def bar(width: int, height: int, box: Box) -> Image.Image:
    mask = np.zeros((height, width), np.uint8)
    mask[box[1] : box[3], box[0] : box[2]] = 255
    return Image.fromarray(mask)


def processor() -> Any:
    """A mask processor as inpainting pipelines make it."""
    from diffusers.image_processor import VaeImageProcessor

    return VaeImageProcessor(
        vae_scale_factor=8, do_normalize=False, do_binarize=True, do_convert_grayscale=True
    )


def of_pipeline(mask: Image.Image, box: Box, size: tuple[int, int], own: Any = None) -> Tensor:
    """The pipeline's mask of the crop."""
    given = {"resize_mode": "fill", "crops_coords": box}
    made: Tensor = (own or processor()).preprocess(mask, *size, **given)
    return made[0, 0] > 0.5


@pytest.mark.parametrize("size", [(64, 64), (64, 96), (128, 64)])
@pytest.mark.parametrize(
    ("width", "height", "box"),
    [
        (96, 32, (4, 12, 90, 20)),
        (96, 32, (4, 0, 90, 3)),  # at the edge, which is continued into the bars
        (32, 96, (12, 4, 20, 90)),
        (200, 50, (0, 10, 180, 40)),
        (64, 64, (20, 20, 40, 30)),
    ],
)
def test_sites_lie_where_the_pipelines_crop_has_its_mask(
    size: tuple[int, int], width: int, height: int, box: Box
):
    mask = bar(width, height, box)
    crop = processor().get_crop_region(mask, size[1], size[0], pad=2)
    wanted, found = of_pipeline(mask, crop, size), frame_mask(pixel_mask(mask), crop, size)
    assert found.shape == wanted.shape
    assert bool((found >= wanted).all())
    assert int((found & ~wanted).sum()) <= 2 * sum(size)  # the border


def test_a_letterboxed_crop_is_edited_where_its_mask_is(monkeypatch: pytest.MonkeyPatch):
    seen: list[MaskGrids] = []

    def watch(*given: Any) -> MaskGrids:
        seen.append(MaskGrids(*given))
        return seen[-1]

    monkeypatch.setattr(edit_handler, "MaskGrids", watch)
    wide = picture(1, 96).crop((0, 0, 96, 32))
    mask = bar(96, 32, (4, 12, 90, 20))
    pipe = anew(FLUX)
    done = pipe(**call_of(PIPES[FLUX], 0, mask, image=wide, padding_mask_crop=2)).images[0]
    inside, old, new = np.asarray(mask) > 127, np.asarray(wide), np.asarray(done)
    assert np.array_equal(new[~inside], old[~inside])
    assert (new[inside] != old[inside]).any()
    crop = pipe.mask_processor.get_crop_region(mask, 32, 32, pad=2)
    wanted = of_pipeline(mask, crop, (32, 32), pipe.mask_processor)
    pixels = seen[-1].pixels
    assert bool((pixels >= wanted).all())
    assert torch.equal(pixels.any(1), wanted.any(1))
