"""Tiny denoisers over packed tokens whose picture's sides are integer arguments."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.factories.own_denoisers import SIZES, WIDTH, embed, own
from tests.factories.own_packed import Arranged, between, token_inputs
from tests.factories.zoo import Draw, Size

PADDED = 150  # tokens with the padding behind them
FRAMES = 3
PIXELS = 16


class Gridded(Arranged):
    """Blocks over picture and text, around convolutions of the tokens as a picture."""

    def __init__(self) -> None:
        super().__init__(between)
        self.conv = nn.Conv2d(WIDTH, WIDTH, 3, padding=1)
        self.deep = nn.Conv3d(WIDTH, WIDTH, 3, padding=1)

    def mixed(self, x: Tensor, timestep: Tensor, context: Tensor) -> Tensor:
        text = self.text(context)
        own: Tensor = self.last(self.joined(self.time(embed(timestep)), x, text)[:, : x.shape[1]])
        return own

    def convolved(self, x: Tensor, *sides: int) -> Tensor:
        """Add a convolution of the tokens as a picture, or as a video."""
        layer = self.conv if len(sides) == 2 else self.deep
        own = layer(x.transpose(1, 2).unflatten(2, sides))
        return x + F.silu(own).flatten(2).transpose(1, 2)


class ConvolvedTokens(Gridded):
    """Tokens go in and come out; their picture is convolved in between."""

    def forward(  # type: ignore[override]
        self, sample: Tensor, timestep: Tensor, context: Tensor, height: int, width: int
    ) -> Tensor:
        return self.mixed(self.convolved(self.first(sample), height, width), timestep, context)


class ConvolvedVideo(Gridded):
    """Tokens of a video go in and come out; its frames are convolved in between."""

    def forward(  # type: ignore[override]
        self,
        sample: Tensor,
        timestep: Tensor,
        context: Tensor,
        frames: int,
        height: int,
        width: int,
    ) -> Tensor:
        x = self.convolved(self.first(sample), frames, height, width)
        return self.mixed(x, timestep, context)


class InPixels(ConvolvedTokens):
    """The sides are in pixels, a site is 16 of them wide, and positions are made of them."""

    def forward(  # type: ignore[override]
        self, sample: Tensor, timestep: Tensor, context: Tensor, height: int, width: int
    ) -> Tensor:
        sides = (height // PIXELS, width // PIXELS)
        rows, columns = (torch.arange(side, device=sample.device) for side in sides)
        places = torch.sin(rows[:, None] * 0.3 + columns[None, :] * 0.7).flatten()[:, None]
        x = self.convolved(self.first(sample) + places.to(sample.dtype), *sides)
        return self.mixed(x, timestep, context)


class PaddedTokens(Gridded):
    """Tokens have padding behind them, which takes part in attention."""

    def forward(  # type: ignore[override]
        self, sample: Tensor, timestep: Tensor, context: Tensor, hw: tuple[int, int]
    ) -> Tensor:
        x, count = self.first(sample), hw[0] * hw[1]
        own = self.convolved(x[:, :count], *hw)
        return self.mixed(torch.cat([own, x[:, count:]], 1), timestep, context)


class OfEachSample(Gridded):
    """Each sample's picture is cut out of its tokens, with sides of its own."""

    def forward(  # type: ignore[override]
        self, sample: Tensor, timestep: Tensor, context: Tensor, sizes: list[tuple[int, int]]
    ) -> Tensor:
        x = self.mixed(self.first(sample), timestep, context)
        pictures = [x[i, : h * w].reshape(1, h, w, -1) for i, (h, w) in enumerate(sizes)]
        return torch.cat(pictures).permute(0, 3, 1, 2)


def sided(size: Size, seed: int, *, tokens: int = 0, times: int = 1, **more: Any) -> dict[str, Any]:
    """Tokens, of a fixed number or of several frames, a timestep and text states."""
    count = tokens or times * size.height * size.width
    sample = Draw(seed).normal(size.batch, count, 4)
    return {**token_inputs(size, seed), "sample": sample, **more}


def with_sides(size: Size, seed: int, **more: Any) -> dict[str, Any]:
    return sided(size, seed, height=size.height, width=size.width, **more)


def with_pixels(size: Size, seed: int) -> dict[str, Any]:
    return sided(size, seed, height=PIXELS * size.height, width=PIXELS * size.width)


def padded(size: Size, seed: int) -> dict[str, Any]:
    return sided(size, seed, tokens=PADDED, hw=(size.height, size.width))


def each_padded(size: Size, seed: int) -> dict[str, Any]:
    return sided(size, seed, tokens=PADDED, sizes=[(size.height, size.width)] * size.batch)


own("grid-of-tokens", ConvolvedTokens, with_sides, quick=True)
own("grid-in-pixels", InPixels, with_pixels)
own("grid-of-padded-tokens", PaddedTokens, padded, quick=True)
own("grid-of-each-sample", OfEachSample, each_padded)
own(
    "grid-of-a-video",
    ConvolvedVideo,
    lambda size, seed: sided(
        size, seed, times=FRAMES, frames=FRAMES, height=size.height, width=size.width
    ),
    sizes=SIZES[:2],
    mask_shape=lambda size: (FRAMES, size.height, size.width),
)
