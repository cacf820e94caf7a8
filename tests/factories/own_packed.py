"""Tiny denoisers over packed tokens: texts amid the picture, padding, and cuts by a size."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.factories.own_denoisers import SIZES, TEXT, WIDTH, embed, own, plain, with_text
from tests.factories.own_transformers import AdaLnZero
from tests.factories.zoo import Draw, Size, packed

COUNT = 10  # tokens of the first part, where an argument gives their number


class Arranged(nn.Module):
    """Tokens of a picture and a text, arranged by a function, through two blocks of attention."""

    def __init__(self, arrange: Callable[..., Tensor]) -> None:
        super().__init__()
        self.arrange = arrange
        self.first, self.text = nn.Linear(4, WIDTH), nn.Linear(TEXT, WIDTH)
        self.time = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList([AdaLnZero(), AdaLnZero()])
        self.last = nn.Linear(WIDTH, 4)
        self.token = nn.Parameter(torch.randn(1, 1, WIDTH))

    def joined(self, emb: Tensor, *parts: Tensor) -> Tensor:
        """Blocks over the parts as one sequence."""
        x = torch.cat(parts, 1)
        for block in self.blocks:
            x = block(x, emb, (1, 1))
        return x

    def forward(
        self, sample: Tensor, timestep: Tensor, context: Tensor, count: int | None = None
    ) -> Tensor:
        x, text = self.first(sample), self.text(context)
        mixed = partial(self.joined, self.time(embed(timestep)))
        extra = () if count is None else (count,)
        out: Tensor = self.last(self.arrange(self, mixed, x, text, *extra))
        return out


def between(_: Arranged, mixed: Any, x: Tensor, text: Tensor, count: int) -> Tensor:
    """The text behind a number of the picture's tokens."""
    y = mixed(x[:, :count], text, x[:, count:])
    return torch.cat([y[:, :count], y[:, count + text.shape[1] :]], 1)


def halves(_: Arranged, mixed: Any, x: Tensor, text: Tensor) -> Tensor:
    """The text between two halves, the second of which comes first."""
    one, two = x.chunk(2, 1)
    y = mixed(two, text, one)
    return torch.cat([y[:, -one.shape[1] :], y[:, : two.shape[1]]], 1)


def within_text(_: Arranged, mixed: Any, x: Tensor, text: Tensor) -> Tensor:
    """The picture behind the first token of the text, and another token before the last one."""
    y = mixed(text[:, :1], x, text[:, 1:-1], text.mean(1, keepdim=True), text[:, -1:])
    return y[:, 1 : 1 + x.shape[1]]


def cropped(_: Arranged, mixed: Any, x: Tensor, text: Tensor, count: int) -> Tensor:
    """Tokens behind a number of them count as keys and are zero in the result."""
    y = mixed(text, x)[:, text.shape[1] :]
    return F.pad(y[:, :count], (0, 0, 0, x.shape[1] - count))


def filled(own: Arranged, mixed: Any, x: Tensor, text: Tensor) -> Tensor:
    """Picture and text are each padded to a multiple."""
    n, b = x.shape[1], x.shape[0]
    fill = own.token.expand(b, -text.shape[1] % 8, -1)
    y = mixed(F.pad(x, (0, 0, 0, -n % 16)), text, fill)
    return y[:, :n]


def filled_together(own: Arranged, mixed: Any, x: Tensor, text: Tensor) -> Tensor:
    """Registers, text and picture are padded to a multiple as one sequence."""
    x = torch.cat([own.token.expand(x.shape[0], 3, -1), text, x], 1)
    whole = F.pad(x, (0, 0, 2, (x.shape[1] + 4) // 5 * 5 - x.shape[1]), value=0.5)
    return mixed(whole)[:, 5 + text.shape[1] : 2 + x.shape[1]]


class RowEnds(Arranged):
    """A picture of which each row ends with a token, behind the text."""

    def forward(
        self, sample: Tensor, timestep: Tensor, context: Tensor, count: int | None = None
    ) -> Tensor:
        b, _, h, w = sample.shape
        x = self.first(sample.permute(0, 2, 3, 1))
        x = torch.cat([x, self.token[:, None].expand(b, h, 1, -1)], 2).flatten(1, 2)
        text = self.text(context)
        y = self.joined(self.time(embed(timestep)), text, x)[:, text.shape[1] :]
        return self.last(y.unflatten(1, (h, w + 1))[:, :, :-1]).permute(0, 3, 1, 2)


class Remembers(Arranged):
    """A picture as tokens, behind those of two earlier ones in wide patches and a text."""

    def __init__(self) -> None:
        super().__init__(halves)
        self.wide = nn.Conv3d(4, WIDTH, (2, 4, 4), (2, 4, 4))

    def forward(  # type: ignore[override]
        self, sample: Tensor, timestep: Tensor, context: Tensor, earlier: Tensor
    ) -> Tensor:
        x = self.first(sample.permute(0, 2, 3, 1).flatten(1, 2))
        height, width = earlier.shape[-2:]
        filled = F.pad(earlier, (0, -width % 4, 0, -height % 4, 0, 0), mode="replicate")
        before = self.wide(filled).flatten(2).transpose(1, 2)
        y = self.joined(self.time(embed(timestep)), before, x, self.text(context))
        found = y[:, before.shape[1] : before.shape[1] + x.shape[1]]
        return self.last(found).transpose(1, 2).unflatten(2, sample.shape[2:])


def earlier_inputs(size: Size, seed: int) -> dict[str, Any]:
    """A picture, a text, and two earlier pictures."""
    draw = Draw(seed + 2)
    before = draw.normal(size.batch, 4, 2, size.height, size.width)
    return {**with_text(size, seed), "earlier": before}


def token_inputs(size: Size, seed: int, **more: Any) -> dict[str, Any]:
    """A picture as tokens, a timestep and text states."""
    draw = Draw(seed)
    return {
        **plain(size, seed),
        "sample": draw.normal(size.batch, size.height * size.width, 4),
        "context": Draw(seed + 1).normal(size.batch, size.text, TEXT),
        **more,
    }


counted = partial(token_inputs, count=COUNT)
for name, arrange, inputs in (
    ("packed-between", between, counted),
    ("packed-halves", halves, token_inputs),
    ("packed-within-text", within_text, token_inputs),
    ("packed-cropped", cropped, counted),
    ("packed-filled", filled, token_inputs),
    ("packed-filled-together", filled_together, token_inputs),
):
    quick = name in ("packed-between", "packed-filled")
    own(name, partial(Arranged, arrange), inputs, quick=quick, sizes=SIZES, mask_shape=packed)
own("row-ends", partial(RowEnds, halves), with_text)
own("packed-earlier", Remembers, earlier_inputs, sizes=SIZES)
