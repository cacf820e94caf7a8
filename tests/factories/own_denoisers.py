"""Tiny denoisers as users write them with torch alone: the list of cases, and convolutional ones.

A block of each kind stands between the same first and last layers. `own_transformers` has blocks
over tokens, `own_networks` whole networks.
"""

from __future__ import annotations

import math
from abc import abstractmethod
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
    mask_shape: Callable[[Size], tuple[int, ...]] = spatial,
) -> None:
    """Add a case; `narrow`: every operator on sites is narrowed."""
    assert name not in OWN, name
    OWN[name] = Case(name, partial(built, make), inputs or plain, mask_shape, sizes, narrow)
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

    @abstractmethod
    def mix(self, x: Tensor) -> Tensor:
        """Return what is added to the rows."""

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


class AdaIn(nn.Module):
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
own("cbam", lambda: Picture(Cbam()), quick=True)
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
own(
    "normed-by-hooks",
    layers(
        lambda: nn.utils.weight_norm(conv(3, padding=1)),
        nn.SiLU,
        lambda: nn.utils.spectral_norm(conv(1)),
    ),
)
