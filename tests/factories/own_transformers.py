"""Tiny denoisers over tokens, as users write them with torch alone."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.factories.own_denoisers import WIDTH, embed, own

HEADS, DEPTH = 2, WIDTH // 2


def modulate(x: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
    return x * (1 + scale[:, None]) + shift[:, None]


class Tokens(nn.Module):
    """Patches as tokens, blocks called as block(x, emb, size), and patches back to a picture."""

    def __init__(self, *blocks: nn.Module, patch: int = 2, style: str = "conv") -> None:
        super().__init__()
        self.patch, self.style = patch, style
        self.first = (
            nn.Conv2d(4, WIDTH, patch, patch)
            if style == "conv"
            else nn.Linear(4 * patch * patch, WIDTH)
        )
        self.blocks = nn.ModuleList(blocks)
        self.time = nn.Linear(WIDTH, WIDTH)
        self.norm, self.last = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * patch * patch)

    def to_tokens(self, sample: Tensor) -> Tensor:
        p = self.patch
        b, c, h, w = sample.shape
        if self.style == "conv":
            return self.first(sample).flatten(2).transpose(1, 2)
        if self.style == "unfold":
            return self.first(F.unfold(sample, p, stride=p).transpose(1, 2))
        x = sample.view(b, c, h // p, p, w // p, p).permute(0, 2, 4, 3, 5, 1)
        return self.first(x.reshape(b, (h // p) * (w // p), p * p * c))

    def to_picture(self, x: Tensor, h: int, w: int) -> Tensor:
        p = self.patch
        x = self.last(self.norm(x))
        if self.style == "unfold":
            return F.fold(x.transpose(1, 2), (h, w), p, stride=p)
        x = x.reshape(x.shape[0], h // p, w // p, p, p, 4)
        return torch.einsum("nhwpqc->nchpwq", x).reshape(x.shape[0], 4, h, w)

    def forward(self, sample: Tensor, timestep: Tensor) -> Tensor:
        h, w = sample.shape[-2:]
        x, emb = self.to_tokens(sample), self.time(embed(timestep))
        size = h // self.patch, w // self.patch
        for block in self.blocks:
            x = block(x, emb, size)
        return self.to_picture(x, h, w)


class Mixing(nn.Module):
    """A residual block around `mix`, with a feed-forward part."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.to_shift = nn.Linear(WIDTH, WIDTH)

    @abstractmethod
    def mix(self, x: Tensor, size: tuple[int, int]) -> Tensor:
        """Return what is added to the rows."""

    def feed(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(F.gelu(self.up(x)))
        return out

    def heads(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values [b, heads, n, depth]."""
        b, n, _ = x.shape
        q, k, v = self.qkv(x).reshape(b, n, 3, HEADS, DEPTH).permute(2, 0, 3, 1, 4)
        return q, k, v

    def joined(self, x: Tensor) -> Tensor:
        out: Tensor = self.proj(x.transpose(1, 2).flatten(2))
        return out

    def forward(self, x: Tensor, emb: Tensor, size: tuple[int, int]) -> Tensor:
        x = x + self.mix(self.norm1(x) + self.to_shift(emb)[:, None], size)
        return x + self.feed(self.norm2(x))


class AdaLnZero(Mixing):
    """adaLN-zero, attention with q and k normalised, dropouts."""

    def __init__(self) -> None:
        super().__init__()
        self.ada = nn.Sequential(nn.SiLU(), nn.Linear(WIDTH, 6 * WIDTH))
        self.q_norm, self.k_norm = nn.RMSNorm(DEPTH), nn.RMSNorm(DEPTH)
        self.drop = nn.Dropout(0.1)

    def mix(self, x: Tensor, size: tuple[int, int]) -> Tensor:
        q, k, v = self.heads(x)
        mixed = F.scaled_dot_product_attention(self.q_norm(q), self.k_norm(k), v)
        return self.drop(self.joined(mixed))

    def forward(self, x: Tensor, emb: Tensor, size: tuple[int, int]) -> Tensor:
        shift1, scale1, gate1, shift2, scale2, gate2 = self.ada(emb).chunk(6, dim=1)
        x = x + gate1[:, None] * self.mix(modulate(self.norm1(x), shift1, scale1), size)
        return x + gate2[:, None] * self.drop(self.feed(modulate(self.norm2(x), shift2, scale2)))


class Biased(Mixing):
    """Attention as two products and a softmax, with a table of relative positions."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.zeros(31 * 31, HEADS))

    def bias(self, h: int, w: int) -> Tensor:
        ys, xs = torch.meshgrid(torch.arange(h), torch.arange(w), indexing="ij")
        ys, xs = ys.flatten(), xs.flatten()
        dy, dx = ys[:, None] - ys[None] + 15, xs[:, None] - xs[None] + 15
        return self.table[dy * 31 + dx].permute(2, 0, 1)

    def mix(self, x: Tensor, size: tuple[int, int]) -> Tensor:
        q, k, v = self.heads(x)
        scores = (q * DEPTH**-0.5) @ k.transpose(-2, -1) + self.bias(*size)
        return self.joined(scores.softmax(dim=-1) @ v)


class Alibi(Mixing):
    """Attention by einsum, with a penalty by distance, whose heads are the third axis."""

    def mix(self, x: Tensor, size: tuple[int, int]) -> Tensor:
        b, n, _ = x.shape
        q, k, v = (t.reshape(b, n, HEADS, DEPTH) for t in self.qkv(x).chunk(3, dim=-1))
        place = torch.arange(n)
        slopes = 2.0 ** -torch.arange(1, HEADS + 1)
        bias = -(place[:, None] - place[None]).abs()[None] * slopes[:, None, None]
        scores = torch.einsum("bihd,bjhd->bhij", q, k) / math.sqrt(DEPTH) + bias
        mixed = torch.einsum("bhij,bjhd->bihd", torch.softmax(scores, -1), v)
        out: Tensor = self.proj(mixed.reshape(b, n, WIDTH))
        return out


class HeadsLast(Mixing):
    """Attention by einsum whose scores have their heads last."""

    def mix(self, x: Tensor, size: tuple[int, int]) -> Tensor:
        b, n, _ = x.shape
        q, k, v = self.qkv(x).view(b, n, HEADS, 3 * DEPTH).chunk(3, -1)
        weight = (torch.einsum("bihd,bjhd->bijh", q, k) * DEPTH**-0.5).softmax(dim=2)
        out: Tensor = self.proj(torch.einsum("bijh,bjhd->bihd", weight, v).reshape(b, n, -1))
        return out


class Sinks(Mixing):
    """Learned keys and values before those of the picture."""

    def __init__(self) -> None:
        super().__init__()
        self.sinks = nn.Parameter(torch.randn(2, HEADS, 3, DEPTH))

    def mix(self, x: Tensor, size: tuple[int, int]) -> Tensor:
        q, k, v = self.heads(x)
        mk, mv = (t.expand(x.shape[0], -1, -1, -1) for t in self.sinks)
        k, v = torch.cat([mk, k], -2), torch.cat([mv, v], -2)
        return self.joined(F.scaled_dot_product_attention(q, k, v))


class Grouped(Mixing):
    """Fewer heads of keys than of queries, SwiGLU, RMS norms written out, complex rotary places."""

    def __init__(self, style: str = "gqa") -> None:
        super().__init__()
        self.style, self.kv = style, nn.Linear(WIDTH, 2 * DEPTH)
        self.gate = nn.Linear(WIDTH, 2 * WIDTH)
        self.scale = nn.Parameter(torch.ones(DEPTH))

    def rms(self, x: Tensor) -> Tensor:
        square = x.float().pow(2).mean(-1, keepdim=True)
        return (x * torch.rsqrt(square + 1e-6)).type_as(x) * self.scale

    def turned(self, x: Tensor, size: tuple[int, int]) -> Tensor:
        h, w = size
        rates = 100.0 ** -(torch.arange(DEPTH // 4).float() / (DEPTH // 4))
        ys, xs = torch.arange(h).float(), torch.arange(w).float()
        ay = torch.outer(ys, rates)[:, None].expand(h, w, -1)
        ax = torch.outer(xs, rates)[None].expand(h, w, -1)
        angles = torch.cat([ay, ax], -1).reshape(h * w, -1)
        turn = torch.polar(torch.ones_like(angles), angles)
        pairs = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
        return torch.view_as_real(pairs * turn).flatten(-2).type_as(x)

    def mix(self, x: Tensor, size: tuple[int, int]) -> Tensor:
        b, n, _ = x.shape
        q = self.qkv(x)[..., :WIDTH].reshape(b, n, HEADS, DEPTH).transpose(1, 2)
        k, v = self.kv(x).reshape(b, n, 2, 1, DEPTH).unbind(2)
        k, v = k.transpose(1, 2), v.transpose(1, 2)
        q, k = self.turned(self.rms(q), size), self.turned(self.rms(k), size)
        if self.style == "gqa":
            return self.joined(F.scaled_dot_product_attention(q, k, v, enable_gqa=True))
        if self.style == "repeat":
            k, v = k.repeat_interleave(HEADS, 1), v.repeat_interleave(HEADS, 1)
            return self.joined(F.scaled_dot_product_attention(q, k, v))
        return self.joined(torch.softmax(q @ k.transpose(-1, -2) / math.sqrt(DEPTH), -1) @ v)

    def feed(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(F.silu(self.gate(x)) * self.up(x))
        return out


class Linear(Mixing):
    """Linear attention: softmax features, or elu + 1, with squared ReLU in the other part."""

    def __init__(self, style: str) -> None:
        super().__init__()
        self.style = style

    def feed(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(F.relu(self.up(x)).square())
        return out

    def mix(self, x: Tensor, size: tuple[int, int]) -> Tensor:
        q, k, v = self.heads(x)
        if self.style == "softmax":
            q, k = q.softmax(-1) * DEPTH**-0.5, k.softmax(-2)
            context = torch.einsum("bhnd,bhne->bhde", k, v)
            return self.joined(torch.einsum("bhde,bhnd->bhne", context, q))
        q, k = F.elu(q) + 1, F.elu(k) + 1
        context = k.transpose(-2, -1) @ v
        norm = 1 / (torch.einsum("bhnd,bhd->bhn", q, k.sum(dim=-2)) + 1e-6)
        return self.joined((q @ context) * norm[..., None])


class Axial(Mixing):
    """Attention along the rows of a picture, then along its columns."""

    def along(self, x: Tensor) -> Tensor:
        """Attend along the second last axis of [b, lines, n, c]."""
        q, k, v = self.qkv(x).unflatten(-1, (3, HEADS, DEPTH)).unbind(-3)
        q, k, v = q.transpose(2, 3), k.transpose(2, 3), v.transpose(2, 3)
        out: Tensor = self.proj(F.scaled_dot_product_attention(q, k, v).transpose(2, 3).flatten(3))
        return out

    def mix(self, x: Tensor, size: tuple[int, int]) -> Tensor:
        grid = x.unflatten(1, size)
        grid = grid + self.along(grid)
        return (grid + self.along(grid.transpose(1, 2)).transpose(1, 2)).flatten(1, 2)


class Windows(Mixing):
    """Swin: attention within windows, with every other one shifted by a roll."""

    def __init__(self, side: int = 2, shift: int = 0) -> None:
        super().__init__()
        self.side, self.shift = side, shift

    def mix(self, x: Tensor, size: tuple[int, int]) -> Tensor:
        (h, w), s = size, self.side
        b = x.shape[0]
        grid = x.view(b, h, w, WIDTH)
        if self.shift:
            grid = torch.roll(grid, (-self.shift, -self.shift), (1, 2))
        grid = grid.view(b, h // s, s, w // s, s, WIDTH).permute(0, 1, 3, 2, 4, 5)
        windows = grid.reshape(-1, s * s, WIDTH)
        q, k, v = self.heads(windows)
        mixed = self.joined(F.scaled_dot_product_attention(q, k, v))
        grid = mixed.view(b, h // s, w // s, s, s, WIDTH).permute(0, 1, 3, 2, 4, 5)
        grid = grid.reshape(b, h, w, WIDTH)
        if self.shift:
            grid = torch.roll(grid, (self.shift, self.shift), (1, 2))
        return grid.reshape(b, h * w, WIDTH)


class Latents(Mixing):
    """Perceiver: latents read the picture, and the picture reads the latents."""

    def __init__(self) -> None:
        super().__init__()
        self.latents = nn.Parameter(torch.randn(1, 5, WIDTH))
        self.read = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)
        self.write = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)

    def mix(self, x: Tensor, size: tuple[int, int]) -> Tensor:
        latents = self.latents.repeat(x.shape[0], 1, 1)
        latents = latents + self.read(latents, x, x, need_weights=False)[0]
        out: Tensor = self.write(x, latents, latents, need_weights=False)[0]
        return out


class Encoder(nn.Module):
    """Torch's own layer of a transformer; the timestep is a token at one end."""

    def __init__(self, last: bool = False, **more: Any) -> None:
        super().__init__()
        self.last = last
        self.layer = nn.TransformerEncoderLayer(
            WIDTH, HEADS, 2 * WIDTH, activation="gelu", batch_first=True, norm_first=True, **more
        )

    def forward(self, x: Tensor, emb: Tensor, size: tuple[int, int]) -> Tensor:
        if self.last:
            out: Tensor = self.layer(torch.cat([x, emb[:, None]], 1))[:, :-1]
        else:
            out = self.layer(torch.cat([emb[:, None], x], dim=1))[:, 1:]
        return out


class Scan(Mixing):
    """A running sum and a causal convolution over tokens, as state space models have."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(WIDTH, WIDTH, 3, padding=2, groups=WIDTH)
        self.point = nn.Conv1d(WIDTH, WIDTH, 1)

    def mix(self, x: Tensor, size: tuple[int, int]) -> Tensor:
        y = x.transpose(1, 2)
        y = F.silu(self.conv(y)[..., : y.shape[-1]])
        decay = torch.sigmoid(self.point(y))
        return (torch.cumsum(decay * y, -1) / decay.cumsum(-1)).transpose(1, 2)


class Routed(Mixing):
    """Half of the tokens, those of the highest scores, go through a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.score = nn.Linear(WIDTH, 1)

    def mix(self, x: Tensor, size: tuple[int, int]) -> Tensor:
        score = self.score(x)[..., 0]
        order = score.sort(dim=1, descending=True).indices[:, : x.shape[1] // 2]
        index = order[..., None].expand(-1, -1, WIDTH)
        some = self.proj(x.gather(1, index)) * score.gather(1, order).sigmoid()[..., None]
        return torch.zeros_like(x).scatter(1, index, some)


class Causal(Mixing):
    """Attention to earlier tokens only; a checkpoint around it."""

    def mix(self, x: Tensor, size: tuple[int, int]) -> Tensor:
        def attend(y: Tensor) -> Tensor:
            return self.joined(F.scaled_dot_product_attention(*self.heads(y), is_causal=True))

        out: Tensor = checkpoint(attend, x, use_reentrant=False)
        return out


def tokens(*made: Callable[[], nn.Module], **more: Any) -> Callable[[], nn.Module]:
    return lambda: Tokens(*[make() for make in made], **more)


class Companions(Mixing):
    """Each sample's mean attends to the means of all samples of the call, as in ControlNetUnion."""

    def __init__(self) -> None:
        super().__init__()
        self.between = nn.MultiheadAttention(WIDTH, HEADS)

    def mix(self, x: Tensor, size: tuple[int, int]) -> Tensor:
        means = torch.stack([x.mean(1), x.square().mean(1)], 1)
        told = self.between(means, means, means, need_weights=False)[0]
        return self.proj(x * told[:, :1] + told[:, 1:])


own("adaln-zero", tokens(AdaLnZero, AdaLnZero))
own("unfolded", tokens(AdaLnZero, style="unfold"))
own("viewed", tokens(AdaLnZero, style="view", patch=1))
own("biased", tokens(Biased, style="view"))
own("alibi", tokens(Alibi))
own("heads-last", tokens(HeadsLast))
own("sinks", tokens(Sinks))
own("grouped-queries", tokens(Grouped, partial(Grouped, "repeat"), partial(Grouped, "plain")))
own("linear-softmax", tokens(partial(Linear, "softmax")), quick=True)
own("linear-elu", tokens(partial(Linear, "elu")))
own("axial", tokens(Axial))
own("windows", tokens(Windows))
own("shifted-windows", tokens(Windows, partial(Windows, shift=1)))
own("latents", tokens(Latents), quick=True)
own("encoder-layers", tokens(Encoder, partial(Encoder, last=True)), quick=True)
own("scan", tokens(Scan), narrow=False)
own("routed", tokens(Routed), narrow=False)
own("causal", tokens(Causal), quick=True)
own("companions", tokens(Companions), quick=True)
