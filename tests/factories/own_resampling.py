"""Tiny denoisers with blocks that resample, or that mix all sites, as users write them."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.factories.own_denoisers import (
    ODD_SIZES,
    WIDTH,
    Block,
    Picture,
    conv,
    embed,
    own,
    plain,
)
from tests.factories.zoo import Draw, Size


class Resampled(Block):
    """A smaller copy, and back to the size."""

    def __init__(self, down: dict[str, Any], up: dict[str, Any], exact: bool = False) -> None:
        super().__init__()
        self.down, self.up, self.exact, self.conv = down, up, exact, conv(3, padding=1)

    def mix(self, x: Tensor) -> Tensor:
        small = F.silu(self.conv(F.interpolate(x, scale_factor=0.5, **self.down)))
        if self.exact:
            return F.interpolate(small, size=x.shape[-2:], **self.up)
        return F.interpolate(small, scale_factor=2, **self.up)


def resampled(down: dict[str, Any], up: dict[str, Any], exact: bool = False) -> Any:
    return lambda: Picture(Resampled(down, up, exact))


class Blurred(Block):
    """Antialiased pooling: reflected borders, a fixed depthwise filter, every other site."""

    filter: Tensor

    def __init__(self, mode: str = "reflect") -> None:
        super().__init__()
        self.mode, self.conv = mode, conv(3, padding=1)
        taps = torch.tensor([1.0, 3.0, 3.0, 1.0])
        self.register_buffer("filter", (taps[:, None] * taps[None] / 64)[None, None])

    def mix(self, x: Tensor) -> Tensor:
        kernel = self.filter.to(x.dtype).repeat(x.shape[1], 1, 1, 1)
        small = F.conv2d(F.pad(x, (1, 1, 1, 1), self.mode), kernel, stride=2, groups=x.shape[1])
        wide = F.conv_transpose2d(
            self.conv(small), kernel * 4, stride=2, padding=1, groups=x.shape[1]
        )
        return F.silu(wide)


class Strided(Block):
    """Strided depthwise down, overlapping transposed convolution up, with a skip."""

    def __init__(self) -> None:
        super().__init__()
        self.down = conv(3, stride=2, padding=1, groups=WIDTH)
        self.middle = conv(3, padding=2, dilation=2, groups=4)
        self.up = nn.ConvTranspose2d(WIDTH, WIDTH, 4, stride=2, padding=1)

    def mix(self, x: Tensor) -> Tensor:
        return self.up(F.silu(self.middle(self.down(x))))


class Shuffled(Block):
    """Pixel unshuffle and shuffle around a convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(4 * WIDTH, 4 * WIDTH, 3, padding=1, groups=2)

    def mix(self, x: Tensor) -> Tensor:
        return F.pixel_shuffle(F.silu(self.conv(F.pixel_unshuffle(x, 2))), 2)


class Haar(Block):
    """Haar wavelets by strided slices, and back by writes to every other site."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(4 * WIDTH, 4 * WIDTH, 3, padding=1)

    def mix(self, x: Tensor) -> Tensor:
        a, b = x[:, :, 0::2, 0::2], x[:, :, 1::2, 0::2]
        c, d = x[:, :, 0::2, 1::2], x[:, :, 1::2, 1::2]
        bands = torch.cat([a + b + c + d, a - b + c - d, a + b - c - d, a - b - c + d], 1) / 2
        a, b, c, d = F.silu(self.conv(bands)).chunk(4, 1)
        out = torch.zeros_like(x)
        out[:, :, 0::2, 0::2] = a + b + c + d
        out[:, :, 1::2, 0::2] = a - b + c - d
        out[:, :, 0::2, 1::2] = a + b - c - d
        out[:, :, 1::2, 1::2] = a - b - c + d
        return out / 2


class Pyramids(Block):
    """A Laplacian pyramid: what a smaller copy lacks is computed apart and added again."""

    def __init__(self) -> None:
        super().__init__()
        self.coarse, self.fine = conv(3, padding=1), conv(3, padding=1)

    def mix(self, x: Tensor) -> Tensor:
        small = F.avg_pool2d(x, 2)
        detail = x - F.interpolate(small, scale_factor=2.0, mode="nearest")
        small = F.silu(self.coarse(small))
        return F.silu(self.fine(detail)) + F.interpolate(small, scale_factor=2.0, mode="nearest")


class Pooled(Block):
    """Max pooling, and pools with padding."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = conv(3, padding=1)

    def mix(self, x: Tensor) -> Tensor:
        small = self.conv(F.max_pool2d(x, 2))
        near = F.max_pool2d(x, 3, stride=1, padding=1) - F.avg_pool2d(x, 3, stride=1, padding=1)
        return F.interpolate(small, scale_factor=2) + near


class Context(Block):
    """Global context: softmax over sites, a weighted mean, added everywhere."""

    def __init__(self) -> None:
        super().__init__()
        self.score, self.conv = nn.Conv2d(WIDTH, 1, 1), nn.Conv2d(WIDTH, WIDTH, 1)

    def mix(self, x: Tensor) -> Tensor:
        weight = self.score(x).flatten(2).softmax(-1)  # [b, 1, n]
        context = torch.einsum("bcn,bon->bc", x.flatten(2), weight)
        return F.silu(self.conv(x) + context[:, :, None, None])


class Spectral(Block):
    """A product in the frequency domain, which mixes all sites."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.scale = conv(3, padding=1), nn.Parameter(torch.randn(WIDTH, 1, 1))

    def mix(self, x: Tensor) -> Tensor:
        waves = torch.fft.rfft2(x, norm="ortho")
        return self.conv(torch.fft.irfft2(waves * self.scale, s=x.shape[-2:], norm="ortho"))


class Deformed(Block):
    """Sites read where an offset points to, by grid_sample."""

    def __init__(self) -> None:
        super().__init__()
        self.offset, self.conv = nn.Conv2d(WIDTH, 2, 3, padding=1), conv(1)

    def mix(self, x: Tensor) -> Tensor:
        h, w = x.shape[-2:]
        ys, xs = torch.meshgrid(torch.linspace(-1, 1, h), torch.linspace(-1, 1, w), indexing="ij")
        where = torch.stack([xs, ys], -1)[None] + 0.1 * self.offset(x).permute(0, 2, 3, 1).tanh()
        return self.conv(F.grid_sample(x, where, align_corners=False))


class Spade(nn.Module):
    """Scales and shifts of each site from a map, and coordinates made in forward."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(6, WIDTH, 3, padding=1)
        self.norm, self.map = (
            nn.InstanceNorm2d(WIDTH, affine=True),
            nn.Conv2d(3, 2 * WIDTH, 3, 1, 1),
        )
        self.time, self.last = nn.Linear(WIDTH, WIDTH), nn.Conv2d(WIDTH, 8, 3, padding=1)

    def forward(self, sample: Tensor, timestep: Tensor, layout: Tensor) -> tuple[Tensor, Tensor]:
        b, _, h, w = sample.shape
        ys = torch.linspace(-1, 1, h).view(1, 1, h, 1).expand(b, 1, h, w)
        xs = torch.linspace(-1, 1, w).view(1, 1, 1, w).expand(b, 1, h, w)
        x = self.first(torch.cat([sample, ys, xs], 1)) + self.time(embed(timestep))[..., None, None]
        scale, shift = self.map(F.interpolate(layout, size=(h, w))).chunk(2, 1)
        mean, log_variance = self.last(F.silu(self.norm(x) * (1 + scale) + shift)).chunk(2, 1)
        return mean, log_variance.clamp(-20, 20)


def layout_inputs(size: Size, seed: int) -> dict[str, Any]:
    draw = Draw(seed + 2)
    return plain(size, seed, layout=draw.normal(size.batch, 3, 4 * size.height, 4 * size.width))


def mode(name: str, **more: Any) -> dict[str, Any]:
    return {"mode": name, **more}


own("bilinear", resampled(mode("bilinear"), mode("bilinear")), quick=True)
own(
    "aligned",
    resampled(
        mode("bilinear", align_corners=True), mode("bilinear", align_corners=True), exact=True
    ),
    sizes=ODD_SIZES,
)
own("antialiased", resampled(mode("bilinear", antialias=True), mode("bicubic"), exact=True))
own("area", resampled(mode("area"), mode("nearest-exact")))
own("nearest", resampled(mode("nearest"), mode("nearest"), exact=True), sizes=ODD_SIZES)
own("blurred", lambda: Picture(Blurred()))
own("strided", lambda: Picture(Strided()), quick=True)
own("shuffled", lambda: Picture(Shuffled()))
own("haar", lambda: Picture(Haar()))
own("pyramids", lambda: Picture(Pyramids()))
own("max-pools", lambda: Picture(Pooled()), quick=True)
own("context", lambda: Picture(Context()), quick=True)
own("spectral", lambda: Picture(Spectral()), narrow=False)
own("deformed", lambda: Picture(Deformed()), narrow=False)
own("spade", Spade, layout_inputs, quick=True)
