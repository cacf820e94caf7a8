"""Tiny denoisers with other ways to mix sites, branches, writes in place and conditions."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.factories.own_denoisers import (
    TEXT,
    WIDTH,
    Block,
    Picture,
    conv,
    embed,
    own,
    plain,
    with_text,
)
from tests.factories.own_transformers import DEPTH, HEADS, Mixing, tokens
from tests.factories.zoo import Draw, Size


class Transposed(Block):
    """Attention between channels, with a factor per head."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.proj = nn.Conv2d(WIDTH, 3 * WIDTH, 1), conv(1)
        self.depthwise = nn.Conv2d(3 * WIDTH, 3 * WIDTH, 3, padding=1, groups=3 * WIDTH)
        self.temperature = nn.Parameter(torch.ones(HEADS, 1, 1))

    def mix(self, x: Tensor) -> Tensor:
        b, c, h, w = x.shape
        q, k, v = (
            t.reshape(b, HEADS, c // HEADS, h * w)
            for t in self.depthwise(self.qkv(x)).chunk(3, dim=1)
        )
        q, k = F.normalize(q, dim=-1), F.normalize(k, dim=-1)
        weight = ((q @ k.transpose(-2, -1)) * self.temperature).softmax(dim=-1)
        return self.proj((weight @ v).reshape(b, c, h, w))


class Nearby(Block):
    """Attention of each site to the 3 x 3 sites around it, unfolded."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = conv(1), conv(1), conv(1)

    def mix(self, x: Tensor) -> Tensor:
        b, c, h, w = x.shape
        q = self.q(x).view(b, HEADS, c // HEADS, h * w, 1).permute(0, 1, 3, 4, 2)
        k, v = (
            F.unfold(t, 3, padding=1).view(b, HEADS, c // HEADS, 9, h * w).permute(0, 1, 4, 3, 2)
            for t in (self.k(x), self.v(x))
        )
        weight = torch.softmax(q @ k.transpose(-2, -1) * DEPTH**-0.5, dim=-1)
        return (weight @ v).squeeze(3).transpose(2, 3).reshape(b, c, h, w)


class Shifts(Block):
    """Channels in groups, each read one site further up, down, left or right."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = conv(1)

    def mix(self, x: Tensor) -> Tensor:
        a, b, c, d = self.conv(x).chunk(4, dim=1)
        moved = [a.roll(1, 2), b.roll(-1, 2), c.roll(1, dims=3), torch.roll(d, -1, 3)]
        return F.silu(torch.cat(moved, dim=1))


class Efficient(Block):
    """Gates of channels by a convolution along channels; a strip mean, which runs dense."""

    def __init__(self, strips: bool = False) -> None:
        super().__init__()
        self.strips, self.along = strips, nn.Conv1d(1, 1, 3, padding=1)

    def mix(self, x: Tensor) -> Tensor:
        if self.strips:
            return x * torch.sigmoid(x.mean(3, keepdim=True) + x.mean(2, keepdim=True))
        gate = self.along(x.mean((2, 3)).unsqueeze(1)).sigmoid().squeeze(1)
        return x * gate[:, :, None, None]


class Merging(nn.Module):
    """Channels last: patches merged by strided slices, and taken apart by a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.merge = nn.Linear(4, WIDTH), nn.Linear(4 * WIDTH, WIDTH, bias=False)
        self.norm, self.split = nn.LayerNorm(4 * WIDTH), nn.Linear(WIDTH, 4 * WIDTH)
        self.time, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 4)

    def forward(self, sample: Tensor, timestep: Tensor) -> Tensor:
        b, _, h, w = sample.shape
        x = self.first(sample.movedim(1, -1)) + self.time(embed(timestep))[:, None, None]
        parts = [x[:, i::2, j::2, :] for j in (0, 1) for i in (0, 1)]
        y = F.gelu(self.merge(self.norm(torch.cat(parts, -1))))
        y = self.split(y).view(b, h // 2, w // 2, 2, 2, WIDTH).permute(0, 1, 3, 2, 4, 5)
        return self.last(x + y.reshape(b, h, w, WIDTH)).permute(0, 3, 1, 2)


class Mixer(Mixing):
    """A linear layer along a fixed number of tokens."""

    def __init__(self, count: int = 16) -> None:
        super().__init__()
        self.along = nn.Linear(count, count)

    def mix(self, x: Tensor, size: tuple[int, int]) -> Tensor:
        return self.along(x.transpose(1, 2)).transpose(1, 2)


class Rotary(Mixing):
    """Rotary places by halves, from tables made in forward; keys of one head for all queries."""

    def rotated(self, x: Tensor, angles: Tensor) -> Tensor:
        half = torch.cat((-x[..., DEPTH // 2 :], x[..., : DEPTH // 2]), dim=-1)
        return x * angles.cos() + half * angles.sin()

    def mix(self, x: Tensor, size: tuple[int, int]) -> Tensor:
        q, k, v = self.heads(x)
        rates = 1.0 / 10000 ** (torch.arange(0, DEPTH, 2) / DEPTH)
        angles = torch.einsum("i,j->ij", torch.arange(x.shape[1]).float(), rates)
        angles = torch.cat((angles, angles), dim=-1)
        q, k = self.rotated(q, angles), self.rotated(k[:, :1], angles)
        weight = torch.einsum("bhid,bjd->bhij", q, k[:, 0]).mul(DEPTH**-0.5).softmax(-1)
        return self.joined(torch.einsum("bhij,bjd->bhid", weight, v[:, 0]))


class AcrossSamples(Block):
    """Statistics of a whole batch: its samples can't be computed apart."""

    def mix(self, x: Tensor) -> Tensor:
        mean = x.mean(dim=(0, 2, 3), keepdim=True)
        return (x - mean) / x.std(dim=(0, 2, 3), keepdim=True)


class InPlace(nn.Module):
    """Writes in place, and two ways of Python that a setting decides."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Conv2d(4, WIDTH, 3, padding=1), nn.Conv2d(WIDTH, 4, 3, padding=1)
        self.table = nn.Embedding(1000, WIDTH)

    def forward(self, sample: Tensor, timestep: Tensor, scale: float = 1.0) -> Tensor:
        x = self.first(sample)
        x += self.table(timestep)[:, :, None, None]
        x[:, : WIDTH // 2] *= 0.5
        x[:, -2:] = x[:, :2].clone()
        F.relu_(x)
        if scale != 1.0:
            x.mul_(scale)
        return self.last(x).add_(sample)


class Late(nn.Module):
    """A branch of Python on the timestep's value."""

    def __init__(self) -> None:
        super().__init__()
        self.early, self.late = nn.Conv2d(4, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1)

    def forward(self, sample: Tensor, timestep: Tensor) -> Tensor:
        part = self.early if bool((timestep > 500).all()) else self.late
        return part(sample) * (1 + timestep.float()[:, None, None, None] / 1000)


class Conditions(nn.Module):
    """Conditions in a dict: text for torch's attention with its padding, a mask and a picture."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(9, WIDTH, 3, padding=1)
        self.cross = nn.MultiheadAttention(WIDTH, HEADS, kdim=TEXT, vdim=TEXT, batch_first=True)
        self.time, self.last = nn.Linear(WIDTH, WIDTH), nn.Conv2d(WIDTH, 4, 3, padding=1)

    def forward(self, sample: Tensor, timestep: Tensor, cond: dict[str, Tensor]) -> Tensor:
        x = self.first(torch.cat([sample, cond["mask"], cond["masked_image"]], dim=1))
        x = x + self.time(embed(timestep))[:, :, None, None]
        y, padding = x.flatten(2).transpose(1, 2), ~cond["text_mask"]
        y = y + self.cross(y, cond["text"], cond["text"], key_padding_mask=padding)[0]
        return self.last(F.silu(y.transpose(1, 2).view(x.shape)))


def conditions(size: Size, seed: int) -> dict[str, Any]:
    draw, given = Draw(seed + 6), with_text(size, seed)
    picture = (size.batch, 4, size.height, size.width)
    cond = {
        "text": given.pop("context"),
        "text_mask": draw.keep(size.batch, size.text),
        "mask": (draw.normal(size.batch, 1, size.height, size.width) > 0).float(),
        "masked_image": draw.normal(*picture),
    }
    return {**given, "cond": cond}


def scaled(size: Size, seed: int) -> dict[str, Any]:
    return plain(size, seed, scale=1.5)


own("channel-attention", lambda: Picture(Transposed()))
own("nearby", lambda: Picture(Nearby()), quick=True)
own("shifts", lambda: Picture(Shifts()))
own("efficient", lambda: Picture(Efficient()))
own("strips", lambda: Picture(Efficient(strips=True)), narrow=False)
own("merging", Merging)
own("mixer", tokens(Mixer), narrow=False, sizes=(Size(1, 8, 8), Size(2, 4, 16)))
own("rotary", tokens(Rotary))
own("across-samples", lambda: Picture(AcrossSamples()), narrow=False, quick=True)
own("in-place", InPlace, scaled)
own("late", Late, narrow=False)
own("conditions", Conditions, conditions)
