"""Cached keys and values that a batch reads as they are stored, in 8 or 4 bits.

Kernels widen them while they load them. Other readers get rows in full precision, from the frame.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from maskfx.compiler.fuse import SCALES, STEPS
from maskfx.ir.programs.sources import Rest
from maskfx.runtime.backends.graph_function import Fetch
from maskfx.runtime.batch.frame import Frame
from maskfx.runtime.batch.member import Member
from maskfx.runtime.cache.quantize import STEPS as FORMATS
from maskfx.runtime.cache.quantize import Packed, select
from maskfx.runtime.cache.rows import Rows, RowSubset
from maskfx.runtime.hardware.devices import read_here


def packed_inputs(frame: Frame, members: Sequence[Member]) -> frozenset[str]:
    """Return the inputs whose rows are packed alike for all members, on the batch's device."""
    if not any(is_packed(rows) for m in members if m.cache for rows in m.cache.rows.values()):
        return frozenset()
    return frozenset(
        name
        for name, source in frame.interface.inputs.items()
        if isinstance(source, Rest) and alike(frame, name, members)
    )


def alike(frame: Frame, name: str, members: Sequence[Member]) -> bool:
    rows = [held(rows) for rows, _ in frame.stored(name, members)]
    kinds = {
        (one.format, one.dtype, one.scale.shape[2], one.stored.device)
        for one in rows
        if isinstance(one, Packed) and one.scale is not None
    }
    every = all(isinstance(one, Packed) and one.format in FORMATS for one in rows)
    return every and len(kinds) == 1 and all(kind[3] == frame.device for kind in kinds)


def held(rows: Rows) -> Rows:
    return rows.rows if isinstance(rows, RowSubset) else rows


def is_packed(rows: Rows) -> bool:
    return isinstance(held(rows), Packed)


def with_packed(
    frame: Frame, members: Sequence[Member], packed: frozenset[str], fetch: Fetch
) -> Fetch:
    """Return a function that gives steps and scales of packed inputs too, by their names."""
    if not packed:
        return fetch

    def both(name: str) -> Tensor:
        for part in (STEPS, SCALES):
            if name.endswith(part) and name.removesuffix(part) in packed:
                return stored_part(frame, name.removesuffix(part), members, part == SCALES)
        return fetch(name)

    return both


def stored_part(frame: Frame, name: str, members: Sequence[Member], scales: bool) -> Tensor:
    """Return the steps of a packed input, (rows, features), or their scales, (rows, parts)."""
    found = []
    for rows, index in frame.stored(name, members):
        places = frame.tables.places(rows, index) if isinstance(rows, RowSubset) else index
        own = held(rows)
        assert isinstance(own, Packed), "packed_inputs() names inputs whose rows are packed"
        part = own.scale if scales else own.stored
        assert part is not None, "packed_inputs() names inputs with scales"
        chosen = select(read_here(part), frame.tables.on(places, part.device))
        found.append(chosen.flatten(0, 1))
    return found[0] if len(found) == 1 else torch.cat(found)
