"""Tiny models with a mixture of experts: routed per token by code of several styles, and by choice.

Image tokens, or image and text tokens on one axis, go through layers of the same kind.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WIDTH = 8


class Routed(nn.Module):
    """Experts per token; `style` is how the code gathers the tokens of an expert."""

    def __init__(self, style: str, experts: int = 4, top: int = 2) -> None:
        super().__init__()
        self.style, self.top = style, top
        self.gate = nn.Linear(WIDTH, experts, bias=False)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(experts))

    def forward(self, x: Tensor) -> Tensor:
        weight, number = self.gate(x).softmax(-1).topk(self.top, -1)
        flat, weight = x.reshape(-1, WIDTH), weight.reshape(-1, self.top)
        number = number.reshape(-1, self.top)
        run: Callable[..., Tensor] = getattr(self, self.style)
        return run(flat, weight, number).reshape(x.shape)

    def sorted(self, x: Tensor, weight: Tensor, number: Tensor) -> Tensor:
        """Tokens sorted by expert, counts read by NumPy."""
        out, order = torch.zeros_like(x), number.reshape(-1).argsort()
        ends = number.reshape(-1).bincount(minlength=len(self.experts)).cpu().numpy().cumsum(0)
        start = 0
        for expert, end in zip(self.experts, ends, strict=True):
            own = order[start:end]
            token = own // self.top
            out.index_add_(0, token, expert(x[token]) * weight.reshape(-1)[own, None])
            start = end
        return out

    def grouped(self, x: Tensor, weight: Tensor, number: Tensor) -> Tensor:
        """Tokens sorted by expert, in one product whose groups have as many rows as data decide."""
        order, experts = number.reshape(-1).argsort(), [*self.experts]
        ends = number.reshape(-1).bincount(minlength=len(experts)).cumsum(0, dtype=torch.int32)
        matrices = torch.stack([expert.weight.T for expert in experts])
        every = F.grouped_mm(x[order // self.top], matrices, offs=ends)
        every = every + torch.stack([expert.bias for expert in experts])[number.reshape(-1)[order]]
        mixed = every * weight.reshape(-1)[order, None]
        return torch.zeros_like(x).index_add_(0, order // self.top, mixed)

    def masked(self, x: Tensor, weight: Tensor, number: Tensor) -> Tensor:
        """A boolean mask of each expert's tokens."""
        out = torch.zeros_like(x)
        for i, expert in enumerate(self.experts):
            chosen = (number == i).any(-1)
            own = torch.where(number == i, weight, 0.0).sum(-1, keepdim=True)
            out[chosen] += expert(x[chosen]) * own[chosen]
        return out

    def one_hot(self, x: Tensor, weight: Tensor, number: Tensor) -> Tensor:
        """Indices of each expert's tokens from a table of ones."""
        out = torch.zeros_like(x)
        table = F.one_hot(number, len(self.experts)).permute(2, 1, 0)
        for i, expert in enumerate(self.experts):
            place, token = torch.where(table[i])
            out.index_add_(0, token, expert(x[token]) * weight[token, place, None])
        return out

    def gathered(self, x: Tensor, weight: Tensor, number: Tensor) -> Tensor:
        """All experts for all tokens, then those of each token."""
        every = torch.stack([expert(x) for expert in self.experts], 1)
        index = number.unsqueeze(-1).expand(-1, -1, WIDTH)
        return (every.gather(1, index) * weight.unsqueeze(-1)).sum(1)


class Capped(Routed):
    """Each expert takes only a number of tokens, the first ones: the others count."""

    def sorted(self, x: Tensor, weight: Tensor, number: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        for i, expert in enumerate(self.experts):
            token = (number == i).any(-1).nonzero()[:, 0].tolist()[:5]
            out[token] += expert(x[token])
        return out


class Choosing(nn.Module):
    """Experts that choose tokens; `style` is how the code picks and computes."""

    def __init__(self, style: str, experts: int = 3, share: float = 1.5) -> None:
        super().__init__()
        self.style, self.share, self.count = style, share, experts
        self.gate = nn.Linear(WIDTH, experts, bias=False)
        self.up = nn.Parameter(torch.randn(experts, WIDTH, 2 * WIDTH) / 3)
        self.down = nn.Parameter(torch.randn(experts, 2 * WIDTH, WIDTH) / 4)

    def forward(self, x: Tensor) -> Tensor:
        scores = self.gate(x).softmax(-1).transpose(1, 2)
        count = max(2, int(self.share * x.shape[1] / self.count))
        run: Callable[..., Tensor] = getattr(self, self.style)
        return run(x, scores, count)

    def flat(self, x: Tensor, scores: Tensor, count: int) -> Tensor:
        """Numbers of tokens over the whole batch, experts one after another."""
        b, n, d = x.shape
        index = scores.topk(count, -1).indices
        weight = scores.gather(-1, index).transpose(0, 1).reshape(-1, 1)
        index = (torch.arange(b).view(b, 1, 1) * n + index).transpose(0, 1).reshape(-1)
        tokens = x.reshape(b * n, d)[index]
        total = torch.zeros(b * n).scatter_add(0, index, weight[:, 0])
        parts = tokens.split([b * count] * self.count)
        outs = [F.silu(p @ u) @ v for p, u, v in zip(parts, self.up, self.down, strict=True)]
        mixed = torch.cat(outs) * weight / (total[index][:, None] + 1e-6)
        out = x.reshape(b * n, d).scatter_add(0, index[:, None].expand(-1, d), mixed)
        return out.reshape(b, n, d)

    def grouped(self, x: Tensor, scores: Tensor, count: int) -> Tensor:
        """As `flat`, in one product whose groups all have the same number of rows."""
        b, n, d = x.shape
        weight, index = scores.topk(count, -1)
        index = (torch.arange(b).view(b, 1, 1) * n + index).transpose(0, 1).reshape(-1)
        tokens = x.reshape(b * n, d)[index]
        ends = torch.full((self.count,), b * count).cumsum(0, dtype=torch.int32)
        hidden = F.silu(F.grouped_mm(tokens, self.up, offs=ends))
        mixed = F.grouped_mm(hidden, self.down, offs=ends)
        mixed = mixed * weight.transpose(0, 1).reshape(-1, 1)
        out = x.reshape(b * n, d).scatter_add(0, index[:, None].expand(-1, d), mixed)
        return out.reshape(b, n, d)

    def batched(self, x: Tensor, scores: Tensor, count: int) -> Tensor:
        """Numbers of tokens within each sample, all experts in one product."""
        b, n, d = x.shape
        weight, index = scores.topk(count, -1)
        where = index.reshape(b, -1, 1).expand(-1, -1, d)
        tokens = x.gather(1, where).unflatten(1, (self.count, count))
        tokens = tokens.transpose(0, 1).reshape(self.count, b * count, d)
        mixed = torch.bmm(F.silu(torch.bmm(tokens, self.up)), self.down)
        mixed = mixed.reshape(self.count, b, count, d).transpose(0, 1) * weight.unsqueeze(-1)
        return x.scatter_add(1, where, mixed.reshape(b, -1, d))


class Tokens(nn.Module):
    """Layers of one kind between linear ones, over image tokens or image and text tokens."""

    def __init__(self, make: Callable[[], nn.Module], text: bool = False) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(make() for _ in range(2))
        self.text = text

    def forward(self, hidden_states: Tensor, encoder_hidden_states: Tensor | None = None) -> Tensor:
        x = self.first(hidden_states)
        if self.text and encoder_hidden_states is not None:
            x = torch.cat([encoder_hidden_states, x], 1)
        for layer in self.layers:
            x = F.layer_norm(x + layer(x), (WIDTH,))
        return self.last(x[:, -hidden_states.shape[1] :])


def seeded(make: Callable[[], Any]) -> Any:
    """Build a module, always with the same weights."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return make().eval().requires_grad_(False)
