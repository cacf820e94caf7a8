"""Tables of an attention over ragged requests, made from spans on the host and kept by content.

Knows nothing of Triton.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from maskfx.ops.base import kept_table, numbers, ranges
from maskfx.ops.kernels.launch import Spans, count_rows, on_device, row_blocks


@dataclass(frozen=True)
class AttendTables:
    """What the kernel reads beside rows.

    Args:
        blocks: (blocks, 4) of queries: first row, end, request, the request's rows before it.
        requests: (requests, 5): first range of keys, end of the fresh ones, end of the cached ones,
            the number of keys, and the number of the request's queries.
        ranges: (ranges, 3) of keys: first row, end, the request's keys before it.
        offsets: (requests,): where the request's attention mask begins.
        most: the number of keys of the request that has the most.
    """

    blocks: Tensor
    requests: Tensor
    ranges: Tensor
    offsets: Tensor
    most: int


@kept_table
def attend_tables(
    q_spans: Spans,
    k_spans: Spans,
    rest_spans: Spans,
    bias_heads: int,
    pairwise: bool,
    size: int,
    device: torch.device,
) -> AttendTables:
    """Return the tables for query blocks of this size."""
    found: list[list[int]] = []
    requests: list[list[int]] = []
    starts: list[int] = []
    at = 0
    queries = count_rows(q_spans)
    for fresh, cached, rows in zip(k_spans, rest_spans, queries, strict=True):
        first, keys = len(found), 0
        ends = []
        for span in (fresh, cached):
            for start, stop in ranges(span):
                found.append([start, stop, keys])
                keys += stop - start
            ends.append(len(found))
        requests.append([first, *ends, keys, rows])
        starts.append(at)
        at += bias_heads * (rows if pairwise else 1) * keys
    return AttendTables(
        row_blocks(q_spans, size, device)[0],
        on_device(requests, 5, device),
        on_device(found, 3, device),
        numbers(starts, torch.long, device),
        max((row[3] for row in requests), default=0),
    )


@dataclass(frozen=True)
class SequenceTables:
    """What attention over sequences of different lengths reads, one sequence for each request.

    Args:
        order: The rows in the order of the sequences, among [fresh | cached]; None if they lie so.
        ends: (requests + 1,): where the sequences begin, and the end of the last one.
        longest: The length of the longest sequence.
    """

    order: Tensor | None
    ends: Tensor
    longest: int


@kept_table
def sequence_tables(
    spans: Spans, rest_spans: Spans | None, rows: int, device: torch.device
) -> SequenceTables:
    """Return the tables for the rows of these spans, and for cached rows behind them.

    Args:
        spans: Of the fresh rows.
        rest_spans: Of the cached rows, or None.
        rows: The number of fresh rows.
        device: The device of the tables.
    """
    order: list[int] = []
    lengths: list[int] = []
    for request, span in enumerate(spans):
        before = len(order)
        for start, stop in ranges(span):
            order += range(start, stop)
        for start, stop in ranges(rest_spans[request]) if rest_spans is not None else ():
            order += range(rows + start, rows + stop)
        lengths.append(len(order) - before)
    plain = order == list(range(rows)) and (rest_spans is None or not any(count_rows(rest_spans)))
    return SequenceTables(
        None if plain else numbers(order, torch.long, device),
        numbers([0, *accumulate(lengths)], torch.int32, device),
        max(lengths, default=0),
    )
