"""Tiny denoisers with experts in a loop, as user code spells it, and keys that few have."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.factories.own_denoisers import WIDTH, Block, Picture, own, plain
from tests.factories.own_transformers import DEPTH, HEADS, Mixing, tokens
from tests.factories.zoo import Draw, Size

COUNT = 3
SPELLINGS = ("where", "mixtral", "pairs", "any", "each", "nonzero", "flat")


class Experts(nn.Module):
    """A loop over experts, each of which computes the rows that chose it."""

    def __init__(self, spelling: str) -> None:
        super().__init__()
        self.spelling, self.route = spelling, nn.Linear(WIDTH, COUNT)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH))
            for _ in range(COUNT)
        )

    def forward(self, x: Tensor) -> Tensor:
        if self.spelling == "each":
            return self.each(x)
        rows = x.reshape(-1, WIDTH)
        share, chosen = self.route(rows).softmax(-1).topk(2, -1)
        return getattr(self, self.spelling)(rows, share, chosen).view_as(x)

    def each(self, x: Tensor) -> Tensor:
        share, chosen = self.route(x).softmax(-1).max(-1)
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            mask = chosen == number
            out[mask] = expert(x[mask]) * share[mask][:, None]
        return out

    def where(self, rows: Tensor, share: Tensor, chosen: Tensor) -> Tensor:
        out = torch.zeros_like(rows)
        for number, expert in enumerate(self.experts):
            place = torch.where(chosen[:, 0] == number)[0]
            if place.numel() == 0:
                continue
            out[place] = expert(rows[place]) * share[place, 0].unsqueeze(-1)
        return out

    def mixtral(self, rows: Tensor, share: Tensor, chosen: Tensor) -> Tensor:
        out = torch.zeros(rows.shape, dtype=rows.dtype, device=rows.device)
        masks = F.one_hot(chosen, num_classes=COUNT).permute(2, 1, 0)
        for number, expert in enumerate(self.experts):
            slot, place = torch.where(masks[number])
            current = rows[None, place].reshape(-1, WIDTH)
            current = expert(current) * share[place, slot, None]
            out.index_add_(0, place, current.to(rows.dtype))
        return out

    def pairs(self, rows: Tensor, share: Tensor, chosen: Tensor) -> Tensor:
        out = torch.zeros_like(rows)
        for number, expert in enumerate(self.experts):
            mask = chosen == number
            own = mask.any(dim=-1)
            out[own] += expert(rows[own]) * share[mask].unsqueeze(-1)
        return out

    def any(self, rows: Tensor, share: Tensor, chosen: Tensor) -> Tensor:
        out = torch.zeros_like(rows)
        for number, expert in enumerate(self.experts):
            mask = chosen[:, 1] == number
            if not mask.any():
                continue
            out[mask] = expert(rows[mask]) + share[mask][:, 1:]
        return out

    def nonzero(self, rows: Tensor, share: Tensor, chosen: Tensor) -> Tensor:
        out = torch.zeros_like(rows)
        for number, expert in enumerate(self.experts):
            place, slot = (chosen == number).nonzero(as_tuple=True)
            if place.shape[0] > 0:
                out[place] += share[place, slot].unsqueeze(1) * expert(rows[place])
        return out

    def flat(self, rows: Tensor, share: Tensor, chosen: Tensor) -> Tensor:
        out = torch.zeros_like(rows)
        for number, expert in enumerate(self.experts):
            place = (chosen[:, 0] == number).nonzero().squeeze(-1)
            out = out.index_add(0, place, expert(rows[place]) * share[place, :1])
        return out


class Loops(Mixing):
    """Attention, then the loops one after another in one function with it."""

    def __init__(self, *spellings: str) -> None:
        super().__init__()
        self.loops = [Experts(spelling) for spelling in spellings]  # no submodules of their own
        for loop in self.loops:
            self.add_module(f"route_{loop.spelling}", loop.route)
            self.add_module(f"experts_{loop.spelling}", loop.experts)

    def mix(self, x: Tensor, size: tuple[int, int]) -> Tensor:
        x = self.joined(F.scaled_dot_product_attention(*self.heads(x)))
        for loop in self.loops:
            x = x + loop.forward(x)
        return x


class ZeroKeys(Mixing):
    """Attention to one more key and value than there are tokens, both zero."""

    def mix(self, x: Tensor, size: tuple[int, int]) -> Tensor:
        q, k, v = self.heads(x)
        k, v = F.pad(k, (0, 0, 0, 1)), F.pad(v, (0, 0, 0, 1))
        return self.joined((q @ k.mT / DEPTH**0.5).softmax(-1) @ v)


class References(nn.Module):
    """Attention to the sites of three smaller pictures, which stay the same in all steps."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Conv2d(4, WIDTH, 3, padding=1), nn.Conv2d(WIDTH, 4, 1)
        self.smaller, self.time = nn.Conv2d(4, WIDTH, 3, 2, padding=1), nn.Linear(1, WIDTH)
        self.query, self.pair = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2 * WIDTH)

    def forward(self, sample: Tensor, timestep: Tensor, references: Tensor) -> Tensor:
        x = self.first(sample) + self.time(timestep[:, None].cos())[:, :, None, None]
        b, c, h, w = x.shape
        rows = self.smaller(references.flatten(0, 1)).unflatten(0, (b, -1))
        rows = rows.permute(0, 1, 3, 4, 2).reshape(b, -1, c)
        parts = (self.query(x.flatten(2).mT), *self.pair(rows).chunk(2, -1))
        q, k, v = (p.unflatten(2, (HEADS, DEPTH)).transpose(1, 2) for p in parts)
        mixed = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        return self.last(x + mixed.mT.reshape(b, c, h, w))


def with_references(size: Size, seed: int) -> dict[str, Any]:
    small = Draw(seed + 3).normal(size.batch, 3, 4, size.height // 2, size.width // 2)
    return {**plain(size, seed), "references": small}


class CausalLines(Block):
    """A causal convolution of all sites in a row, cut to their number."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(WIDTH, WIDTH, 4, padding=3, groups=WIDTH)

    def mix(self, x: Tensor) -> Tensor:
        rows = x.flatten(2)
        return F.silu(self.conv(rows)[..., : rows.shape[-1]]).view_as(x)


own("inline-experts", tokens(lambda: Loops("where", "mixtral", "pairs", "each")))
own("presumed-experts", tokens(lambda: Loops("any", "nonzero", "flat")))
own("zero-keys", tokens(ZeroKeys))
own("references", References, with_references)
own("causal-lines", lambda: Picture(CausalLines()))
