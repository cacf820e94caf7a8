"""What every operator stands on: how it's registered, and a request's rows among a batch's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

_library = torch.library.Library("maskfx", "DEF")


def define(schema: str, plain: Callable[..., Any], fake: Callable[..., Any]) -> Any:
    """Register an operator; the call that graphs hold."""
    name = schema.split("(")[0]
    _library.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    _library.impl(name, plain, "CompositeExplicitAutograd")
    torch.library.register_fake(f"maskfx::{name}", fake, lib=_library)
    return getattr(torch.ops.maskfx, name).default


def pieces(rows: Tensor, span: Sequence[int]) -> list[Tensor]:
    """One request's rows, segments that lie side by side as one piece."""
    ranges: list[list[int]] = []
    for start, stop in zip(span[::2], span[1::2], strict=True):
        if start == stop:
            continue
        if ranges and ranges[-1][1] == start:
            ranges[-1][1] = stop
        else:
            ranges.append([start, stop])
    return [rows[a:b] for a, b in ranges]


def join(pieces: list[Tensor], like: Tensor) -> Tensor:
    if not pieces:
        return like[:0]
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces)


def count(span: Sequence[int]) -> int:
    """How many rows a request has."""
    return sum(span[1::2]) - sum(span[::2])


def wide(dtype: torch.dtype) -> torch.dtype:
    """What sums over many sites are kept in."""
    return dtype if dtype == torch.float64 else torch.float32
