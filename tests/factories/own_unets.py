"""Tiny UNets in the arrangements that users start from."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.factories.own_denoisers import WIDTH, embed, own, plain
from tests.factories.own_transformers import DEPTH, HEADS
from tests.factories.zoo import Draw, Size


class ChannelNorm(nn.Module):
    """A norm over the channels of each site by F.normalize."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.g = nn.Parameter(torch.ones(1, channels, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        return F.normalize(x, dim=1) * self.g * x.shape[1] ** 0.5


class GlobalLinear(nn.Module):
    """Linear attention over sites, with memory keys and values."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.norm, self.to_qkv = (
            ChannelNorm(channels),
            nn.Conv2d(channels, 3 * WIDTH, 1, bias=False),
        )
        self.memory = nn.Parameter(torch.randn(2, HEADS, DEPTH, 4))
        self.to_out = nn.Sequential(nn.Conv2d(WIDTH, channels, 1), ChannelNorm(channels))

    def forward(self, x: Tensor) -> Tensor:
        b, _, h, w = x.shape
        qkv = self.to_qkv(self.norm(x)).chunk(3, dim=1)
        q, k, v = (t.reshape(b, HEADS, DEPTH, h * w) for t in qkv)
        mk, mv = (t[None].repeat(b, 1, 1, 1) for t in self.memory)
        k, v = torch.cat((mk, k), dim=-1), torch.cat((mv, v), dim=-1)
        q, k = q.softmax(dim=-2) * DEPTH**-0.5, k.softmax(dim=-1)
        context = torch.einsum("b h d n, b h e n -> b h d e", k, v)
        out = torch.einsum("b h d e, b h d n -> b h e n", context, q)
        return self.to_out(out.reshape(b, WIDTH, h, w))


class GlobalFull(nn.Module):
    """Attention over sites by einsum, whose keys and values begin with memory."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.norm, self.to_qkv = (
            ChannelNorm(channels),
            nn.Conv2d(channels, 3 * WIDTH, 1, bias=False),
        )
        self.memory = nn.Parameter(torch.randn(2, HEADS, 4, DEPTH))
        self.to_out = nn.Conv2d(WIDTH, channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        b, _, h, w = x.shape
        qkv = self.to_qkv(self.norm(x)).chunk(3, dim=1)
        q, k, v = (t.reshape(b, HEADS, DEPTH, h * w).transpose(2, 3) for t in qkv)
        mk, mv = (t[None].repeat(b, 1, 1, 1) for t in self.memory)
        k, v = torch.cat((mk, k), dim=-2), torch.cat((mv, v), dim=-2)
        scores = torch.einsum("b h i d, b h j d -> b h i j", q, k) * DEPTH**-0.5
        out = torch.einsum("b h i j, b h j d -> b h i d", scores.softmax(dim=-1), v)
        return self.to_out(out.permute(0, 1, 3, 2).reshape(b, WIDTH, h, w))


class FilmBlock(nn.Module):
    """Two convolutions; the timestep scales and shifts between them."""

    def __init__(self, before: int, after: int) -> None:
        super().__init__()
        self.mlp = nn.Sequential(nn.SiLU(), nn.Linear(WIDTH, 2 * after))
        self.conv1, self.norm1 = nn.Conv2d(before, after, 3, padding=1), ChannelNorm(after)
        self.conv2, self.norm2 = nn.Conv2d(after, after, 3, padding=1), nn.GroupNorm(4, after)
        self.skip = nn.Conv2d(before, after, 1) if before != after else nn.Identity()

    def forward(self, x: Tensor, emb: Tensor) -> Tensor:
        scale, shift = self.mlp(emb)[:, :, None, None].chunk(2, dim=1)
        h = F.silu(self.norm1(self.conv1(x)) * (scale + 1) + shift)
        return F.silu(self.norm2(self.conv2(h))) + self.skip(x)


class SpaceToDepth(nn.Module):
    """Four sites become the channels of one, by a view; then a 1x1 convolution."""

    def __init__(self, before: int, after: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(4 * before, after, 1)

    def forward(self, x: Tensor) -> Tensor:
        b, c, h, w = x.shape
        x = x.reshape(b, c, h // 2, 2, w // 2, 2).permute(0, 1, 3, 5, 2, 4)
        out: Tensor = self.conv(x.reshape(b, 4 * c, h // 2, w // 2))
        return out


class TutorialUnet(nn.Module):
    """A UNet with attention at each level, self-conditioning and class labels."""

    def __init__(self) -> None:
        super().__init__()
        self.first, wide = nn.Conv2d(8, WIDTH, 7, padding=3), 2 * WIDTH
        self.time = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH))
        self.classes = nn.Embedding(10, WIDTH)
        self.down = nn.ModuleList([FilmBlock(WIDTH, WIDTH), GlobalLinear(WIDTH)])
        self.smaller = SpaceToDepth(WIDTH, wide)
        self.middle = nn.ModuleDict(
            {
                "in": FilmBlock(wide, wide),
                "attention": GlobalFull(wide),
                "out": FilmBlock(wide, wide),
            }
        )
        self.larger = nn.Sequential(
            nn.Upsample(scale_factor=2), nn.Conv2d(wide, WIDTH, 3, padding=1)
        )
        self.up = nn.ModuleList([FilmBlock(2 * WIDTH, WIDTH), GlobalLinear(WIDTH)])
        self.last = nn.Conv2d(WIDTH, 4, 1)

    def forward(
        self,
        sample: Tensor,
        timestep: Tensor,
        class_labels: Tensor | None = None,
        x_self_cond: Tensor | None = None,
    ) -> Tensor:
        before = torch.zeros_like(sample) if x_self_cond is None else x_self_cond
        x = self.first(torch.cat((before, sample), dim=1))
        emb = self.time(embed(timestep))
        if class_labels is not None:
            emb = emb + self.classes(class_labels)
        x = self.down[0](x, emb)
        x = self.down[1](x) + x
        skip, x = x, self.smaller(x)
        for name, part in self.middle.items():
            x = part(x) + x if name == "attention" else part(x, emb)
        x = self.up[0](torch.cat((self.larger(x), skip), dim=1), emb)
        return self.last(self.up[1](x) + x)


def labelled(size: Size, seed: int, self_cond: bool = True) -> dict[str, Any]:
    draw = Draw(seed + 3)
    found = plain(size, seed, class_labels=draw.integers(size.batch, high=10))
    if self_cond:
        found["x_self_cond"] = draw.normal(size.batch, 4, size.height, size.width)
    return found


class Float32Norm(nn.GroupNorm):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.float()).type(x.dtype)


class SequenceAttention(nn.Module):
    """Attention with 1d convolutions, scaled before the product, softmax in float."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.norm = Float32Norm(4, channels)
        self.qkv = nn.Conv1d(channels, 3 * channels, 1)
        self.proj = nn.Conv1d(channels, channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        b, c, *spatial = x.shape
        x = x.reshape(b, c, -1)
        qkv = self.qkv(self.norm(x))
        width = c // HEADS
        q, k, v = qkv.reshape(b * HEADS, 3 * width, -1).split(width, dim=1)
        scale = 1 / math.sqrt(math.sqrt(width))
        weight = torch.einsum("bct,bcs->bts", q * scale, k * scale)
        weight = torch.softmax(weight.float(), dim=-1).type(weight.dtype)
        h = torch.einsum("bts,bcs->bct", weight, v).reshape(b, -1, x.shape[-1])
        return (x + self.proj(h)).reshape(b, c, *spatial)


class ResBlock(nn.Module):
    """Norm, SiLU, convolution; perhaps down or up within the block."""

    def __init__(self, before: int, after: int, way: str = "") -> None:
        super().__init__()
        self.way = way
        self.into = nn.Sequential(Float32Norm(4, before), nn.SiLU())
        self.conv = nn.Conv2d(before, after, 3, padding=1)
        self.emb = nn.Sequential(nn.SiLU(), nn.Linear(WIDTH, 2 * after))
        self.norm = Float32Norm(4, after)
        self.out = nn.Sequential(nn.SiLU(), nn.Dropout(0.1), nn.Conv2d(after, after, 3, padding=1))
        self.skip = nn.Identity() if before == after else nn.Conv2d(before, after, 1)

    def resize(self, x: Tensor) -> Tensor:
        if self.way == "down":
            return F.avg_pool2d(x, kernel_size=2, stride=2)
        return F.interpolate(x, scale_factor=2, mode="nearest") if self.way == "up" else x

    def forward(self, x: Tensor, emb: Tensor) -> Tensor:
        h, x = self.conv(self.resize(self.into(x))), self.resize(x)
        out = self.emb(emb).type(h.dtype)
        while len(out.shape) < len(h.shape):
            out = out[..., None]
        scale, shift = torch.chunk(out, 2, dim=1)
        return self.skip(x) + self.out(self.norm(h) * (1 + scale) + shift)


class ListUnet(nn.Module):
    """A UNet whose skips are a stack; a low-resolution picture is joined to the sample."""

    def __init__(self) -> None:
        super().__init__()
        w = WIDTH
        self.into = nn.ModuleList(
            [
                nn.Conv2d(7, w, 3, padding=1),
                ResBlock(w, w),
                ResBlock(w, w, "down"),
                ResBlock(w, 2 * w),
                nn.Conv2d(2 * w, 2 * w, 3, stride=2, padding=1),
            ]
        )
        self.middle = nn.ModuleList([ResBlock(2 * w, 2 * w), SequenceAttention(2 * w)])
        self.out = nn.ModuleList(
            [
                ResBlock(4 * w, 2 * w),
                ResBlock(4 * w, 2 * w, "up"),
                ResBlock(3 * w, w),
                ResBlock(2 * w, w, "up"),
                ResBlock(2 * w, w),
            ]
        )
        self.end = nn.Sequential(Float32Norm(4, w), nn.SiLU(), nn.Conv2d(w, 8, 3, padding=1))

    def forward(self, sample: Tensor, timestep: Tensor, low_res: Tensor) -> Tensor:
        _, _, height, width = sample.shape
        x = torch.cat([sample, F.interpolate(low_res, (height, width), mode="bilinear")], dim=1)
        emb, skips = embed(timestep), []
        for part in self.into:
            x = part(x, emb) if isinstance(part, ResBlock) else part(x)
            skips.append(x)
        for part in self.middle:
            x = part(x, emb) if isinstance(part, ResBlock) else part(x)
        for part in self.out:
            if x.shape[-1] != skips[-1].shape[-1]:
                x = F.interpolate(x, skips[-1].shape[-2:], mode="nearest")
            x = part(torch.cat([x, skips.pop()], dim=1), emb)
        return self.end(x)


def low_res_inputs(size: Size, seed: int) -> dict[str, Any]:
    draw = Draw(seed + 4)
    return plain(size, seed, low_res=draw.normal(size.batch, 3, size.height // 2, size.width // 2))


class FilteredConv(nn.Module):
    """A convolution whose weight is normalised in each call, behind a fixed resampling filter."""

    filter: Tensor

    def __init__(self, before: int, after: int, kernel: int, way: str = "") -> None:
        super().__init__()
        self.way, self.weight = way, nn.Parameter(torch.randn(after, before, kernel, kernel))
        taps = torch.tensor([1.0, 1.0])
        taps = torch.outer(taps, taps) / taps.sum().square()
        self.register_buffer("filter", taps[None, None] if way else None)

    def normal(self) -> Tensor:
        w = self.weight.to(torch.float32)
        size = torch.linalg.vector_norm(w, dim=list(range(1, w.ndim)), keepdim=True)
        return w / (1e-4 + size / math.sqrt(w[0].numel()) * math.sqrt(w[0].numel()))

    def forward(self, x: Tensor) -> Tensor:
        c, w = x.shape[1], self.normal()
        if self.way == "up":
            x = F.conv_transpose2d(x, (self.filter * 4).tile([c, 1, 1, 1]), groups=c, stride=2)
        if self.way == "down":
            x = F.conv2d(x, self.filter.tile([c, 1, 1, 1]), groups=c, stride=2)
        return F.conv2d(x, w, padding=w.shape[-1] // 2)


class PreservingBlock(nn.Module):
    """Sums and joins that keep the magnitude; attention by unbinding q, k and v per channel."""

    def __init__(self, before: int, after: int, way: str = "", attend: bool = False) -> None:
        super().__init__()
        self.resample = FilteredConv(before, before, 1, way)
        self.conv1, self.conv2 = FilteredConv(before, after, 3), FilteredConv(after, after, 3)
        self.skip, self.emb = FilteredConv(before, after, 1), nn.Linear(WIDTH, after)
        self.gain = nn.Parameter(torch.zeros([]))
        self.qkv = FilteredConv(after, 3 * after, 1) if attend else None
        self.proj = FilteredConv(after, after, 1) if attend else None

    def unit(self, x: Tensor, dim: int = 1) -> Tensor:
        size = torch.linalg.vector_norm(x, dim=dim, keepdim=True, dtype=torch.float32)
        return x / (1e-4 + size / math.sqrt(x.shape[dim])).to(x.dtype)

    def sum(self, a: Tensor, b: Tensor, t: float = 0.3) -> Tensor:
        return a.lerp(b, t) / math.sqrt((1 - t) ** 2 + t**2)

    def forward(self, x: Tensor, emb: Tensor) -> Tensor:
        x = self.unit(self.resample(x))
        y = self.conv1(F.silu(x) / 0.596)
        scale = self.emb(emb) * self.gain + 1
        y = F.silu(y * scale.unsqueeze(2).unsqueeze(3).to(y.dtype)) / 0.596
        x = self.sum(self.skip(x), self.conv2(y))
        if self.qkv is not None and self.proj is not None:
            y = self.qkv(x)
            y = y.reshape(y.shape[0], HEADS, -1, 3, y.shape[2] * y.shape[3])
            q, k, v = self.unit(y, 2).unbind(3)
            weight = torch.einsum("nhcq,nhck->nhqk", q, k / math.sqrt(q.shape[2])).softmax(dim=3)
            y = torch.einsum("nhqk,nhck->nhcq", weight, v)
            x = self.sum(x, self.proj(y.reshape(*x.shape)))
        return x.clip(-256, 256)


class Preconditioned(nn.Module):
    """The noise level scales input and output; a channel of ones is joined to the input."""

    freqs: Tensor
    phases: Tensor

    def __init__(self) -> None:
        super().__init__()
        w = WIDTH
        self.register_buffer("freqs", 2 * torch.pi * torch.randn(w // 2))
        self.register_buffer("phases", 2 * torch.pi * torch.rand(w // 2))
        self.first = FilteredConv(5, w, 3)
        self.enc = nn.ModuleDict(
            {"16": PreservingBlock(w, w), "8_down": PreservingBlock(w, w, "down", attend=True)}
        )
        self.dec = nn.ModuleDict(
            {
                "8_in": PreservingBlock(w, w),
                "8": PreservingBlock(2 * w, w, attend=True),
                "16_up": PreservingBlock(w, w, "up"),
                "16": PreservingBlock(2 * w, w),
            }
        )
        self.last = FilteredConv(w, 4, 3)

    def cat(self, a: Tensor, b: Tensor, t: float = 0.5) -> Tensor:
        na, nb = a.shape[1], b.shape[1]
        c = math.sqrt((na + nb) / ((1 - t) ** 2 + t**2))
        return torch.cat([c / math.sqrt(na) * (1 - t) * a, c / math.sqrt(nb) * t * b], dim=1)

    def forward(self, x: Tensor, sigma: Tensor) -> Tensor:
        x, sigma = x.to(torch.float32), sigma.to(torch.float32).reshape(-1, 1, 1, 1)
        skip = 0.25 / (sigma**2 + 0.25)
        out, into = sigma * 0.5 / (sigma**2 + 0.25).sqrt(), 1 / (0.25 + sigma**2).sqrt()
        noise = (sigma.flatten().log() / 4).outer(self.freqs) + self.phases
        emb = torch.cat([noise.cos(), noise.sin()], -1) * math.sqrt(2)
        y = torch.cat([into * x, torch.ones_like(x[:, :1])], dim=1)
        y, skips = self.first(y), []
        for block in self.enc.values():
            y = block(y, emb)
            skips.append(y)
        for name, block in self.dec.items():
            if "_" not in name:
                y = self.cat(y, skips.pop())
            y = block(y, emb)
        return skip * x + out * self.last(y)


def sigma_inputs(size: Size, seed: int) -> dict[str, Any]:
    draw = Draw(seed)
    sample = draw.normal(size.batch, 4, size.height, size.width)
    return {"x": sample, "sigma": draw.uniform(size.batch, low=0.1, high=3.0)}


own("tutorial-unet", TutorialUnet, labelled)
own("tutorial-unet-plain", TutorialUnet, partial(labelled, self_cond=False))
own("list-unet", ListUnet, low_res_inputs)
own("preconditioned", Preconditioned, sigma_inputs)
