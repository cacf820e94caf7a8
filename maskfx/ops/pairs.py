"""Attention without a softmax: sums over keys of values, times a function of each score.

A score is a product of a query and a key. The function is a chain of elementwise steps, written as
"mul 0.35, sigmoid": the names of `STEPS`, each with at most one number.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils.flop_counter import register_flop_formula

from maskfx.ops.attention import attend_flops, attend_formula
from maskfx.ops.base import define, join, pieces, ranges

_aten = torch.ops.aten
STEPS: dict[str, OpOverload[..., Any]] = {  # by name of the operator, of one tensor and a number
    "mul": _aten.mul.Scalar,
    "div": _aten.div.Scalar,
    "add": _aten.add.Scalar,
    "sub": _aten.sub.Scalar,
    "pow": _aten.pow.Tensor_Scalar,
    "clamp_min": _aten.clamp_min.default,
    "clamp_max": _aten.clamp_max.default,
    "abs": _aten.abs.default,
    "elu": _aten.elu.default,
    "exp": _aten.exp.default,
    "gelu": _aten.gelu.default,
    "hardsigmoid": _aten.hardsigmoid.default,
    "leaky_relu": _aten.leaky_relu.default,
    "neg": _aten.neg.default,
    "relu": _aten.relu.default,
    "sigmoid": _aten.sigmoid.default,
    "silu": _aten.silu.default,
    "softplus": _aten.softplus.default,
    "square": _aten.square.default,
    "tanh": _aten.tanh.default,
}


@lru_cache(maxsize=256)
def read_steps(steps: str) -> tuple[tuple[OpOverload[..., Any], tuple[float, ...]], ...]:
    """Return the operators of a chain, each with its numbers."""
    found = []
    for step in filter(None, steps.split(", ")):
        name, *numbers = step.split(" ")
        found.append((STEPS[name], tuple(map(float, numbers))))
    return tuple(found)


def weights_of(scores: Tensor, steps: str) -> Tensor:
    """Return a function of each score."""
    for function, numbers in read_steps(steps):
        scores = function(scores, *numbers)
    return scores


def _pair_sum(q: Tensor, k: Tensor, v: Tensor, steps: str) -> Tensor:
    """(..., queries, D'): for each query the sum of values, times a function of its scores."""
    weights = weights_of(torch.matmul(q, k.transpose(-2, -1)), steps)
    return torch.matmul(weights, v).contiguous()


pair_sum = define(
    "pair_sum(Tensor q, Tensor k, Tensor v, str steps) -> Tensor",
    _pair_sum,
    lambda q, k, v, steps: q.new_empty(*q.shape[:-1], v.shape[-1]),
)


def _site_pair_sum(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    rest_k: Tensor,
    rest_v: Tensor,
    q_spans: Tensor,
    k_spans: Tensor,
    rest_spans: Tensor,
    steps: str,
) -> Tensor:
    """(rows, heads, D'): the same of each request's rows, over its keys and the cached ones."""
    out = q.new_zeros(q.shape[0], q.shape[1], v.shape[2])
    for own, new, old in zip(q_spans.tolist(), k_spans.tolist(), rest_spans.tolist(), strict=True):
        keys = join([*pieces(k, new), *pieces(rest_k, old)], k).permute(1, 2, 0)
        values = join([*pieces(v, new), *pieces(rest_v, old)], v).transpose(0, 1)
        for start, stop in ranges(own):
            weights = weights_of(torch.matmul(q[start:stop].transpose(0, 1), keys), steps)
            out[start:stop] = torch.matmul(weights, values).transpose(0, 1)
    return out


site_pair_sum = define(
    "site_pair_sum(Tensor q, Tensor k, Tensor v, Tensor rest_k, Tensor rest_v, Tensor q_spans, "
    "Tensor k_spans, Tensor rest_spans, str steps) -> Tensor",
    _site_pair_sum,
    lambda q, k, v, *_, **__: q.new_empty(q.shape[0], q.shape[1], v.shape[2]),
)


@register_flop_formula(torch.ops.maskfx.pair_sum)
def _pair_sum_formula(
    q: Sequence[int], k: Sequence[int], v: Sequence[int], *args: object, **kwargs: object
) -> int:
    heads = 1
    for size in q[:-2]:
        heads *= size
    return attend_flops(q[-2], k[-2], heads, q[-1], v[-1])


# two products for each query and key, as in attention
register_flop_formula(torch.ops.maskfx.site_pair_sum, get_raw=True)(attend_formula)
