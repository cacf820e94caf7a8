"""Group norm with a backward pass that is quick on CPUs.

PyTorch's own takes two fifths of a training step there (bfloat16, channels last).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


class QuickGroupNorm(torch.autograd.Function):
    """The values of `torch.group_norm`. Its gradients: sums per channel, one line per value."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, groups: int, eps: float
    ) -> Tensor:
        batch, channels = x.shape[:2]
        sites = x[0, 0].numel()
        with torch.autocast(x.device.type, enabled=False):
            y, mean, scale = torch.native_group_norm(
                x, weight.to(x.dtype), bias.to(x.dtype), batch, channels, sites, groups, eps
            )
        ctx.save_for_backward(x, weight, mean.float(), scale.float())
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
        (dy,) = grads
        x, weight, mean, scale = ctx.saved_tensors
        batch, channels = x.shape[:2]
        groups, members = mean.shape[1], channels // mean.shape[1]
        axes = tuple(range(2, x.ndim))
        dy = dy.to(x.dtype)
        total = dy.sum(axes).float()  # per sample and channel
        along = (dy * x).sum(axes).float()

        def per_channel(value: Tensor) -> Tensor:
            return value.repeat_interleave(members, 1)

        def per_group(value: Tensor) -> Tensor:
            return (value * weight).view(batch, groups, members).sum(2)

        middle, width = per_channel(mean), per_channel(scale)
        d_weight = ((along - total * middle) * width).sum(0)
        count = members * (x[0, 0].numel())
        pull = (per_group(total) * mean - per_group(along)) * scale**3 / count
        shift = -pull * mean - per_group(total) * scale / count

        def spread(value: Tensor) -> Tensor:
            return value.to(x.dtype).view(batch, channels, *(1 for _ in axes))

        dx = torch.addcmul(spread(per_channel(shift)), x, spread(per_channel(pull)))
        dx = dx.addcmul_(dy, spread(weight * width))
        return dx, d_weight, total.sum(0), None, None


def quicken_norms(module: nn.Module) -> None:
    """Let every group norm of a module use the quick backward pass."""
    for norm in module.modules():
        if isinstance(norm, nn.GroupNorm):
            norm.forward = _forward_of(norm)  # type: ignore[method-assign]


def _forward_of(norm: nn.GroupNorm) -> Any:
    def forward(x: Tensor) -> Any:
        return QuickGroupNorm.apply(x, norm.weight, norm.bias, norm.num_groups, norm.eps)

    return forward
