"""Pipelines without an autoencoder, or with results and arguments of other names."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import UNet2DModel
from PIL import Image
from torch import Tensor, nn

import maskfx
from maskfx.pipelines.outputs import images_of, set_template, with_images
from tests.factories.pipelines import noise, picture, square
from tests.factories.zoo import tiny

SIDE = 16


def unet() -> Any:
    return tiny(
        UNet2DModel.__name__,
        sample_size=SIDE,
        block_out_channels=(8, 8),
        norm_num_groups=4,
        layers_per_block=1,
        down_block_types=("DownBlock2D",) * 2,
        up_block_types=("UpBlock2D",) * 2,
    )


@dataclass
class Made:
    image: list[Image.Image]


class Pixels:
    """Begins with the pixels of a picture; `image` is a smaller one where `original_image` is."""

    def __init__(self, net: Any) -> None:
        self.unet = net

    @property
    def components(self) -> dict[str, Any]:
        return {"unet": self.unet}

    def begin_step(self, index: int) -> None:
        pass

    def __call__(
        self,
        image: Any,
        original_image: Any = None,
        strength: float = 0.5,
        generator: Any = None,
        output_type: str = "pil",
    ) -> Made:
        begun = image if original_image is None else original_image
        pixels = torch.from_numpy(np.array(begun)).float().movedim(-1, 0)[None] / 127.5 - 1
        values = torch.lerp(pixels, torch.randn(pixels.shape, generator=generator), strength)
        for index, time in enumerate((2.0, 1.0)):
            self.begin_step(index)
            change: Tensor = self.unet(values, torch.tensor(time), return_dict=False)[0]
            values = values + 0.1 * change
        if output_type != "pil":
            raise ValueError(f"the output type is pil, not {output_type}")
        done = (values[0].clamp(-1, 1) * 127.5 + 127.5).round().byte()
        return Made([Image.fromarray(done.movedim(0, -1).numpy())])


@pytest.mark.parametrize("original", [False, True])
def test_the_picture_of_a_pipeline_of_pixels_is_kept_outside_the_mask(original: bool):
    pipe: Any = maskfx.compile(Pixels(unet()), quality="all-steps")
    mask = square(4, 10, SIDE)
    given: dict[str, Any] = {"image": picture(0, SIDE)}
    if original:
        given = {"image": picture(1, SIDE // 2), "original_image": picture(0, SIDE)}
    done = pipe(**given, mask_image=mask, generator=noise(1))
    new, old, inside = (np.asarray(v) for v in (done.image[0], picture(0, SIDE), mask))
    inside = inside > 127
    assert np.array_equal(new[~inside], old[~inside])
    assert (new[inside] != old[inside]).any(-1).mean() > 0.5
    # recorded, although the pipeline refuses to return latents
    assert [template.name for template in pipe.templates()]
    assert "recording fails" not in maskfx.explain(pipe)


class Grounded(nn.Module):
    """A denoiser with a switch, as GLIGEN's layers have."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.near, self.far = nn.Conv2d(3, 3, 3, padding=1), nn.Conv2d(3, 3, 1)
        self.grounded = True

    def forward(self, sample: Tensor, timestep: Tensor, return_dict: bool = True) -> tuple[Tensor]:
        return (self.near(sample) if self.grounded else self.far(sample) + timestep,)


class Switching(Pixels):
    """Changes the switch after the first step."""

    def begin_step(self, index: int) -> None:
        self.unet.grounded = index == 0


def test_a_switch_that_changes_during_a_run_acts():
    own, pipe = Switching(Grounded().eval()), maskfx.compile(Switching(Grounded().eval()))
    for seed in (1, 2, 3):
        given: dict[str, Any] = {"image": picture(0, SIDE), "strength": 0.5}
        wanted = own(**given, generator=noise(seed)).image[0]
        whole = square(0, SIDE, SIDE)
        done = pipe(**given, mask_image=whole, generator=noise(seed), quality="all-steps")
        assert np.array_equal(np.asarray(done.image[0]), np.asarray(wanted))
    assert "a setting of it changes during the run" in maskfx.explain(pipe)


def test_images_of_a_result_may_have_another_name():
    made = Made([picture(0, SIDE)])
    assert images_of(made) is made.image
    other = [picture(1, SIDE)]
    assert with_images(made, lambda _: other).image is other
    assert images_of(object()) is None


def test_images_may_be_all_that_a_pipeline_returns():
    values = np.ones((1, 4, 4, 3))
    assert images_of(values) is values
    assert np.array_equal(with_images(values, lambda seen: 2 * seen), 2 * values)
    set_template(values, "a name")  # which it has no place for
    set_template((values,), "a name")
    made: Any = Made([picture(0, SIDE)])
    set_template(made, "a name")
    assert made.template == "a name"
