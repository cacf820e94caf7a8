"""Tiny whole transformers in the arrangements that users start from, and other calls."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.factories.own_denoisers import TEXT, WIDTH, embed, own, plain, with_text
from tests.factories.own_transformers import DEPTH, HEADS, AdaLnZero, Tokens, modulate
from tests.factories.own_unets import FilmBlock
from tests.factories.zoo import Draw, Size


class LongSkips(nn.Module):
    """U-ViT: time, text and patches are one sequence; skips are joined and projected."""

    def __init__(self) -> None:
        super().__init__()
        self.patch, self.text = nn.Conv2d(4, WIDTH, 2, 2), nn.Linear(TEXT, WIDTH)
        self.place = nn.Parameter(torch.randn(1, WIDTH, 6, 6))
        self.down, self.middle, self.up = AdaLnZero(), AdaLnZero(), AdaLnZero()
        self.skip = nn.Linear(2 * WIDTH, WIDTH)
        self.norm, self.last = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 16)
        self.smooth = nn.Conv2d(4, 4, 3, padding=1)

    def forward(self, sample: Tensor, timestep: float, context: Tensor) -> Tensor:
        _, _, h, w = sample.shape
        x = self.patch(sample)
        place = F.interpolate(self.place, size=x.shape[-2:], mode="bicubic", align_corners=False)
        x = (x + place).flatten(2).transpose(1, 2)
        emb = embed(timestep).expand(len(sample), -1)
        x = torch.cat((emb.unsqueeze(1), self.text(context), x), dim=1)
        extras = 1 + context.shape[1]
        skip = x = self.down(x, emb, (0, 0))
        x = self.middle(x, emb, (0, 0))
        x = self.up(self.skip(torch.cat([x, skip], dim=-1)), emb, (0, 0))
        x = self.last(self.norm(x))[:, extras:, :]
        x = x.reshape(-1, h // 2, w // 2, 2, 2, 4).permute(0, 5, 1, 3, 2, 4).reshape(-1, 4, h, w)
        return self.smooth(x)


def float_time(size: Size, seed: int) -> dict[str, Any]:
    return {**with_text(size, seed), "timestep": float(Draw(seed).steps(1))}


def int_time(size: Size, seed: int) -> dict[str, Any]:
    return {**plain(size, seed), "timestep": int(Draw(seed).steps(1))}


def scalar_time(size: Size, seed: int) -> dict[str, Any]:
    return {**plain(size, seed), "timestep": Draw(seed).steps(1)[0]}


@dataclass
class Prediction:
    """What a denoiser returns that has more than one output."""

    sample: Tensor
    variance: Tensor


torch.utils._pytree.register_dataclass(Prediction)


class JointBlock(nn.Module):
    """Two streams with weights of their own and one attention, masked where the text is padding."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.ModuleDict({s: nn.Linear(WIDTH, 3 * WIDTH) for s in ("text", "image")})
        self.out = nn.ModuleDict({s: nn.Linear(WIDTH, WIDTH) for s in ("text", "image")})
        self.feed = nn.ModuleDict({s: nn.Linear(WIDTH, WIDTH) for s in ("text", "image")})
        self.ada = nn.ModuleDict({s: nn.Linear(WIDTH, 3 * WIDTH) for s in ("text", "image")})

    def forward(self, streams: dict[str, Tensor], emb: Tensor, keep: Tensor) -> dict[str, Tensor]:
        parts, gates = [], {}
        for name, x in streams.items():
            shift, scale, gates[name] = self.ada[name](F.silu(emb)).chunk(3, -1)
            x = modulate(F.layer_norm(x, (WIDTH,)), shift, scale)
            parts.append(self.qkv[name](x).unflatten(-1, (3, HEADS, DEPTH)).permute(2, 0, 3, 1, 4))
        q, k, v = torch.cat(parts, dim=3)
        length = streams["text"].shape[1]
        scores = torch.matmul(q, k.transpose(-1, -2)) * DEPTH**-0.5
        picture = torch.ones(len(keep), q.shape[2] - length, dtype=torch.bool)
        both = torch.cat([keep, picture], dim=1)[:, None, None]
        scores = scores.masked_fill(~both, -1e9)
        mixed = torch.softmax(scores, dim=-1).matmul(v).transpose(1, 2).flatten(2)
        pieces = mixed.split([length, q.shape[2] - length], dim=1)
        found = {}
        for (name, x), piece in zip(streams.items(), pieces, strict=True):
            x = x + gates[name][:, None] * self.out[name](piece)
            found[name] = x + F.silu(self.feed[name](F.layer_norm(x, (WIDTH,))))
        return found


class TwoStreams(nn.Module):
    """MM-DiT in a style of its own, with pooled text, a text mask and a control residual."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.text = nn.Linear(16, WIDTH), nn.Linear(TEXT, WIDTH)
        self.pooled, self.time = nn.Linear(TEXT, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList([JointBlock(), JointBlock()])
        self.last = nn.Linear(WIDTH, 32)

    def forward(
        self,
        sample: Tensor,
        timestep: Tensor,
        context: Tensor,
        context_mask: Tensor,
        pooled: Tensor,
        control: Tensor | None = None,
    ) -> Prediction:
        b, c, h, w = sample.shape
        x = F.pixel_unshuffle(sample, 2).permute(0, 2, 3, 1).reshape(b, -1, 4 * c)
        emb = self.time(embed(timestep)) + self.pooled(pooled)
        streams = {"text": self.text(context), "image": self.first(x)}
        for block in self.blocks:
            streams = block(streams, emb, context_mask)
        x = self.last(streams["image"]).view(b, h // 2, w // 2, -1).permute(0, 3, 1, 2)
        mean, variance = F.pixel_shuffle(x, 2).chunk(2, dim=1)
        return Prediction(mean if control is None else mean + 0.5 * control, variance.sigmoid())


def joint_inputs(size: Size, seed: int) -> dict[str, Any]:
    draw = Draw(seed + 5)
    return {
        **with_text(size, seed),
        "context_mask": draw.keep(size.batch, size.text),
        "pooled": draw.normal(size.batch, TEXT),
        "control": draw.normal(size.batch, 4, size.height, size.width),
    }


class MultiScale(nn.Module):
    """Smaller copies of the input join at each level; the output is a dict of two sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.small = (
            nn.Conv2d(4, WIDTH, 3, padding=1),
            nn.Conv2d(4, WIDTH, 3, padding=1),
        )
        self.down = nn.Conv2d(WIDTH, WIDTH, 3, stride=2, padding=1)
        self.mix, self.up = FilmBlock(2 * WIDTH, WIDTH), FilmBlock(2 * WIDTH, WIDTH)
        self.last = nn.ModuleDict({s: nn.Conv2d(WIDTH, 4, 1) for s in ("whole", "small")})

    def forward(self, sample: Tensor, timestep: Tensor) -> dict[str, Tensor]:
        emb = embed(timestep).expand(sample.shape[0], -1)
        half = F.avg_pool2d(sample, 3, stride=2, padding=1, count_include_pad=False)
        x = self.first(sample)
        y = self.mix(torch.cat([self.down(x), self.small(half)], 1), emb)
        x = self.up(torch.cat([x, F.interpolate(y, size=x.shape[2:])], 1), emb)
        return {"small": self.last["small"](y), "whole": self.last["whole"](x)}


own("long-skips", LongSkips, float_time)
own("int-time", partial(Tokens, AdaLnZero()), int_time)
own("two-streams", TwoStreams, joint_inputs)
own("multi-scale", MultiScale, scalar_time)
