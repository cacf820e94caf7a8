"""Products of windows, on a CPU some windows at a time.

A convolution gathers the rows of each window and multiplies them by one matrix. The gathered rows
take as many times the memory of the rows as a window has places. Where they don't fit into the
processor's cache, gathering takes longer than the product. So both run for a block of windows at a
time, over the same buffer. The result is the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from maskfx.ops.gather import gather

BYTES = 2 << 20  # of a block's gathered rows, per thread


def by_blocks(
    rows: Tensor, halo: Tensor, table: Tensor, multiply: Callable[[Tensor], Tensor]
) -> Tensor:
    """Return what `multiply` gives for the gathered rows of each window: (windows, outputs)."""
    size = block_size(rows, table)
    if size >= len(table):
        return multiply(gather(rows, halo, table))
    out = None
    for part, windows in blocks(rows, halo, table, size):
        found = multiply(windows)
        if out is None:
            out = found.new_empty(len(table), found.shape[1])
        out[part] = found
    assert out is not None, "more windows than a block has"
    return out


def block_size(rows: Tensor, table: Tensor) -> int:
    """Return how many windows are gathered at a time; on other devices, all."""
    if rows.device.type != "cpu":
        return len(table)
    each = table.shape[1] * rows.shape[1] * rows.element_size()
    return max(1, BYTES * torch.get_num_threads() // max(each, 1))


def blocks(rows: Tensor, halo: Tensor, table: Tensor, size: int) -> Iterator[tuple[slice, Tensor]]:
    """Yield the places of each block of windows and its rows, which the next block overwrites."""
    source = torch.cat([rows, halo, rows.new_zeros(1, rows.shape[1])])
    flat, places = table.reshape(-1), table.shape[1]
    buffer = rows.new_empty(size * places, rows.shape[1])
    for start in range(0, len(table), size):
        stop = min(start + size, len(table))
        taken = buffer[: (stop - start) * places]
        torch.index_select(source, 0, flat[start * places : stop * places], out=taken)
        yield slice(start, stop), taken.view(stop - start, -1)
