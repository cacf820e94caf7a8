"""Tiny denoisers that move the picture: shifted windows, paddings to a multiple, far rolls."""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.factories.own_denoisers import ODD_SIZES, WIDTH, Block, Picture, conv, embed, own
from tests.factories.own_transformers import DEPTH, HEADS
from tests.factories.zoo import Size

FOURS = (Size(1, 16, 16), Size(2, 16, 24), Size(1, 24, 16))
UNEVEN = (Size(1, 16, 16), Size(2, 17, 13), Size(1, 14, 23))


def windows_of(x: Tensor, side: int) -> Tensor:
    """Windows of [b, h, w, c] as [windows, sites, c]."""
    b, h, w, c = x.shape
    x = x.view(b, h // side, side, w // side, side, c).permute(0, 1, 3, 2, 4, 5)
    return x.reshape(-1, side * side, c)


class Swin(nn.Module):
    """Attention in windows, written out, with a bias per place and a mask after a shift.

    `fills`: the picture is padded to whole windows and cut back.
    """

    index: Tensor

    def __init__(self, side: int = 4, shift: int = 0, fills: bool = False) -> None:
        super().__init__()
        self.side, self.shift, self.fills = side, shift, fills
        self.norm, self.time = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)
        self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.table = nn.Parameter(torch.randn((2 * side - 1) ** 2, HEADS))
        place = torch.stack(torch.meshgrid(*[torch.arange(side)] * 2, indexing="ij")).flatten(1)
        apart = place[:, :, None] - place[:, None, :] + side - 1
        self.register_buffer("index", apart[0] * (2 * side - 1) + apart[1])

    def regions(self, height: int, width: int) -> Tensor:
        """What sites don't attend to: those that the shift brought from the other border."""
        regions, number = torch.zeros(1, height, width, 1), 0
        cuts = slice(0, -self.side), slice(-self.side, -self.shift), slice(-self.shift, None)
        for rows in cuts:
            for columns in cuts:
                regions[:, rows, columns] = number
                number += 1
        windows = windows_of(regions, self.side).squeeze(-1)
        apart = windows[:, None] - windows[:, :, None]
        return apart.masked_fill(apart != 0, -100.0).masked_fill(apart == 0, 0.0)

    def attend(self, x: Tensor, mask: Tensor | None) -> Tensor:
        many, n, _ = x.shape
        q, k, v = self.qkv(x).reshape(many, n, 3, HEADS, DEPTH).permute(2, 0, 3, 1, 4)
        scores = (q * DEPTH**-0.5) @ k.transpose(-2, -1)
        bias = self.table[self.index.view(-1)].view(n, n, HEADS).permute(2, 0, 1)
        scores = scores + bias[None]
        if mask is not None:
            count = mask.shape[0]
            scores = scores.view(many // count, count, HEADS, n, n) + mask[None, :, None]
            scores = scores.view(many, HEADS, n, n)
        return self.proj((scores.softmax(-1) @ v).transpose(1, 2).reshape(many, n, WIDTH))

    def forward(self, x: Tensor, emb: Tensor) -> Tensor:
        h, w = x.shape[2:]
        side, back = self.side, (self.shift, self.shift)
        y = self.norm(x.permute(0, 2, 3, 1)) + self.time(emb)[:, None, None]
        if self.fills:
            y = F.pad(y, (0, 0, 0, (side - w % side) % side, 0, (side - h % side) % side))
        b, high, wide, _ = y.shape
        if self.shift:
            y = torch.roll(y, (-self.shift, -self.shift), (1, 2))
        mask = self.regions(high, wide) if self.shift else None
        y = self.attend(windows_of(y, side), mask)
        y = y.view(b, high // side, wide // side, side, side, WIDTH).permute(0, 1, 3, 2, 4, 5)
        y = y.reshape(b, high, wide, WIDTH)
        if self.shift:
            y = torch.roll(y, back, (1, 2))
        return x + y[:, :h, :w].permute(0, 3, 1, 2)


class Multiple(nn.Module):
    """A coarse path; the picture is padded to a multiple of eight at the far edges, and cut."""

    def __init__(self, mode: str) -> None:
        super().__init__()
        self.mode, self.first = mode, nn.Conv2d(4, WIDTH, 3, padding=1)
        self.time, self.last = nn.Linear(WIDTH, WIDTH), nn.Conv2d(WIDTH, 4, 3, padding=1)
        self.down, self.middle = conv(4, stride=4), conv(3, padding=1)
        self.up = nn.ConvTranspose2d(WIDTH, WIDTH, 4, 4)

    def forward(self, sample: Tensor, timestep: Tensor) -> Tensor:
        h, w = sample.shape[-2:]
        x = F.pad(sample, (0, (8 - w % 8) % 8, 0, (8 - h % 8) % 8), mode=self.mode)
        x = self.first(x) + self.time(embed(timestep))[:, :, None, None]
        x = x + self.up(F.silu(self.middle(F.silu(self.down(x)))))
        return self.last(x)[:, :, :h, :w]


class PaddedSkip(nn.Module):
    """The coarse path is padded, or cut, to the size of what it is joined to."""

    def __init__(self, cuts: bool = False) -> None:
        super().__init__()
        self.cuts, self.first = cuts, nn.Conv2d(4, WIDTH, 3, padding=1)
        self.time, self.down = nn.Linear(WIDTH, WIDTH), conv(3, padding=1)
        self.up = nn.ConvTranspose2d(WIDTH, WIDTH, 2, 2)
        self.join, self.last = nn.Conv2d(2 * WIDTH, WIDTH, 3, padding=1), nn.Conv2d(WIDTH, 4, 1)

    def forward(self, sample: Tensor, timestep: Tensor) -> Tensor:
        x = self.first(sample) + self.time(embed(timestep))[:, :, None, None]
        y = self.up(F.silu(self.down(F.max_pool2d(x, 2, ceil_mode=self.cuts))))
        if self.cuts:
            y = y[:, :, : x.shape[2], : x.shape[3]]
        else:
            dy, dx = x.shape[2] - y.shape[2], x.shape[3] - y.shape[3]
            y = F.pad(y, (dx // 2, dx - dx // 2, dy // 2, dy - dy // 2))
        return self.last(F.silu(self.join(torch.cat([x, y], 1))))


class FarRolls(Block):
    """Sites far apart are mixed: added, joined as channels, and rolled back in two steps."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.join = conv(3, padding=1), nn.Conv2d(2 * WIDTH, WIDTH, 1)

    def mix(self, x: Tensor) -> Tensor:
        x = F.silu(self.conv(x + torch.roll(x, (5, -3), (2, 3))))
        groups = zip(x.chunk(4, 1), (3, -3, 3, -3), (2, 2, 3, 3), strict=True)
        moved = torch.cat([group.roll(by, axis) for group, by, axis in groups], 1)
        there = F.silu(self.conv(x.roll(4, 2))) + x
        return self.join(torch.cat([moved, there.roll(-2, 2).roll(-2, 2)], 1))


class FarShifts(Block):
    """Neighbours at a distance, by padding one side and cutting the other."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.wide = conv(1), conv(3)

    def mix(self, x: Tensor) -> Tensor:
        x = self.conv(F.pad(x, (4, 0, 0, 0))[..., :-4] + x)
        around = F.silu(self.wide(F.pad(x, (3, 3, 3, 3), value=0.5)))
        return around[:, :, 2:-2, 2:-2] + F.pad(x[:, :, 1:-2, 3:], (3, 0, 1, 2))


class HalfRolls(Block):
    """Rolls by a part of the picture's size, written as rolls and as joins, and rolled back."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.wide = conv(3, padding=1), conv(5, padding=2, groups=WIDTH)

    def mix(self, x: Tensor) -> Tensor:
        h, w = x.shape[2] // 2, x.shape[3] // 4
        y = torch.cat([x[:, :, h:], x[:, :, :h]], 2)
        y = self.conv(torch.cat([y[..., -w:], y[..., :-w]], 3)).roll((h, -w), (2, 3))
        z = self.wide(torch.cat([x[:, :, 3:], x[:, :, :3]], 2))
        return F.silu(y) + torch.cat([z[:, :, -3:], z[:, :, :-3]], 2)


class HalfSwin(Swin):
    """Windows of the picture shifted by half of its size."""

    def forward(self, x: Tensor, emb: Tensor) -> Tensor:
        b, _, h, w = x.shape
        side, shift = self.side, (h // 2, w // 2)
        y = self.norm(x.permute(0, 2, 3, 1)) + self.time(emb)[:, None, None]
        y = torch.roll(y, (-shift[0], -shift[1]), (1, 2))
        y = self.attend(windows_of(y, side), None)
        y = y.view(b, h // side, w // side, side, side, WIDTH).permute(0, 1, 3, 2, 4, 5)
        return x + torch.roll(y.reshape(b, h, w, WIDTH), shift, (1, 2)).permute(0, 3, 1, 2)


class Centred(Multiple):
    """The picture is padded to a multiple of eight on all sides, and its middle is cut out."""

    def __init__(self, mode: str, up: bool = False) -> None:
        super().__init__(mode)
        self.rounds_up = up

    def forward(self, sample: Tensor, timestep: Tensor) -> Tensor:
        h, w = sample.shape[-2:]
        more = -h % 8, -w % 8
        top, left = ((n + self.rounds_up) // 2 for n in more)
        x = F.pad(sample, (left, more[1] - left, top, more[0] - top), mode=self.mode)
        x = self.first(x) + self.time(embed(timestep))[:, :, None, None]
        x = x + self.up(F.silu(self.middle(F.silu(self.down(x)))))
        return self.last(x)[:, :, top : top + h, left : left + w]


MOVED = (
    *("swin", "swin-filled", "multiple", "padded-skip", "cut-skip", "far-rolls", "far-shifts"),
    *("half-rolls", "half-swin", "centred", "centred-up"),
)

own("swin", lambda: Picture(Swin(), Swin(shift=2)), sizes=FOURS)
own("swin-filled", lambda: Picture(Swin(fills=True), Swin(shift=2, fills=True)), sizes=UNEVEN)
own("multiple", partial(Multiple, "reflect"), sizes=UNEVEN, quick=True)
own("padded-skip", PaddedSkip, sizes=ODD_SIZES, quick=True)
own("cut-skip", partial(PaddedSkip, cuts=True), sizes=ODD_SIZES)
own("far-rolls", lambda: Picture(FarRolls()), sizes=UNEVEN, quick=True)
own("far-shifts", lambda: Picture(FarShifts()), sizes=UNEVEN, quick=True)
own("half-rolls", lambda: Picture(HalfRolls()), sizes=UNEVEN, quick=True)
own("half-swin", lambda: Picture(HalfSwin()), sizes=FOURS)
own("centred", partial(Centred, "reflect"), sizes=UNEVEN, quick=True)
own("centred-up", partial(Centred, "constant", up=True), sizes=UNEVEN)
