"""Shared by all operators: registration, and slicing one request's rows from a batch."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache, wraps
from typing import Any, TypeVar

import torch
from torch import Tensor

Table = TypeVar("Table")
TABLES = 512  # kept of each kind: those of a few batches' row sets

_library = torch.library.Library("maskfx", "DEF")
_plain: dict[str, Callable[..., object]] = {}


def define(schema: str, plain: Callable[..., object], fake: Callable[..., object]) -> Any:
    """Register an operator and return the overload that graphs call."""
    name = schema.split("(")[0]
    _plain[name] = plain
    _library.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    _library.impl(name, plain, "CompositeExplicitAutograd")
    torch.library.register_fake(f"maskfx::{name}", fake, lib=_library)
    return getattr(torch.ops.maskfx, name).default


def plain_of(name: str) -> Callable[..., Any]:
    """Return the plain implementation of an operator, which runs on every device."""
    return _plain[name]


def implement(name: str, function: Callable[..., object], key: str = "CUDA") -> None:
    """Register another implementation of an operator, for tensors with this dispatch key."""
    _library.impl(name, function, key)


Ranges = list[tuple[int, int]]


def ranges(span: Sequence[int]) -> Ranges:
    """Return the row ranges of one request, adjacent segments merged into one range."""
    out: Ranges = []
    for start, stop in zip(span[::2], span[1::2], strict=True):
        if start == stop:
            continue
        if out and out[-1][1] == start:
            out[-1] = out[-1][0], stop
        else:
            out.append((start, stop))
    return out


def pieces(rows: Tensor, span: Sequence[int]) -> list[Tensor]:
    """Return one request's rows, one slice for each range."""
    if len(span) == 2 and span[0] < span[1]:
        return [rows[span[0] : span[1]]]
    return [rows[a:b] for a, b in ranges(span)]


def join(pieces: list[Tensor], like: Tensor) -> Tensor:
    if not pieces:
        return like[:0]
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces)


_holder = threading.local()


@contextmanager
def holding() -> Iterator[list[object]]:
    """Collect the tables that this thread reads inside; a captured graph needs their memory."""
    before, _holder.tables = getattr(_holder, "tables", None), []
    try:
        yield _holder.tables
    finally:
        _holder.tables = before


def kept_table(make: Callable[..., Table]) -> Callable[..., Table]:
    """Keep the tables that a function makes, by its arguments."""
    kept = lru_cache(maxsize=TABLES)(make)

    @wraps(make)
    def found(*args: Hashable) -> Table:
        table = kept(*args)
        held = getattr(_holder, "tables", None)
        if held is not None:
            held.append(table)
        return table

    return found


def numbers(
    values: Sequence[float | Sequence[float]], dtype: torch.dtype, device: torch.device
) -> Tensor:
    """Copy a few Python numbers to a device without making the host wait."""
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise RuntimeError("a captured copy would read host memory that is used again")
    table = torch.tensor(values, dtype=dtype, pin_memory=device.type == "cuda")
    return table.to(device, non_blocking=True)


@kept_table
def counts_on(device: torch.device, dtype: torch.dtype, *counts: int) -> Tensor:
    """Return the row counts of the requests as a tensor, the same in every layer and step."""
    return numbers(counts, dtype, device)


def wide(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which sums over many sites are accumulated."""
    return dtype if dtype == torch.float64 else torch.float32
