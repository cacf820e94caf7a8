"""The implementations that operators choose on a CPU: C where it serves, else the plain one."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from maskfx.ops.base import implement, plain_of
from maskfx.ops.kernels.serves import switched_on
from maskfx.ops.native.build import c_functions

BEYOND = -2  # the result of a C function that was given rows that aren't there
MOST = 1 << 18  # numbers; larger ones are shared by PyTorch's threads, if there are several


def chosen(rows: Tensor, *others: Tensor | None) -> ctypes.CDLL | None:
    """Return the C functions if they serve these values, all of which have to be contiguous."""
    if rows.numel() > MOST and torch.get_num_threads() > 1:
        return None
    for value in (rows, *others):
        if value is not None and not value.is_contiguous():
            return None
    return c_functions() if switched_on() else None


def group_scale(
    rows: Tensor,
    rest: Tensor,
    spans: Tensor,
    groups: int,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
) -> Tensor:
    lib = chosen(rows, rest, spans, weight, bias)
    values = [value for value in (rows, rest, weight, bias) if value is not None]
    known = all(value.dtype == torch.float32 for value in values) and spans.dtype == torch.int64
    if lib is None or not known:
        found: Tensor = plain_of("group_scale")(rows, rest, spans, groups, weight, bias, eps)
        return found
    requests, (count, channels) = rest.shape[0], rows.shape
    assert rest.shape == (requests, groups, 3), "three numbers for each request and group"
    assert spans.shape[0] == requests, "spans for each request"
    out = rows.new_empty(requests, 2, channels)
    failed = lib.group_scale(
        *(rows.data_ptr(), count, channels, rest.data_ptr(), spans.data_ptr()),
        *(requests, spans.shape[1] // 2, groups),
        *(0 if value is None else value.data_ptr() for value in (weight, bias)),
        *(eps, out.data_ptr()),
    )
    if failed == BEYOND:
        raise IndexError(f"spans of requests, {spans.tolist()}, point beyond the {count} rows")
    if failed:
        raise MemoryError(f"group_scale: no memory for {channels} channels")
    return out


def scale_shift(rows: Tensor, scales: Tensor, owner: Tensor) -> Tensor:
    lib = chosen(rows, scales, owner)
    kinds = rows.dtype == scales.dtype == torch.float32 and owner.dtype == torch.int64
    alike = rows.dim() == 2 and scales.shape[1:] == (2, rows.shape[1])
    if lib is None or not kinds or not alike or len(owner) != len(rows):
        found: Tensor = plain_of("scale_shift")(rows, scales, owner)
        return found
    out = torch.empty_like(rows)
    owners = scales.data_ptr(), scales.shape[0], owner.data_ptr()
    if lib.scale_shift(rows.data_ptr(), *rows.shape, *owners, out.data_ptr()):
        raise IndexError(f"an owner of rows points beyond the {scales.shape[0]} scales")
    return out


def put_rows(target: Tensor, index: Tensor, rows: Tensor) -> None:
    lib, (count, *shape), (places, *wanted) = chosen(rows, target, index), rows.shape, target.shape
    alike = rows.dtype == target.dtype and shape == wanted and index.shape == (count,)
    if lib is None or not alike or index.dtype != torch.int64 or not count:
        plain_of("put_rows")(target, index, rows)
        return
    nbytes = rows.nbytes // count
    there = target.data_ptr(), places, nbytes, index.data_ptr()
    if lib.put_rows(*there, rows.data_ptr(), count):
        raise IndexError(f"places of rows point beyond the {places} rows of the buffer")


def replace_rows(
    target: Tensor,
    index: Tensor,
    rows: Tensor,
    table: Tensor,
    sizes: Tensor,
    firsts: Tensor,
    sums: Tensor,
) -> None:
    lib = chosen(rows, target, index, table, sizes, firsts, sums)
    (count, *shape), (places, *wanted) = rows.shape, target.shape
    kinds = rows.dtype == target.dtype == sums.dtype == torch.float32
    whole = index.dtype == table.dtype == sizes.dtype == firsts.dtype == torch.int64
    alike = shape == wanted and index.shape == (count,) and table.shape == (places,)
    requests = sizes.shape[0]
    if lib is None or not (kinds and whole and alike) or not rows.numel():
        plain_of("replace_rows")(target, index, rows, table, sizes, firsts, sums)
        return
    assert firsts.shape[0] == requests, "the first patch of each request"
    failed = lib.replace_rows(
        *(target.data_ptr(), places, rows.numel() // count, index.data_ptr(), rows.data_ptr()),
        *(count, table.data_ptr(), sizes.data_ptr(), firsts.data_ptr(), requests),
        *(sums.data_ptr(), sums.shape[0]),
    )
    if failed:
        raise IndexError(
            f"places or patches of {count} rows of requests of {sizes.tolist()} point beyond the "
            f"{places} rows of the buffer or the {sums.shape[0]} patches"
        )


IMPLEMENTATIONS: dict[str, Callable[..., Any]] = {
    function.__name__: function for function in (group_scale, scale_shift, put_rows, replace_rows)
}


def register() -> None:
    """Let the operators choose these implementations for tensors on a CPU."""
    for name, function in IMPLEMENTATIONS.items():
        implement(name, function, "CPU")
