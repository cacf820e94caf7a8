"""Tiny denoisers of videos as users write them: windows and attention over frames."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.factories.own_denoisers import OWN, QUICK, WIDTH, built, embed
from tests.factories.zoo import Case, Draw, Size

FRAMES = 3
HEADS, DEPTH = 2, WIDTH // 2
SIZES = (Size(1, 8, 8), Size(2, 6, 10), Size(1, 9, 7))


class Film(nn.Module):
    """Blocks over a video, called as block(x, embedding) between two convolutions."""

    def __init__(self, *blocks: nn.Module, channels: int = 4) -> None:
        super().__init__()
        self.first = nn.Conv3d(channels, WIDTH, (1, 3, 3), padding=(0, 1, 1))
        self.time = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.SiLU(), nn.Linear(WIDTH, WIDTH))
        self.blocks = nn.ModuleList(blocks)
        self.last = nn.Conv3d(WIDTH, 4, 1)

    def forward(self, sample: Tensor, timestep: Tensor) -> Tensor:
        emb = self.time(embed(timestep))
        x = self.first(sample)
        for block in self.blocks:
            x = block(x, emb)
        out: Tensor = self.last(x)
        return out


class FilmBlock(nn.Module):
    """A residual block: what `mix` computes, after a shift by the timestep."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Linear(WIDTH, WIDTH)

    @abstractmethod
    def mix(self, x: Tensor) -> Tensor:
        """Return what is added to the video."""

    def forward(self, x: Tensor, emb: Tensor) -> Tensor:
        return x + self.mix(x + self.shift(emb)[:, :, None, None, None])


class Layers(FilmBlock):
    """Layers of torch in a row."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.Sequential(*layers)

    def mix(self, x: Tensor) -> Tensor:
        out: Tensor = self.layers(x)
        return out


conv = partial(nn.Conv3d, WIDTH, WIDTH)


class Causal(FilmBlock):
    """A convolution that reads frames before its own, which begin with zeros or the first one."""

    def __init__(self, mode: str) -> None:
        super().__init__()
        self.mode, self.layer = mode, conv(3)

    def mix(self, x: Tensor) -> Tensor:
        out: Tensor = self.layer(F.pad(x, (1, 1, 1, 1, 2, 0), mode=self.mode))
        return out


class FrameByFrame(FilmBlock):
    """A convolution of pictures, with the frames among the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Conv2d(WIDTH, WIDTH, 3, padding=1)

    def mix(self, x: Tensor) -> Tensor:
        b, c, f, h, w = x.shape
        y = self.layer(x.permute(0, 2, 1, 3, 4).reshape(b * f, c, h, w))
        return y.view(b, f, c, h, w).permute(0, 2, 1, 3, 4)


class Through(FilmBlock):
    """A convolution along the frames, with all sites of a frame in one dimension."""

    def __init__(self, kernel: int = 3) -> None:
        super().__init__()
        self.layer = nn.Conv2d(WIDTH, WIDTH, (kernel, 1), padding=(kernel // 2, 0))

    def mix(self, x: Tensor) -> Tensor:
        b, c, f, h, w = x.shape
        out: Tensor = self.layer(x.view(b, c, f, h * w)).view(b, c, f, h, w)
        return out


class Attention(FilmBlock):
    """Attention among all sites, those of each frame, or those of one place in all frames."""

    def __init__(self, along: str) -> None:
        super().__init__()
        self.along, self.norm = along, nn.LayerNorm(WIDTH)
        self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def mix(self, x: Tensor) -> Tensor:
        b, c, f, h, w = x.shape
        y = self.norm(x.permute(0, 2, 3, 4, 1))
        if self.along == "all":
            y = y.reshape(b, f * h * w, c)
        elif self.along == "picture":
            y = y.reshape(b * f, h * w, c)
        else:
            y = y.permute(0, 2, 3, 1, 4).reshape(b * h * w, f, c)
        many, n, _ = y.shape
        q, k, v = self.qkv(y).view(many, n, 3, HEADS, DEPTH).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(many, n, c)
        y = self.proj(y)
        if self.along == "frames":
            return y.view(b, h, w, f, c).permute(0, 4, 3, 1, 2)
        return y.view(b, f, h, w, c).permute(0, 4, 1, 2, 3)


class Turned(FilmBlock):
    """Frames in another order: the last one first, as references stand behind a picture."""

    def __init__(self, *layers: FilmBlock) -> None:
        super().__init__()
        self.layer, self.layers = conv((1, 3, 3), padding=(0, 1, 1)), nn.ModuleList(layers)

    def mix(self, x: Tensor) -> Tensor:
        x = self.layer(torch.cat([x[:, :, -1:], x[:, :, :-1]], 2))
        for layer in self.layers:
            assert isinstance(layer, FilmBlock)
            x = layer.mix(x)
        return torch.cat([x[:, :, 1:], x[:, :, :1]], 2)


class Placed(FilmBlock):
    """A vector for each frame, one for each place, and a product of both with the sites."""

    def __init__(self) -> None:
        super().__init__()
        self.frame = nn.Parameter(torch.randn(1, WIDTH, FRAMES, 1, 1))
        self.layer = conv(1)

    def mix(self, x: Tensor) -> Tensor:
        rows = torch.arange(x.shape[3]).float().sin().view(1, 1, 1, -1, 1)
        columns = torch.arange(x.shape[4]).float().cos().view(1, 1, 1, 1, -1)
        out: Tensor = self.layer(x * self.frame + rows * columns) * (1 + rows)
        return out


def film(
    name: str, make: Callable[[], nn.Module], *, narrow: bool = True, quick: bool = False
) -> None:
    """Add a case that takes a video."""
    assert name not in OWN, name
    OWN[name] = Case(name, partial(built, make), inputs, filmed, SIZES, narrow)
    if quick:
        QUICK.add(name)


def inputs(size: Size, seed: int) -> dict[str, Any]:
    draw = Draw(seed)
    sample = draw.normal(size.batch, 4, FRAMES, size.height, size.width)
    return {"sample": sample, "timestep": draw.steps(size.batch)}


def filmed(size: Size) -> tuple[int, ...]:
    return FRAMES, size.height, size.width


def blocks(*made: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    return lambda: Film(*[make() for make in made])


film(
    "film-windows",
    blocks(lambda: Layers(nn.GroupNorm(4, WIDTH), nn.SiLU(), conv(3, padding=1))),
    quick=True,
)
film(
    "film-in-time",
    blocks(lambda: Layers(conv((3, 1, 1), padding=(1, 0, 0))), Through, lambda: Through(5)),
    quick=True,
)
film("film-depthwise", blocks(lambda: Layers(conv(3, padding=1, groups=WIDTH), conv(1))))
film("film-groups", blocks(lambda: Layers(conv(3, padding=1, groups=4), nn.SiLU())))
film("film-causal", blocks(partial(Causal, "constant"), partial(Causal, "replicate")), quick=True)
film("film-by-frame", blocks(FrameByFrame))
film("film-attention", blocks(partial(Attention, "all")))
film(
    "film-in-turn", blocks(partial(Attention, "picture"), partial(Attention, "frames")), quick=True
)
film("film-turned", blocks(lambda: Turned(Attention("all"))), quick=True)
film("film-placed", blocks(Placed))
film(
    "film-resampled",
    blocks(lambda: Layers(conv(3, padding=1), nn.Upsample(scale_factor=(1, 1, 1)))),
    narrow=False,
)
