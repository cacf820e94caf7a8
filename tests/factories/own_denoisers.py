"""Tiny denoisers as users write them with torch alone: the list of cases, and convolutional ones.

A block of each kind stands between the same first and last layers. `own_transformers` has blocks
over tokens, `own_networks` whole networks.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from tests.factories.zoo import Case, Draw, Size, rouse, spatial

WIDTH = 16
TEXT = 12  # width of text states
OWN: dict[str, Case] = {}
QUICK: set[str] = set()  # cases of the default run

SIZES = (Size(1, 8, 8, 5), Size(2, 12, 8, 7), Size(1, 8, 16, 3))
ODD_SIZES = (Size(1, 8, 8), Size(2, 9, 13), Size(1, 6, 11))

Inputs = Callable[[Size, int], dict[str, Any]]


def built(make: Callable[[], nn.Module]) -> nn.Module:
    """Build a module, always with the same weights, none of them zero."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        module = make()
    rouse(module, torch.Generator().manual_seed(1))
    return module.eval().requires_grad_(False)


def own(
    name: str,
    make: Callable[[], nn.Module],
    inputs: Inputs | None = None,
    *,
    narrow: bool = True,
    quick: bool = False,
    sizes: tuple[Size, ...] = SIZES,
) -> None:
    """Add a case; `narrow`: every operator on sites is narrowed."""
    assert name not in OWN, name
    OWN[name] = Case(name, partial(built, make), inputs or plain, spatial, sizes, narrow)
    if quick:
        QUICK.add(name)


def plain(size: Size, seed: int, **more: Any) -> dict[str, Any]:
    """A picture and a timestep per sample."""
    draw = Draw(seed)
    sample = draw.normal(size.batch, 4, size.height, size.width)
    return {"sample": sample, "timestep": draw.steps(size.batch), **more}


def with_text(size: Size, seed: int, name: str = "context") -> dict[str, Any]:
    """Text states too."""
    return {**plain(size, seed), name: Draw(seed + 1).normal(size.batch, size.text, TEXT)}


def embed(timestep: Tensor | float, width: int = WIDTH) -> Tensor:
    """Sines and cosines of a timestep, one row per timestep."""
    t = torch.as_tensor(timestep, dtype=torch.float32).reshape(-1)
    rates = torch.exp(-math.log(1e4) * torch.arange(width // 2) / (width // 2))
    angles = t[:, None] * rates[None]
    return torch.cat([angles.sin(), angles.cos()], -1)


class Picture(nn.Module):
    """Blocks over a picture, called as block(x, embedding) between two convolutions."""

    def __init__(self, *blocks: nn.Module, channels: int = 4) -> None:
        super().__init__()
        self.first = nn.Conv2d(channels, WIDTH, 3, padding=1)
        self.time = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.SiLU(), nn.Linear(WIDTH, WIDTH))
        self.blocks = nn.ModuleList(blocks)
        self.last = nn.Conv2d(WIDTH, 4, 1)

    def forward(self, sample: Tensor, timestep: Tensor) -> Tensor:
        emb = self.time(embed(timestep))
        x = self.first(sample)
        for block in self.blocks:
            x = block(x, emb)
        return self.last(x)


class Block(nn.Module):
    """A residual block: what `mix` computes, after a shift by the timestep."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Linear(WIDTH, WIDTH)

    def mix(self, x: Tensor) -> Tensor:
        raise NotImplementedError

    def forward(self, x: Tensor, emb: Tensor) -> Tensor:
        return x + self.mix(x + self.shift(emb)[:, :, None, None])


class Layers(Block):
    """Layers of torch in a row."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.Sequential(*layers)

    def mix(self, x: Tensor) -> Tensor:
        out: Tensor = self.layers(x)
        return out


def layers(*made: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    return lambda: Picture(Layers(*[make() for make in made]))


conv = partial(nn.Conv2d, WIDTH, WIDTH)


class ConvNext(Block):
    """Depthwise 7x7, a norm over channels by permuting, global response norm."""

    def __init__(self) -> None:
        super().__init__()
        self.depthwise = conv(7, padding=3, groups=WIDTH)
        self.norm = nn.LayerNorm(WIDTH, eps=1e-6)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.gamma = nn.Parameter(torch.zeros(1, 1, 1, 4 * WIDTH))
        self.beta = nn.Parameter(torch.zeros(1, 1, 1, 4 * WIDTH))

    def mix(self, x: Tensor) -> Tensor:
        x = F.gelu(self.up(self.norm(self.depthwise(x).permute(0, 2, 3, 1))))
        energy = torch.norm(x, p=2, dim=(1, 2), keepdim=True)
        share = energy / (energy.mean(dim=-1, keepdim=True) + 1e-6)
        x = self.gamma * (x * share) + self.beta + x
        return self.down(x).permute(0, 3, 1, 2)


class SqueezeExcite(Block):
    """Gates of channels from their global average."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.pool = conv(3, padding=1), nn.AdaptiveAvgPool2d(1)
        self.gate = nn.Sequential(
            nn.Conv2d(WIDTH, 4, 1), nn.ReLU(), nn.Conv2d(4, WIDTH, 1), nn.Sigmoid()
        )

    def mix(self, x: Tensor) -> Tensor:
        x = self.conv(x)
        return x * self.gate(self.pool(x))


class Cbam(Block):
    """Gates of channels from global averages and maxima, then gates of sites."""

    def __init__(self) -> None:
        super().__init__()
        self.shared = nn.Sequential(nn.Linear(WIDTH, 4), nn.ReLU(), nn.Linear(4, WIDTH))
        self.sites = nn.Conv2d(2, 1, 7, padding=3)

    def mix(self, x: Tensor) -> Tensor:
        average = F.adaptive_avg_pool2d(x, 1).flatten(1)
        largest = F.adaptive_max_pool2d(x, 1).flatten(1)
        gate = torch.sigmoid(self.shared(average) + self.shared(largest))
        x = x * gate[:, :, None, None]
        both = torch.cat([x.mean(1, keepdim=True), x.max(1, keepdim=True).values], 1)
        return x * torch.sigmoid(self.sites(both))


class AdaIn(Block):
    """Instance norm written out, and group norm whose scale and shift come from the timestep."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.conv = nn.GroupNorm(4, WIDTH, affine=False), conv(3, padding=1)
        self.to_scale = nn.Linear(WIDTH, 2 * WIDTH)

    def forward(self, x: Tensor, emb: Tensor) -> Tensor:
        scale, shift = self.to_scale(emb)[:, :, None, None].chunk(2, dim=1)
        h = self.conv(F.silu(self.norm(x) * (1 + scale) + shift))
        mean = h.mean(dim=(2, 3), keepdim=True)
        std = h.std(dim=[2, 3], keepdim=True)
        variance = h.var(dim=(2, 3), keepdim=True, unbiased=False)
        return x + (h - mean) / (std + 1e-5) + (h - mean) * torch.rsqrt(variance + 1e-5)


class Standardised(nn.Conv2d):
    """A convolution whose weight is standardised in each call."""

    def forward(self, x: Tensor) -> Tensor:
        w = self.weight
        mean = w.mean(dim=(1, 2, 3), keepdim=True)
        variance = w.var(dim=(1, 2, 3), keepdim=True, unbiased=False)
        return F.conv2d(x, (w - mean) * (variance + 1e-5).rsqrt(), self.bias, padding=1)


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

    def __init__(self, mode: str = "reflect") -> None:
        super().__init__()
        self.mode, self.conv = mode, conv(3, padding=1)
        taps = torch.tensor([1.0, 3.0, 3.0, 1.0])
        self.register_buffer("filter", (taps[:, None] * taps[None] / 64)[None, None])

    def mix(self, x: Tensor) -> Tensor:
        kernel = self.filter.to(x.dtype).repeat(x.shape[1], 1, 1, 1)  # type: ignore[operator]
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


own(
    "paddings",
    layers(
        partial(conv, 3, padding=1, padding_mode="circular"),
        nn.SiLU,
        partial(conv, 5, padding=2, padding_mode="reflect"),
        nn.SiLU,
        partial(conv, 3, padding="same", dilation=2, padding_mode="replicate"),
    ),
    quick=True,
)
own(
    "uneven-paddings",
    layers(
        partial(conv, 4, padding="same"),
        nn.SiLU,
        partial(nn.ReflectionPad2d, (2, 0, 1, 1)),
        partial(conv, 3),
        nn.SiLU,
        partial(nn.ReplicationPad2d, 1),
        partial(conv, 3, groups=4),
        partial(nn.ZeroPad2d, (0, 2, 2, 0)),
        partial(conv, 3),
    ),
    sizes=ODD_SIZES,
)
own("convnext", lambda: Picture(ConvNext(), ConvNext()), quick=True)
own("squeeze-excite", lambda: Picture(SqueezeExcite()))
own("cbam", lambda: Picture(Cbam()))
own("adain", lambda: Picture(AdaIn()), quick=True)
own(
    "instance-norm",
    layers(
        partial(conv, 3, padding=1),
        partial(nn.InstanceNorm2d, WIDTH),
        nn.SiLU,
        partial(nn.BatchNorm2d, WIDTH),
        partial(conv, 1),
    ),
)
own(
    "standardised",
    lambda: Picture(
        Layers(Standardised(WIDTH, WIDTH, 3), nn.GroupNorm(4, WIDTH)),
        Layers(
            parametrizations.weight_norm(conv(3, padding=1)),
            parametrizations.spectral_norm(conv(1)),
        ),
    ),
)
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
own("max-pools", lambda: Picture(Pooled()))
own("context", lambda: Picture(Context()))
own("spectral", lambda: Picture(Spectral()), narrow=False)
own("deformed", lambda: Picture(Deformed()), narrow=False)
own("spade", Spade, layout_inputs, quick=True)
