"""Products with weights in the layout of the CPU's matrix library.

Such weights are no inputs of compiled code: it names them by their places in a list, which is set
where the code runs.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from maskfx.ops.base import define
from maskfx.ops.fused import ACTIVATIONS
from maskfx.ops.windows import by_blocks

mkldnn = torch.ops.mkldnn


class ReorderedWeight(Protocol):
    """A packed weight."""

    value: Tensor


class _AtPlaces(threading.local):
    weights: Sequence[ReorderedWeight] = ()


_current = _AtPlaces()


@contextmanager
def packed_weights(weights: Sequence[ReorderedWeight]) -> Iterator[None]:
    """Let the products of this thread read these weights, by their places."""
    before, _current.weights = _current.weights, weights
    try:
        yield
    finally:
        _current.weights = before


def packed_product(rows: Tensor, weight: ReorderedWeight, bias: Tensor | None = None) -> Tensor:
    found: Tensor = mkldnn._linear_pointwise(rows, weight.value, bias, "none", [], "")
    return found


def packed_window_product(
    rows: Tensor,
    halo: Tensor,
    table: Tensor,
    weight: ReorderedWeight,
    bias: Tensor | None,
    activation: str,
) -> Tensor:
    multiply = partial(packed_product, weight=weight, bias=bias)
    return ACTIVATIONS[activation](by_blocks(rows, halo, table, multiply))


# `weight` is the weight as the module has it, of which only the shape is read
packed_linear = define(
    "packed_linear(Tensor rows, Tensor weight, Tensor? bias, int place) -> Tensor",
    lambda rows, weight, bias, place: packed_product(rows, _current.weights[place], bias),
    lambda rows, weight, bias, place: rows.new_empty(*rows.shape[:-1], weight.shape[0]),
)

packed_window = define(
    "packed_window(Tensor rows, Tensor halo, Tensor table, Tensor weight, Tensor? bias, "
    "str activation, int place) -> Tensor",
    lambda rows, halo, table, weight, bias, activation, place: packed_window_product(
        rows, halo, table, _current.weights[place], bias, activation
    ),
    lambda rows, halo, table, weight, *_: rows.new_empty(table.shape[0], weight.shape[0]),
)
