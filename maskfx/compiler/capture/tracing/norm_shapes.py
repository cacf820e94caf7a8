"""Norms during an export: the shapes of results follow from the input's, without the formula.

To find these shapes torch computes a group norm by twenty operators on symbolic sizes, which takes
a sixth of the export of a UNet. It also notes conditions on sizes that no result depends on.

This file depends on private names of torch. Where one is absent, the export takes its usual time.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch._prims_common import is_contiguous_for_memory_format_or_false
from torch._subclasses import fake_impls
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.types import IntLikeType

aten = torch.ops.aten
TABLE, FILL = "FAST_OP_IMPLEMENTATIONS", "get_fast_op_impls"


@contextlib.contextmanager
def norm_shapes() -> Iterator[None]:
    """Compute only the shapes of group norms and layer norms."""
    if not hasattr(fake_impls, TABLE) or not hasattr(fake_impls, FILL):
        yield
        return
    table = getattr(fake_impls, FILL)()
    own: dict[OpOverload, Callable[..., object]] = {
        aten.native_group_norm.default: group_norm,
        aten.native_layer_norm.default: layer_norm,
    }
    before = dict(table)
    table.update(own)
    try:
        yield
    finally:
        table.clear()
        table.update(before)


def group_norm(
    mode: FakeTensorMode,
    value: FakeTensor,
    weight: Tensor | None,
    bias: Tensor | None,
    batch: IntLikeType,
    channels: IntLikeType,
    sites: IntLikeType,
    groups: int,
    eps: float,
) -> object:
    """Return a group norm's results, whose numbers aren't known."""
    if not is_plain(value, weight, bias):
        with mode:
            given: Any = value, weight, bias, batch, channels, sites, groups, eps
            return torch._refs.native_group_norm(*given)
    numbers = [made(mode, value, (batch, groups)) for _ in ("mean", "spread")]
    return made(mode, value, value.shape), *numbers


def layer_norm(
    mode: FakeTensorMode,
    value: FakeTensor,
    shape: Sequence[IntLikeType],
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
) -> object:
    """Return a layer norm's results, whose numbers aren't known."""
    own = value.shape[value.dim() - len(shape) :]
    known = all(type(n) is type(m) is int and n == m for n, m in zip(own, shape, strict=True))
    if not known or not is_plain(value, weight, bias):
        with mode:
            return torch._refs.native_layer_norm(value, shape, weight, bias, eps)  # type: ignore[arg-type]
    lead = *value.shape[: value.dim() - len(shape)], *[1] * len(shape)
    numbers = [made(mode, value, lead) for _ in ("mean", "spread")]
    return made(mode, value, value.shape), *numbers


def is_plain(value: FakeTensor, *weights: Tensor | None) -> bool:
    """Return True for a contiguous value of a CPU with weights of its type, as of most norms."""
    alike = all(w is None or w.dtype == value.dtype for w in weights)
    dense = is_contiguous_for_memory_format_or_false(value, memory_format=torch.contiguous_format)
    return alike and dense and value.device.type == "cpu"


def made(mode: FakeTensorMode, like: FakeTensor, shape: Sequence[Any]) -> FakeTensor:
    empty = torch.empty(shape, dtype=like.dtype, device="meta")
    return FakeTensor(mode, empty, device=like.device)
