"""The implementations that operators choose on a CPU: C where it serves, else the plain one."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from maskfx.ops.base import implement, plain_of
from maskfx.ops.kernels.serves import switched_on
from maskfx.ops.native.attention import attend, attend_part
from maskfx.ops.native.build import BEYOND, c_functions
from maskfx.ops.native.linear import few_rows_linear

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


def put_all(targets: list[Tensor], indices: list[Tensor], rows: list[Tensor]) -> None:
    lib = serving(rows)
    puts = [placed(*own) for own in zip(targets, indices, rows, strict=True)] if lib else [None]
    if lib is None or None in puts:
        plain_of("put_all")(targets, indices, rows)
    elif lib.put_all(*packed([put for put in puts if put])):
        raise IndexError(f"places of rows point beyond the rows of {len(targets)} buffers")


def replace_all(
    targets: list[Tensor],
    indices: list[Tensor],
    rows: list[Tensor],
    tables: list[Tensor],
    sizes: list[Tensor],
    firsts: list[Tensor],
    sums: list[Tensor],
) -> None:
    lib, each = serving(rows), []
    values = zip(targets, indices, rows, tables, sizes, firsts, sums, strict=True)
    for target, index, new, table, size, first, own in values:
        put = placed(target, index, new)
        single = target.dtype == own.dtype == torch.float32 and own.is_contiguous()
        if (
            lib is None
            or put is None
            or not single
            or not all(map(are_whole, (table, size, first)))
        ):
            plain_of("replace_all")(targets, indices, rows, tables, sizes, firsts, sums)
            return
        requests = size.size(0)
        assert first.size(0) == requests, "the first patch of each request"
        assert table.size(0) == target.size(0), "the patch of each place"
        about = table.data_ptr(), size.data_ptr(), first.data_ptr(), requests
        each.append((*put, *about, own.data_ptr(), own.size(0)))
    if lib is not None and lib.replace_all(*packed(each)):
        raise IndexError(
            f"places or patches of rows point beyond the rows of {len(targets)} buffers or the "
            f"{len(sums[0])} patches, or requests have other numbers of rows"
        )


def serving(rows: list[Tensor]) -> ctypes.CDLL | None:
    """Return the C functions if they serve as many rows."""
    many = torch.get_num_threads() > 1 and sum(own.numel() for own in rows) > MOST
    return c_functions() if switched_on() and not many else None


def placed(target: Tensor, index: Tensor, rows: Tensor) -> tuple[int, ...] | None:
    """Return rows that C can write to places of a buffer; None if it can't.

    Buffer, places, bytes of a row, which rows, the rows and their number.
    """
    places, count = target.size(0), index.size(0)  # in a third of the time of len()
    width = target.nbytes // places if places else 0
    there = width and rows.dtype == target.dtype and rows.nbytes == width * count
    if not (there and are_whole(index) and rows.is_contiguous() and target.is_contiguous()):
        return None
    return target.data_ptr(), places, width, index.data_ptr(), rows.data_ptr(), count


def are_whole(values: Tensor) -> bool:
    return values.dtype == torch.int64 and values.is_contiguous()


def packed(structures: Sequence[tuple[int, ...]]) -> tuple[object, int]:
    """Return structures of 64-bit numbers as C reads them, and how many there are."""
    numbers = [number for structure in structures for number in structure]
    return (ctypes.c_int64 * len(numbers))(*numbers), len(structures)


IMPLEMENTATIONS: dict[str, Callable[..., object]] = {
    function.__name__: function
    for function in (
        *(group_scale, scale_shift, put_all, replace_all),
        *(attend, attend_part, few_rows_linear),
    )
}


def register() -> None:
    """Let the operators choose these implementations for tensors on a CPU."""
    for name, function in IMPLEMENTATIONS.items():
        implement(name, function, "CPU")
