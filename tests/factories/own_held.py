"""Tiny denoisers whose sizes depend on what their arguments hold: masks, counts, lengths."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from tests.factories.own_denoisers import SIZES, WIDTH, embed, own
from tests.factories.own_packed import Arranged, Remembers, earlier_inputs, token_inputs
from tests.factories.zoo import Size, packed

AHEAD = 2  # text tokens before the picture


class Held(Arranged):
    """Tokens that are arranged by what an argument of whole numbers holds."""

    def forward(self, sample: Tensor, timestep: Tensor, context: Tensor, held: Tensor) -> Tensor:  # type: ignore[override]
        x, text = self.first(sample), self.text(context)
        mixed = partial(self.joined, self.time(embed(timestep)))
        out: Tensor = self.last(self.arrange(self, mixed, x, text, held))
        return out


def in_slots(_: Arranged, mixed: Any, x: Tensor, text: Tensor, slots: Tensor) -> Tensor:
    """The picture's tokens in the slots that a mask leaves for them among the text."""
    mask = slots[0]
    y = x.new_zeros(x.shape[0], mask.shape[0], WIDTH)
    y[:, ~mask], y[:, mask] = text, x
    places = torch.arange(mask.shape[0]).sin()[None, :, None]
    return mixed(y + places)[:, mask]


def widened(_: Arranged, mixed: Any, x: Tensor, text: Tensor, slots: Tensor) -> Tensor:
    """A slot stands for four of the picture's tokens, which are shifted and turned otherwise."""
    times = torch.where(slots, 4, 1)[0]
    mask = slots[0].repeat_interleave(times)
    y = torch.cat([text, text.new_zeros(x.shape[0], x.shape[1] // 4, WIDTH)], 1)
    y = y.repeat_interleave(times, dim=1)
    y[:, mask] = x
    one, other = y[:, :1].mean(1, keepdim=True), y[:, 1:2].tanh()
    return mixed(torch.where(mask.view(1, -1, 1), y + one, y * other))[:, mask]


def cut_at(_: Arranged, mixed: Any, x: Tensor, text: Tensor, count: Tensor) -> Tensor:
    """The text up to a number, before the picture."""
    length = int(count.max())
    return mixed(text[:, :length], x)[:, length:]


def told_apart(_: Arranged, mixed: Any, x: Tensor, text: Tensor, kept: Tensor) -> Tensor:
    """The tokens of the text that a mask keeps, and the mean of all others."""
    places = kept[0].nonzero().squeeze(1)
    others = text[:, kept[0] == 0].mean(1, keepdim=True)
    return mixed(x, text[:, places], others)[:, : x.shape[1]]


class RemembersKept(Remembers):
    """Earlier pictures in wide patches, of which parts are padding, and the text that a mask keeps.

    Where the padding ends depends on the picture's sides, how long the text is on the mask.
    """

    def forward(  # type: ignore[override]
        self, sample: Tensor, timestep: Tensor, context: Tensor, earlier: Tensor, held: Tensor
    ) -> Tensor:
        places = held[0].nonzero().squeeze(1)
        return super().forward(sample, timestep, context[:, places], earlier)


def slots(size: Size, seed: int, ahead: int = AHEAD, each: int = 1) -> dict[str, Any]:
    """A mask over a text with slots for the picture behind its first tokens."""
    count = size.height * size.width // each
    mask = torch.zeros(size.batch, size.text + count, dtype=torch.bool)
    mask[:, ahead : ahead + count] = True
    return token_inputs(size, seed, held=mask)


def last_slots(size: Size, seed: int) -> dict[str, Any]:
    """The same, behind the whole text; each slot stands for four tokens."""
    return slots(size, seed, ahead=size.text, each=4)


def counts(size: Size, seed: int, left_out: int = 1) -> dict[str, Any]:
    """A number for each sample, the same for all."""
    return token_inputs(size, seed, held=torch.full((size.batch,), size.text - left_out))


def every_other(size: Size, seed: int) -> dict[str, Any]:
    """A mask of every other token of the text."""
    mask = (torch.arange(size.text) % 2 == 0).long().expand(size.batch, -1).contiguous()
    return token_inputs(size, seed, held=mask)


def earlier_kept(size: Size, seed: int) -> dict[str, Any]:
    """A picture, two earlier ones, and a mask of every other token of the text."""
    return {**earlier_inputs(size, seed), "held": every_other(size, seed)["held"]}


HELD: dict[str, tuple[Callable[..., Tensor], Callable[..., dict[str, Any]]]] = {
    "held-slots": (in_slots, slots),
    "held-wide-slots": (widened, last_slots),
    "held-count": (cut_at, counts),
    "held-places": (told_apart, every_other),
}
for name, (arrange, inputs) in HELD.items():
    quick = name != "held-slots"  # that of wide ones does the same and more
    own(name, partial(Held, arrange), inputs, quick=quick, sizes=SIZES, mask_shape=packed)
own("held-earlier", RemembersKept, earlier_kept, sizes=SIZES)
