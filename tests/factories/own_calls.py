"""Tiny denoisers that call torch in other ways: scripted and custom functions, other outputs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.flex_attention import flex_attention
from torch.utils.checkpoint import checkpoint

from tests.factories.own_denoisers import WIDTH, Block, Picture, conv, embed, own, plain
from tests.factories.own_transformers import DEPTH, HEADS, Mixing, Tokens, tokens
from tests.factories.zoo import Draw


class Whole(Block):
    """Statistics over channels and sites at once, and of both kinds by one call."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = conv(3, padding=1)

    def mix(self, x: Tensor) -> Tensor:
        x = self.conv(x)
        mean = x.mean(dim=(1, 2, 3), keepdim=True)
        spread = x.var(dim=(1, 2, 3), keepdim=True, unbiased=False)
        x = (x - mean) * torch.rsqrt(spread + 1e-5)
        x = x / (x.flatten(1).norm(dim=1)[:, None, None, None] / x[0].numel() ** 0.5 + 1e-6)
        variance, middle = torch.var_mean(x, dim=(2, 3), keepdim=True)
        return (x - middle) / (variance + 1e-5).sqrt() + x.amax((1, 2, 3), keepdim=True)


class TimeMap(nn.Module):
    """The timestep as a channel of the picture, and a residual that the caller gives."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Conv2d(5, WIDTH, 3, padding=1), nn.Conv2d(WIDTH, 4, 3, padding=1)

    def forward(self, sample: Tensor, timestep: Tensor, skip: list[Tensor]) -> list[Tensor]:
        b, _, h, w = sample.shape
        when = (timestep.float() / 1000).view(-1, 1, 1, 1).expand(b, 1, h, w)
        x = torch.relu(self.first(torch.cat([sample, when], dim=1)))
        for residual in skip:
            x = x + F.pad(residual, (0, 0, 0, 0, 0, WIDTH - residual.shape[1]))
        return [self.last(x), x]


class Masked(nn.Module):
    """A mask of the picture without channels, as a channel and between result and picture."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Picture(Whole(), channels=5)

    def forward(self, sample: Tensor, timestep: Tensor, mask: Tensor) -> Tensor:
        found: Tensor = self.net(torch.cat([sample, mask[:, None]], 1), timestep)
        return torch.where(mask[:, None] > 0.5, found, sample)


def with_mask(size: Any, seed: int) -> dict[str, Any]:
    given = plain(size, seed)
    return {**given, "mask": Draw(seed + 3).uniform(*given["sample"][:, 0].shape)}


def with_skips(size: Any, seed: int) -> dict[str, Any]:
    given = plain(size, seed)
    return {**given, "skip": [given["sample"] * 0.5, given["sample"].flip(1)]}


@torch.jit.script
def scripted(x: Tensor, y: Tensor) -> Tensor:
    return torch.tanh(x) * torch.sigmoid(y) + x.mean(1, keepdim=True)


class Scores(torch.autograd.Function):
    """Weights of an attention with a derivative of its own."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor) -> Tensor:
        return torch.einsum("ncq,nck->nqk", q, k / DEPTH**0.5).softmax(dim=2)


class Custom(Block):
    """A scripted function, a function with its own derivative, a checkpoint that runs again."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.qkv = conv(3, padding=1), nn.Conv2d(WIDTH, 3 * WIDTH, 1)

    def attend(self, x: Tensor) -> Tensor:
        b, c, h, w = x.shape
        q, k, v = self.qkv(x).reshape(b * 2, c // 2, 3, -1).unbind(2)
        return torch.einsum("nqk,nck->ncq", Scores.apply(q, k), v).reshape(x.shape)

    def mix(self, x: Tensor) -> Tensor:
        attended: Tensor = checkpoint(self.attend, x, use_reentrant=True)
        return scripted(attended, self.gate(x))


class Flexible(Mixing):
    """torch's flexible attention, with a bias that is a function of two places."""

    def mix(self, x: Tensor, size: tuple[int, int]) -> Tensor:
        def near(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
            return score - 0.1 * (q - k).abs()

        q, k, v = self.heads(x)
        return self.joined(flex_attention(q, k, v, score_mod=near))


@dataclass
class Result:
    """An output that torch doesn't know how to take apart."""

    sample: Tensor
    features: Tensor | None = None


class Wrapped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Conv2d(4, WIDTH, 3, padding=1), nn.Conv2d(WIDTH, 4, 3, padding=1)

    def forward(self, sample: Tensor, timestep: Tensor) -> Result:
        x = F.silu(self.first(sample) + embed(timestep)[:, :, None, None])
        return Result(sample=self.last(x), features=x)


class LayerKeys:
    """Keys and values of one layer, or none yet."""

    def __init__(self, keys: Tensor | None = None, values: Tensor | None = None) -> None:
        self.keys, self.values = keys, values


class HeldKeys:
    """Keys and values that a pipeline hands from call to call; "write" ones are filled by a call.

    `written` counts the calls that wrote.
    """

    def __init__(self, mode: str, *layers: LayerKeys) -> None:
        self.mode, self.layers, self.written = mode, list(layers), 0


class Remembering(Mixing):
    """Sites attend to what an object holds and to one another; their number isn't the same."""

    held: LayerKeys | None = None

    def mix(self, x: Tensor, size: tuple[int, int]) -> Tensor:
        q, k, v = self.heads(x)
        if self.held is not None and self.held.keys is not None:
            assert self.held.values is not None
            k = torch.cat([self.held.keys, k], dim=2)
            v = torch.cat([self.held.values, v], dim=2)
        elif self.held is not None:
            self.held.keys, self.held.values = k, v
        return self.joined(F.scaled_dot_product_attention(q, k, v))


class Handed(Tokens):
    """A denoiser whose layers read keys and values of an object, or write them into it."""

    def forward(self, sample: Tensor, timestep: Tensor, cache: HeldKeys | None = None) -> Tensor:
        blocks = [block for block in self.blocks if isinstance(block, Remembering)]
        for block, held in zip(blocks, [] if cache is None else cache.layers, strict=False):
            block.held = held
        if cache is not None and cache.mode == "write":
            cache.written += 1
        found: Tensor = super().forward(sample, timestep)
        for block in blocks:
            block.held = None
        return found


def with_keys(size: Any, seed: int) -> dict[str, Any]:
    draw = Draw(seed + 5)
    shape = size.batch, HEADS, size.text, DEPTH
    layers = [LayerKeys(draw.normal(*shape), draw.normal(*shape)) for _ in range(2)]
    return {**plain(size, seed), "cache": HeldKeys("read", *layers)}


own("whole-statistics", lambda: Picture(Whole()))
own("time-map", TimeMap, with_skips)
own("flat-mask", Masked, with_mask)
own("custom-functions", lambda: Picture(Custom()))
own("handed-keys", lambda: Handed(Remembering(), Remembering()), with_keys, quick=True)
own("flexible", tokens(Flexible), narrow=False)
own("wrapped", Wrapped)
