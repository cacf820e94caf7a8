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


def group_moments(own: Tensor, groups: int) -> Tensor:
    """Return (groups, 3): count, mean and M2 of rows, from the moments of each channel."""
    means, variances = (_array(found.view(groups, -1)) for found in _moments(own))
    size, number = means.shape[1], own.shape[0] * means.shape[1]
    middle = means.sum(1) / size
    around = means - middle[:, None]
    out = own.new_empty(groups, 3)
    into = _array(out)
    into[:, 0], into[:, 1] = number, middle
    into[:, 2] = (variances + around * around).sum(1) * own.shape[0]
    return out


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


def _site_moments(rows: Tensor, groups: int) -> Tensor:
    """Return mean and variance of each group of a row's channels, (rows, groups, 2)."""
    variance, mean = torch.var_mean(
        rows.to(wide(rows.dtype)).unflatten(1, (groups, -1)), 2, correction=0
    )
    return torch.stack([mean, variance], 2)


site_moments = define(
    "site_moments(Tensor rows, int groups) -> Tensor",
    _site_moments,
    lambda rows, groups: rows.new_empty(rows.shape[0], groups, 2, dtype=wide(rows.dtype)),
)


def _line_scale(
    moments: Tensor,
    rest: Tensor,
    owner: Tensor,
    rest_owner: Tensor,
    lines: int,
    channels: int,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
) -> Tensor:
    """Return scale and shift of a norm over the sites of each line, (lines, 2, channels).

    Args:
        moments: those of each row's groups, as `site_moments` returns them.
        rest: those of the cached rows.
        owner, rest_owner: the line of each row and of each cached row.
        lines: the number of lines.
        channels: the number of channels.
        weight, bias, eps: as for a group norm.
    """
    every = torch.cat([moments, rest.to(moments.dtype)])
    line = torch.cat([owner, rest_owner])
    mean, variance = every.unbind(2)
    none = mean.new_zeros(lines, mean.shape[1])
    count = none[:, :1].index_add(0, line, torch.ones_like(mean[:, :1])).clamp_min(1)
    middle = none.index_add(0, line, mean) / count
    around = mean - middle.index_select(0, line)
    spread = none.index_add(0, line, variance + around * around) / count
    scale = torch.rsqrt(spread + eps)
    halves = torch.stack([scale, -middle * scale], 1)[..., None]
    out = halves.expand(-1, -1, -1, channels // mean.shape[1]).flatten(2)
    if weight is not None:
        out = out * weight.detach().to(out.dtype)
    if bias is not None:
        scale, shift = out.unbind(1)
        out = torch.stack([scale, shift + bias.detach().to(out.dtype)], 1)
    return out.contiguous()


line_scale = define(
    "line_scale(Tensor moments, Tensor rest, Tensor owner, Tensor rest_owner, SymInt lines, "
    "int channels, Tensor? weight, Tensor? bias, float eps) -> Tensor",
    _line_scale,
    lambda moments, rest, owner, rest_owner, lines, channels, *_, **__: moments.new_empty(
        lines, 2, channels
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
