"""Runs a module of the denoiser that stays whole: it computes each token by itself.

A capture holds such a module as one node, because its code can't be traced: a mixture of experts
that counts the tokens of each expert, for example. Its weights stay where they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils.flop_counter import register_flop_formula

from maskfx.ops.base import define


class Whole(nn.Module):
    """A module with the form of the calls that it gets.

    Args:
        inner: the module.
        spec: the structure of its arguments.
        constants: its flattened arguments that are no tensors, by position.
        axes: the number of axes that its tensors have.
        widths: the size of the last axis of each tensor.
        width: the size of the last axis of its result.
        flops: the FLOPs of one token.
    """

    def __init__(
        self,
        inner: nn.Module,
        spec: pytree.TreeSpec,
        constants: dict[int, object],
        axes: int,
        widths: Sequence[int],
        width: int,
        flops: int,
    ) -> None:
        super().__init__()
        self.inner = inner
        self.spec, self.constants, self.axes = spec, constants, axes
        self.widths, self.width, self.flops = list(widths), width, flops

    def around(self, inner: nn.Module) -> Whole:
        """Return the same form around another module with the same weights."""
        if inner is self.inner:
            return self
        return Whole(
            inner, self.spec, self.constants, self.axes, self.widths, self.width, self.flops
        )

    def forward(self, *values: Tensor) -> Tensor:
        """Return the module's result; only the last axis of a value has a meaning to it."""
        shape = (*values[0].shape[:-1], self.width)
        if values[0].is_meta:
            return torch.ops.maskfx.uncomputed(list(values), self.width, self.flops)  # type: ignore[no-any-return]
        if not values[0].numel():
            return values[0].new_zeros(shape)
        ones = [1] * (self.axes - 2)
        tokens = iter(
            value.reshape(*ones, -1, width)
            for value, width in zip(values, self.widths, strict=True)
        )
        flat = [
            self.constants[i] if i in self.constants else next(tokens)
            for i in range(self.spec.num_leaves)
        ]
        args, named = pytree.tree_unflatten(flat, self.spec)
        result: Tensor = self.inner(*args, **named)
        return result.reshape(shape)


def run_whole(whole: Whole, values: Sequence[Tensor]) -> Tensor:
    """Run a module that stays whole."""
    return whole(*values)  # type: ignore[no-any-return]


def _no_module(values: Sequence[Tensor], number: int, width: int) -> Tensor:
    raise AssertionError("whole is a mark of the capture, it can't run")


def _result(values: Sequence[Tensor], number: int, width: int) -> Tensor:
    return values[0].new_empty(*values[0].shape[:-1], width)


whole = define("whole(Tensor[] values, int number, int width) -> Tensor", _no_module, _result)


def _uncomputed(values: Sequence[Tensor], width: int, flops: int) -> Tensor:
    """Return an empty result: on the meta device there is nothing to route."""
    return values[0].new_empty(*values[0].shape[:-1], width)


uncomputed = define(
    "uncomputed(Tensor[] values, int width, int flops) -> Tensor", _uncomputed, _uncomputed
)


@register_flop_formula(torch.ops.maskfx.uncomputed)
def _uncomputed_formula(
    values: Sequence[Sequence[int]], width: int, flops: int, **kwargs: object
) -> int:
    return prod(values[0][:-1]) * flops
