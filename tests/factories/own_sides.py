"""Tiny denoisers that read the sides of their picture, or counts of its tokens, from a tensor."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from tests.factories.own_denoisers import SIZES, WIDTH, embed, own, with_text
from tests.factories.own_gridded import FRAMES, PADDED, PIXELS, Gridded, sided
from tests.factories.zoo import Size, packed

Read = Callable[[Tensor], tuple[int, ...]]


class SidesOfTokens(Gridded):
    """Tokens are convolved as the picture, or as the video, whose sides a tensor has."""

    def __init__(self, read: Read) -> None:
        super().__init__()
        self.read = read

    def forward(  # type: ignore[override]
        self, sample: Tensor, timestep: Tensor, context: Tensor, img_sizes: Tensor
    ) -> Tensor:
        x = self.convolved(self.first(sample), *self.read(img_sizes))
        return self.mixed(x, timestep, context)


class SidesOfPatches(Gridded):
    """A picture in patches of 2x2, whose places and whose result follow from a tensor."""

    def __init__(self, read: Read) -> None:
        super().__init__()
        self.read = read
        self.patches = nn.Conv2d(4, WIDTH, 2, 2)
        self.pixels = nn.Linear(WIDTH, 16)

    def forward(  # type: ignore[override]
        self, sample: Tensor, timestep: Tensor, context: Tensor, img_sizes: Tensor
    ) -> Tensor:
        h, w = self.read(img_sizes)
        rows, columns = torch.arange(h), torch.arange(w)
        places = torch.sin(rows[:, None] * 0.3 + columns[None, :] * 0.7).flatten()[:, None]
        x = self.patches(sample).flatten(2).transpose(1, 2) + places
        y = self.joined(self.time(embed(timestep)), x, self.text(context))[:, : x.shape[1]]
        y = self.pixels(y).reshape(-1, h, w, 4, 2, 2)
        return y.permute(0, 3, 1, 4, 2, 5).reshape(-1, 4, 2 * h, 2 * w)


class SidesOfEach(Gridded):
    """Each sample's picture is cut out of its tokens by the sides in its row."""

    def forward(  # type: ignore[override]
        self, sample: Tensor, timestep: Tensor, context: Tensor, img_sizes: Tensor
    ) -> Tensor:
        x = self.mixed(self.first(sample), timestep, context)
        sides = enumerate(img_sizes.tolist())
        pictures = [x[i, : h * w].reshape(1, h, w, -1) for i, (h, w) in sides]
        return torch.cat(pictures).permute(0, 3, 1, 2)


class CountOfTokens(Gridded):
    """Picture and text are one sequence, of which as many tokens are the picture's as stated."""

    def forward(  # type: ignore[override]
        self, sample: Tensor, timestep: Tensor, context: Tensor, img_len: Tensor
    ) -> Tensor:
        y = self.joined(self.time(embed(timestep)), self.first(sample), self.text(context))
        return self.last(y[:, : int(img_len[0])])


class SidesAndMask(SidesOfTokens):
    """Beside the sides, a mask decides how many tokens of the text are kept."""

    def forward(  # type: ignore[override]
        self, sample: Tensor, timestep: Tensor, context: Tensor, img_sizes: Tensor, kept: Tensor
    ) -> Tensor:
        places = kept[0].nonzero().squeeze(1)
        return super().forward(sample, timestep, context[:, places], img_sizes)


def listed(sizes: Tensor) -> tuple[int, ...]:
    return tuple(sizes[0].tolist())


def iterated(sizes: Tensor) -> tuple[int, ...]:
    h, w = sizes[0]
    return int(h), int(w.item())


def in_pixels(sizes: Tensor) -> tuple[int, ...]:
    h, w = (sizes // PIXELS).unbind(-1)
    return int(h.max()), int(w.max())


def turned(sizes: Tensor) -> tuple[int, ...]:
    w, h = sizes[0].tolist()
    return h, w


def cumulated(sizes: Tensor) -> tuple[int, ...]:
    """The sides, one of which follows from sums that an export doesn't know."""
    ends = torch.repeat_interleave(sizes[:, 1] * sizes[:, 2], sizes[:, 0]).cumsum(0)
    h = int(sizes[0, 1])
    return h, int(ends[0]) // h


def rows(size: Size, *numbers: int) -> Tensor:
    """The same numbers for each sample."""
    return torch.tensor([numbers] * size.batch)


def sides(size: Size, seed: int, scale: int = 1) -> dict[str, Any]:
    numbers = rows(size, scale * size.height, scale * size.width)
    return sided(size, seed, img_sizes=numbers)


def width_first(size: Size, seed: int) -> dict[str, Any]:
    return sided(size, seed, img_sizes=rows(size, size.width, size.height))


def of_patches(size: Size, seed: int) -> dict[str, Any]:
    return {**with_text(size, seed), "img_sizes": rows(size, size.height // 2, size.width // 2)}


def of_video(size: Size, seed: int) -> dict[str, Any]:
    return sided(size, seed, times=FRAMES, img_sizes=rows(size, FRAMES, size.height, size.width))


def padded(size: Size, seed: int) -> dict[str, Any]:
    return sided(size, seed, tokens=PADDED, img_sizes=rows(size, size.height, size.width))


def counted(size: Size, seed: int) -> dict[str, Any]:
    return sided(size, seed, img_len=rows(size, size.height * size.width)[:, 0])


def with_mask(size: Size, seed: int) -> dict[str, Any]:
    kept = (torch.arange(size.text) % 2 == 0).expand(size.batch, -1).contiguous()
    return {**sides(size, seed), "kept": kept}


def with_ones(size: Size, seed: int) -> dict[str, Any]:
    """The sides behind a number of frames, for all samples together."""
    return sided(size, seed, img_sizes=torch.tensor([[1, size.height, size.width]]))


def first_two(sizes: Tensor) -> tuple[int, ...]:
    return tuple(sizes.tolist())


def flat(size: Size, seed: int) -> dict[str, Any]:
    return sided(size, seed, img_sizes=torch.tensor([size.height, size.width]))


own("sides-of-tokens", partial(SidesOfTokens, iterated), sides, quick=True)
own("sides-in-pixels", partial(SidesOfTokens, in_pixels), partial(sides, scale=PIXELS))
own("sides-in-one-row", partial(SidesOfTokens, first_two), flat)
own("sides-turned", partial(SidesOfTokens, turned), width_first)
own("sides-of-patches", partial(SidesOfPatches, listed), of_patches, quick=True)
own("sides-of-each", SidesOfEach, padded)
own("sides-cumulated", partial(SidesOfTokens, cumulated), with_ones)
own("sides-and-mask", partial(SidesAndMask, listed), with_mask)
own("sides-counted", CountOfTokens, counted, mask_shape=packed)
own(
    "sides-of-a-video",
    partial(SidesOfTokens, listed),
    of_video,
    sizes=SIZES[:2],
    mask_shape=lambda size: (FRAMES, size.height, size.width),
)
