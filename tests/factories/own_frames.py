"""Tiny denoisers of videos that lay the frames beside the batch, as motion models do."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.factories.own_denoisers import OWN, QUICK, WIDTH, built, embed
from tests.factories.own_videos import DEPTH, FRAMES, HEADS, SIZES, filmed
from tests.factories.own_videos import inputs as video_inputs
from tests.factories.zoo import Case, Draw, Size

TEXT, CROSS = 5, 12


def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Attention with heads over (batch, tokens, channels)."""

    def apart(x: Tensor) -> Tensor:
        return x.view(x.shape[0], x.shape[1], HEADS, DEPTH).transpose(1, 2)

    mixed = F.scaled_dot_product_attention(apart(query), apart(key), apart(value))
    return mixed.transpose(1, 2).reshape(query.shape)


class Attend(nn.Module):
    """Attention to tokens, or to the value's own."""

    def __init__(self, cross: int = WIDTH) -> None:
        super().__init__()
        self.norm, self.query = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)
        self.key, self.value = nn.Linear(cross, WIDTH), nn.Linear(cross, WIDTH)
        self.proj = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, tokens: Tensor | None = None) -> Tensor:
        y = self.norm(x)
        read = y if tokens is None else tokens
        out: Tensor = x + self.proj(attend(self.query(y), self.key(read), self.value(read)))
        return out


class Motion(nn.Module):
    """A picture model over each frame, and one over each place's frames.

    Args:
        each: Whether each frame has a text of its own.
        only: Whether the places read one token of the first frame's text.
        spread: Whether the timestep moves the frames of each place.
        part: Whether the second half of all frames of all samples doesn't attend to itself.
    """

    def __init__(
        self, each: bool = False, only: bool = False, spread: bool = False, part: bool = False
    ) -> None:
        super().__init__()
        self.each, self.only, self.spread, self.part = each, only, spread, part
        self.first, self.last = nn.Conv2d(4, WIDTH, 3, padding=1), nn.Conv2d(WIDTH, 4, 1)
        self.norm, self.conv = nn.GroupNorm(4, WIDTH), nn.Conv2d(WIDTH, WIDTH, 3, padding=1)
        self.out_norm = nn.GroupNorm(2, WIDTH, affine=False)
        self.over_frames = nn.GroupNorm(4, WIDTH)
        self.time, self.shift = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.moves = nn.Linear(WIDTH, 2 * WIDTH)
        self.own, self.text, self.frames = Attend(), Attend(CROSS), Attend()
        self.place = Attend(CROSS)

    def forward(self, sample: Tensor, timestep: Tensor, encoder_hidden_states: Tensor) -> Tensor:
        b, _, f, h, w = sample.shape
        emb = F.silu(self.time(embed(timestep)))
        texts = encoder_hidden_states
        if not self.each:
            texts = texts.repeat_interleave(f, dim=0)
        x = self.first(sample.permute(0, 2, 1, 3, 4).reshape(b * f, -1, h, w))
        shift = self.shift(emb.repeat_interleave(f, dim=0))
        x = x + self.conv(F.silu(self.norm(x))) + shift[:, :, None, None]
        y = x.permute(0, 2, 3, 1).reshape(b * f, h * w, WIDTH)
        if self.part:
            attends, last = y.chunk(2)
            y = torch.cat([self.own(attends), last])
        else:
            y = self.own(y)
        y = self.text(y, texts)
        x = y.view(b * f, h, w, WIDTH).permute(0, 3, 1, 2)
        x = self.in_time(x, texts, emb, b)
        out = self.last(F.silu(self.out_norm(x)))
        return out.view(b, f, 4, h, w).permute(0, 2, 1, 3, 4)

    def in_time(self, x: Tensor, texts: Tensor, emb: Tensor, batch: int) -> Tensor:
        """Mix the frames of each place, after a norm over all of them."""
        bf, c, h, w = x.shape
        y = self.over_frames(x.view(batch, -1, c, h, w).permute(0, 2, 1, 3, 4))
        y = y.permute(0, 3, 4, 2, 1).reshape(batch * h * w, -1, c)
        if self.spread:
            both = self.moves(emb).repeat_interleave(h * w, dim=0).view(-1, 2 * c)
            scale, shift = both.view(-1, 2, c).chunk(2, dim=1)
            y = y * (1 + scale) + shift
        y = self.frames(y)
        if self.only:
            token = texts.view(batch, -1, *texts.shape[1:])[:, 0, :1]
            y = self.place(y, token[:, None].expand(-1, h * w, -1, -1).reshape(-1, 1, CROSS))
        return x + y.view(batch, h, w, -1, c).permute(0, 3, 4, 1, 2).reshape(bf, c, h, w)


def inputs(each: bool, size: Size, seed: int) -> dict[str, Any]:
    """Inputs with one text for a video, or one for each frame, all of them different."""
    number = size.batch * (FRAMES if each else 1)
    text = Draw(seed + 7).normal(number, TEXT, CROSS)
    return {**video_inputs(size, seed), "encoder_hidden_states": text}


def motion(name: str, *, each: bool = False, **options: bool) -> None:
    """Add a case whose frames lie beside the batch."""
    assert name not in OWN, name
    make = partial(built, partial(Motion, each, **options))
    OWN[name] = Case(name, make, partial(inputs, each), filmed, SIZES, True)
    QUICK.add(name)


motion("motion-text-for-each-frame", each=True)
motion("motion-one-text", spread=True)
motion("motion-one-key", only=True)
motion("motion-part", part=True)
