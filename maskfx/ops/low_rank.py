"""Low-rank terms: each request's rows times the two matrices of its own adapters."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from maskfx.ops.base import define, numbers

Group = Sequence[int]  # first row, end of rows, first rank, end of ranks
ALIGNED = 16  # bytes at which rows of grouped products' matrices must start


def _add_low_rank(base: Tensor, rows: Tensor, down: Tensor, up: Tensor, groups: Tensor) -> Tensor:
    """Add to each row of `base` its row of `rows`, times `down` and then `up`, at its own ranks.

    Args:
        base: (rows, ..., outputs).
        rows: (rows, ..., inputs).
        down: (ranks, inputs): the ranks of all adapters, one after another.
        up: (ranks, outputs).
        groups: (groups, 4) on the host, in the order of rows: first and end of rows that are next
            to each other, first and end of their ranks. Other rows are unchanged.
    """
    table = groups.tolist()
    each = prod(rows.shape[1:-1])
    flat, known = rows.reshape(-1, rows.shape[-1]), base.reshape(-1, base.shape[-1])
    if each != 1:
        table = [[a * each, b * each, i, j] for a, b, i, j in table]
    out = torch.empty_like(known, memory_format=torch.contiguous_format)
    if runs_grouped(flat, down, up, table):
        add_grouped(out, known, flat, down, up, table)
    else:
        add_in_turn(out, known, flat, down, up, table)
    return out.view(base.shape)


def add_in_turn(
    out: Tensor, base: Tensor, rows: Tensor, down: Tensor, up: Tensor, table: Sequence[Group]
) -> None:
    """Compute group by group; on a CPU also the quickest way, because no rank is padded."""
    done = 0
    for start, stop, low, high in table:
        if done < start:
            out[done:start] = base[done:start]
        narrow = rows[start:stop] @ down[low:high].t()
        torch.addmm(base[start:stop], narrow, up[low:high], out=out[start:stop])
        done = stop
    if done < len(base):
        out[done:] = base[done:]


def runs_grouped(rows: Tensor, down: Tensor, up: Tensor, table: Sequence[Group]) -> bool:
    """Return True if two grouped products compute all groups, and are the quicker way.

    Rows of each matrix must start at 16 bytes; those of the padded ranks do.
    """
    if rows.device.type != "cuda" or len(table) < 2 or rows.dtype != torch.bfloat16:
        return False
    return all(size * rows.element_size() % ALIGNED == 0 for size in (rows.shape[1], up.shape[1]))


def add_grouped(
    out: Tensor, base: Tensor, rows: Tensor, down: Tensor, up: Tensor, table: Sequence[Group]
) -> None:
    """Compute all groups by two grouped products, with ranks padded to the greatest.

    Rows between groups are a group without ranks; its ranks, and missing ones, are zeros.
    """
    bucket = ALIGNED // rows.element_size()
    rank = max(-(-max((high - low for *_, low, high in table), default=0) // bucket), 1) * bucket
    zeros = down.shape[0]  # the index of a line of zeros behind all ranks
    ends, lines, done = list[int](), list[int](), 0
    for start, stop, low, high in (*table, (len(base), len(base), 0, 0)):
        if done < start:
            ends.append(start)
            lines += [zeros] * rank
        if start < stop:
            ends.append(stop)
            lines += [*range(low, high), *[zeros] * (rank - (high - low))]
        done = stop
    which = numbers(lines, torch.long, rows.device).view(-1, rank)
    offsets = numbers(ends, torch.int32, rows.device)
    downs, ups = (torch.cat([m, m.new_zeros(1, m.shape[1])])[which] for m in (down, up))
    product = torch.nn.functional.grouped_mm
    narrow = product(rows.contiguous(), downs.transpose(1, 2), offs=offsets)
    torch.add(base, product(narrow, ups, offs=offsets), out=out)


add_low_rank = define(
    "add_low_rank(Tensor base, Tensor rows, Tensor down, Tensor up, Tensor groups) -> Tensor",
    _add_low_rank,
    lambda base, rows, down, up, groups: base.new_empty(base.shape),
)


@register_flop_formula(torch.ops.maskfx.add_low_rank, get_raw=True)
def _add_low_rank_formula(
    base: Tensor,
    rows: Tensor,
    down: Tensor,
    up: Tensor,
    groups: Tensor,
    *args: object,
    **kwargs: object,
) -> int:
    """Count each group's rows and ranks; all rows and ranks if there is only a shape."""
    each: int = 2 * prod(rows.shape[1:-1]) * (down.shape[1] + up.shape[1])
    if groups.is_meta or type(groups) is not Tensor:
        return each * rows.shape[0] * down.shape[0]
    table: list[Group] = groups.tolist()
    return each * sum((b - a) * (j - i) for a, b, i, j in table)
