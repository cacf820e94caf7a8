"""Pools of rows whose free parts show when they are read."""

from __future__ import annotations

import torch

from maskfx.runtime.cache.rolling.read_inputs import ReadInputs
from maskfx.runtime.cache.rolling.rolling_cache import group_of
from maskfx.runtime.cache.rolling.rolling_pool import RollingPool


def poison(pool: RollingPool) -> int:
    """Fill the rows that no request holds with NaN; return their number."""
    pool.nbytes()  # gives back what ended
    count = 0
    for block in pool._all():
        buffers = [
            (block.group_of(block.interface.taps[tap].segments), rows)
            for tap, rows in block.rows.items()
        ]
        buffers += [(group_of(block.interface, key[0]), rows) for key, rows in block.values.items()]
        if isinstance(block.inputs, ReadInputs):
            buffers += [
                (block.group_of(block.interface.taps[tap].segments), rows)
                for tap, rows in block.inputs.rows.items()
            ]
        for group, rows in buffers:
            for start, stop in block.free[group].ranges:
                rows[start:stop] = torch.nan
                count += stop - start
    return count
