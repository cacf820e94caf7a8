"""Tiny denoisers whose sites are weighed without a softmax over keys, or by one over sites."""

from __future__ import annotations

import math
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.factories.own_denoisers import WIDTH, Block, Picture, own
from tests.factories.own_transformers import DEPTH, Mixing, tokens


class Weighed(Mixing):
    """Attention whose weights are a function of each score, with or without their sum."""

    def __init__(self, style: str) -> None:
        super().__init__()
        self.style, self.scale = style, nn.Parameter(torch.ones(2, 1, 1))

    def weights(self, scores: Tensor) -> Tensor:
        match self.style:
            case "sigmoid":
                return torch.sigmoid(scores * self.scale.exp() - math.log(16))
            case "relu":
                squares = F.relu(scores).square()
                return squares / (squares.sum(-1, keepdim=True) + 1e-3)
            case "exp":
                found = (scores - scores.amax(-1, keepdim=True)).exp()
                return found / found.sum(-1, keepdim=True)
        return scores / scores.shape[-1]

    def mix(self, x: Tensor, size: tuple[int, int]) -> Tensor:
        q, k, v = self.heads(x)
        if self.style == "cosine":
            q, k = F.normalize(q, dim=-1), F.normalize(k, dim=-1)
        return self.joined(self.weights(q @ k.transpose(-2, -1) * DEPTH**-0.5) @ v)


class Capped(Mixing):
    """Scores from an einsum, in heads beside the batch; gates in place of weights' sums."""

    def mix(self, x: Tensor, size: tuple[int, int]) -> Tensor:
        q, k, v = (t.flatten(0, 1) for t in self.heads(x))
        scores = 3 * torch.tanh(torch.baddbmm(q.new_zeros(1), q, k.mT, beta=0, alpha=0.3) / 3)
        mixed = torch.bmm(F.silu(scores), v) * torch.sigmoid(q)
        return self.joined(mixed.unflatten(0, (x.shape[0], -1)))


class Kernel(Mixing):
    """Linear attention in the forms of several papers."""

    def __init__(self, style: str) -> None:
        super().__init__()
        self.style = style

    def mix(self, x: Tensor, size: tuple[int, int]) -> Tensor:
        q, k, v = self.heads(x)
        if self.style == "sana":  # sites last, the sum of weights beside the values
            q, k, v = F.relu(q.mT), F.relu(k.mT), F.pad(v.mT, (0, 0, 0, 1), value=1.0)
            out = (v @ k.mT) @ q
            return self.proj((out[:, :, :-1] / (out[:, :, -1:] + 1e-6)).flatten(1, 2).mT)
        if self.style == "three":  # sites before heads, three operands at once
            q, k, v = (t.transpose(1, 2) for t in (F.elu(q) + 1, F.elu(k) + 1, v))
            total = 1 / (torch.einsum("bnhd,bhd->bnh", q, k.sum(1)) + 1e-6)
            context = torch.einsum("bmhd,bmhe->bhde", k, v)
            return self.proj(torch.einsum("bnhd,bhde,bnh->bnhe", q, context, total).flatten(2))
        k = k.softmax(-2)  # over sites
        return self.joined(q.softmax(-1) @ (k.mT @ v)) + (k * v).sum(-2).flatten(1)[:, None]


class Gated(Block):
    """Channels gated by a context: a mean of all sites, weighted by a softmax over them."""

    def __init__(self, style: str) -> None:
        super().__init__()
        self.style, self.key = style, nn.Conv2d(WIDTH, 1, 1)
        self.net = nn.Sequential(
            nn.Conv2d(WIDTH, 4, 1), nn.SiLU(), nn.Conv2d(4, WIDTH, 1), nn.Sigmoid()
        )

    def mix(self, x: Tensor) -> Tensor:
        b, c, h, w = x.shape
        key = self.key(x)
        if self.style == "matmul":
            weights = key.view(b, 1, h * w).softmax(2).unsqueeze(-1)
            return x * self.net((x.view(b, 1, c, h * w) @ weights).view(b, c, 1, 1))
        if self.style == "einsum":
            context = torch.einsum("bin,bcn->bci", key.flatten(2).softmax(-1), x.flatten(2))
            return x * self.net(context[..., None])
        weights = key.flatten(2).softmax(-1).view(b, 1, h, w)
        spread = x.flatten(2).log_softmax(-1).view(b, c, h, w)
        gate = self.net((x * weights).sum((2, 3), keepdim=True))
        return x * gate + weights * h * w + spread * x.logsumexp((2, 3), keepdim=True)


own("weighed-sigmoid", tokens(partial(Weighed, "sigmoid")), quick=True)
own("weighed-relu", tokens(partial(Weighed, "relu")))
own("weighed-exp", tokens(partial(Weighed, "exp")))
own("weighed-cosine", tokens(partial(Weighed, "cosine")))
own("weighed-capped", tokens(Capped))
own("linear-sana", tokens(partial(Kernel, "sana")))
own("linear-three", tokens(partial(Kernel, "three")))
own("linear-sites", tokens(partial(Kernel, "sites")))
own("context-matmul", lambda: Picture(Gated("matmul")))
own("context-einsum", lambda: Picture(Gated("einsum")))
own("context-sum", lambda: Picture(Gated("sum")), quick=True)
