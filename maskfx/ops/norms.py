"""Group norm in two steps: compute scale and shift, then apply them."""

from __future__ import annotations

from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from maskfx.ops.base import counts_on, define, join, pieces, wide

Values = TypeVar("Values", Tensor, NDArray[np.floating[Any]])


def _group_scale(
    rows: Tensor,
    rest: Tensor,
    spans: Tensor,
    groups: int,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
) -> Tensor:
    """Return scale and shift, (requests, 2, channels); `rest`: the rest's count, mean and M2."""
    requests, channels = rest.shape[0], rows.shape[1]
    kind = wide(rows.dtype)
    found: list[Tensor] = []
    counts = []
    for span in spans.tolist():
        own = join(pieces(rows, span), rows)
        counts.append(own.shape[0])
        found += _moments(own.to(kind))
    moments = _array(torch.stack(found).view(requests, 2, groups, -1).transpose(0, 1))
    number = _array(counts_on(rows.device, kind, *counts))
    scale, shift = _merge_moments(number[:, None], moments, _array(rest.to(kind)), eps)
    out = rows.new_empty(requests, 2, groups, channels // groups, dtype=kind)
    into = _array(out)
    into[:, 0], into[:, 1] = scale[:, :, None], shift[:, :, None]
    if weight is not None:
        into *= _array(weight.detach().to(kind)).reshape(groups, -1)
    if bias is not None:
        into[:, 1] += _array(bias.detach().to(kind)).reshape(groups, -1)
    return out.view(requests, 2, channels)


def _moments(own: Tensor) -> tuple[Tensor, Tensor]:
    """Return mean and variance of each channel; zeros if there are no rows."""
    if not own.shape[0]:
        return own.new_zeros(own.shape[1]), own.new_zeros(own.shape[1])
    if own.device.type == "cpu":  # one pass over the rows
        return torch.batch_norm_update_stats(own, None, None, 0.0)
    variance, mean = torch.var_mean(own, 0, correction=0)
    return mean, variance


def _merge_moments(
    number: Values, fresh: Values, rest: Values, eps: float
) -> tuple[Values, Values]:
    """Return scale and shift, (requests, groups), from the moments of each channel over the fresh
    rows and the (requests, groups, 3) moments of the rest.
    """
    count, mean, spread = rest[..., 0], rest[..., 1], rest[..., 2]
    size = fresh.shape[-1]
    n = number * size
    total = count + n
    total += total == 0
    means, variances = fresh
    middle = means.sum(-1) / size
    around = means - middle[..., None]
    within = (variances + around * around).sum(-1) / size
    share, delta = n / total, middle - mean
    variance = spread / total + share * (within + (1 - share) * delta * delta)
    scale = (variance + eps) ** -0.5
    return scale, -(mean + share * delta) * scale


def _array(value: Tensor) -> Any:
    """Return a NumPy view of a CPU tensor, because NumPy is faster on a few numbers."""
    return value.numpy() if value.device.type == "cpu" else value


group_scale = define(
    "group_scale(Tensor rows, Tensor rest, Tensor spans, int groups, Tensor? weight, "
    "Tensor? bias, float eps) -> Tensor",
    _group_scale,
    lambda rows, rest, *_, **__: rows.new_empty(
        rest.shape[0], 2, rows.shape[1], dtype=wide(rows.dtype)
    ),
)


def _scale_shift(rows: Tensor, scales: Tensor, owner: Tensor) -> Tensor:
    picked = scales if scales.shape[0] == 1 else scales.index_select(0, owner)
    scale, shift = picked.unbind(1)
    return torch.addcmul(shift, rows, scale).to(rows.dtype)


scale_shift = define(
    "scale_shift(Tensor rows, Tensor scales, Tensor owner) -> Tensor",
    _scale_shift,
    lambda rows, scales, owner: torch.empty_like(rows),
)
