"""Exchanges between the ranks of a step: what an operator that mixes sites reads of other ranks.

A rank computes a part of the batch's rows. `counts` and `peers` are on the host; the other tables
are on the batch's device. Each operator has a number, equal on all ranks, that tags its messages.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

import torch
from torch import Tensor

from maskfx.ops.attention import attend_with_weights
from maskfx.ops.base import define, join, pieces, wide
from maskfx.ops.norms import group_moments


class Group(Protocol):
    """The ranks of a step, as seen by one of them."""

    rank: int

    def exchange(
        self, outgoing: dict[int, Tensor], incoming: dict[int, Tensor], number: int
    ) -> None:
        """Send a tensor to each rank of `outgoing`, and fill those of `incoming`."""
        ...


class _Current(threading.local):
    group: Group | None = None


_current = _Current()


@contextmanager
def within(group: Group) -> Iterator[None]:
    """Let the exchanges of this thread take place among the ranks of a group."""
    before, _current.group = _current.group, group
    try:
        yield
    finally:
        _current.group = before


def group_of_step() -> Group:
    assert _current.group is not None, "a graph with exchanges runs inside within(group)"
    return _current.group


def exchanged(
    values: Sequence[Tensor], send: Tensor, counts: Tensor, order: Tensor, number: int
) -> list[Tensor]:
    """Return the rows at the places of `order` in [own rows | received rows] of each value.

    The results are copies, also where nothing is exchanged, as compiled code expects it.

    Args:
        values: Values with the same rows; their features travel in one message.
        send: This rank's rows that others read, one rank after another.
        counts: (2, ranks): the number of rows for each rank, and of each.
        order: For each row of the result, its place in [own rows | received rows].
        number: The exchange's number.
    """
    sent, received = counts.tolist()
    if not any(sent) and not any(received):
        return [value.index_select(0, order) for value in values]
    widths = [value[:1].numel() if len(value) else _width(value) for value in values]
    flat = [value.reshape(len(value), width) for value, width in zip(values, widths, strict=True)]
    joined = flat[0] if len(flat) == 1 else torch.cat(flat, 1)
    parts = joined.index_select(0, send).split(sent)
    incoming = [joined.new_empty(count, joined.shape[1]) for count in received]
    group_of_step().exchange(
        {rank: part for rank, part in enumerate(parts) if len(part)},
        {rank: part for rank, part in enumerate(incoming) if len(part)},
        number,
    )
    found = torch.cat([joined, *incoming]).index_select(0, order)
    return [
        part.reshape(len(order), *value.shape[1:]).contiguous()
        for part, value in zip(found.split(widths, 1), values, strict=True)
    ]


def _width(value: Tensor) -> int:
    total = 1
    for size in value.shape[1:]:
        total *= size
    return total


exchange = define(
    "exchange(Tensor[] values, Tensor send, Tensor counts, Tensor order, int number) -> Tensor[]",
    exchanged,
    lambda values, send, counts, order, number: [
        value.new_empty(order.shape[0], *value.shape[1:]) for value in values
    ],
)


def _from_peers(own: Tensor, peers: Tensor, number: int) -> list[Tensor]:
    """Return a tensor of the same shape of each rank that shares a request with this one."""
    ranks = peers.tolist()
    incoming = {rank: torch.empty_like(own) for rank in ranks}
    if ranks:
        group_of_step().exchange({rank: own for rank in ranks}, incoming, number)
    return [incoming[rank] for rank in ranks]


def _peer_moments(
    rows: Tensor, rest: Tensor, spans: Tensor, peers: Tensor, groups: int, number: int
) -> Tensor:
    """Return count, mean and M2 of the rest, merged with those of the other ranks' rows."""
    return merged_moments(rest, _from_peers(own_moments(rows, rest, spans, groups), peers, number))


def own_moments(rows: Tensor, rest: Tensor, spans: Tensor, groups: int) -> Tensor:
    """Return (requests, groups, 3): count, mean and M2 of the rows of this rank."""
    kind = wide(rows.dtype)
    own = torch.zeros(rest.shape[0], groups, 3, dtype=kind, device=rows.device)
    for i, span in enumerate(spans.tolist()):
        found = join(pieces(rows, span), rows)
        if len(found):
            own[i] = group_moments(found.flatten(1).to(kind), groups)
    return own


def merged_moments(rest: Tensor, others: Sequence[Tensor]) -> Tensor:
    merged = rest.to(wide(rest.dtype))
    for other in others:
        merged = merge_moments(merged, other)
    return merged.to(rest.dtype, copy=True).contiguous()


def merge_moments(one: Tensor, other: Tensor) -> Tensor:
    """Return count, mean and M2 of two sets of numbers from those of each."""
    count = one[..., 0] + other[..., 0]
    share = other[..., 0] / count.clamp(min=1)
    delta = other[..., 1] - one[..., 1]
    spread = one[..., 2] + other[..., 2] + delta * delta * one[..., 0] * share
    return torch.stack([count, one[..., 1] + delta * share, spread], -1)


peer_moments = define(
    "peer_moments(Tensor rows, Tensor rest, Tensor spans, Tensor peers, int groups, int number) "
    "-> Tensor",
    _peer_moments,
    lambda rows, rest, *_, **__: torch.empty_like(rest),
)


def _exchange_normed(
    rows: Tensor,
    rest: Tensor,
    spans: Tensor,
    peers: Tensor,
    groups: int,
    send: Tensor,
    counts: Tensor,
    order: Tensor,
    number: int,
) -> tuple[Tensor, Tensor]:
    """Exchange rows as `exchange` does and moments as `peer_moments` does, in one message.

    A rank from which rows are read is among the peers.
    """
    sent, received = counts.tolist()
    ranks = peers.tolist()
    flat = rows.flatten(1)
    incoming = [flat.new_empty(count, flat.shape[1]) for count in received]
    others: list[Tensor] = []
    if ranks:
        own = own_moments(rows, rest, spans, groups)
        parts = flat.index_select(0, send).split(sent)
        outgoing = {rank: _packed(own, parts[rank]) for rank in ranks}
        arrived = {
            rank: own.new_empty(own.nbytes + incoming[rank].nbytes, dtype=torch.uint8)
            for rank in ranks
        }
        group_of_step().exchange(outgoing, arrived, number)
        for rank in ranks:
            moments, found = arrived[rank].tensor_split([own.nbytes])
            others.append(moments.view(own.dtype).view(own.shape))
            incoming[rank] = found.view(flat.dtype).view(incoming[rank].shape)
    found = (torch.cat([flat, *incoming]) if any(received) else flat).index_select(0, order)
    return found.reshape(len(order), *rows.shape[1:]), merged_moments(rest, others)


def _packed(moments: Tensor, rows: Tensor) -> Tensor:
    """Return the bytes of both."""
    return torch.cat([part.reshape(-1).view(torch.uint8) for part in (moments, rows)])


exchange_normed = define(
    "exchange_normed(Tensor rows, Tensor rest, Tensor spans, Tensor peers, int groups, "
    "Tensor send, Tensor counts, Tensor order, int number) -> (Tensor, Tensor)",
    _exchange_normed,
    lambda rows, rest, spans, peers, groups, send, counts, order, number: (
        rows.new_empty(order.shape[0], *rows.shape[1:]),
        torch.empty_like(rest),
    ),
)


def _peer_sums(rows: Tensor, rest: Tensor, spans: Tensor, peers: Tensor, number: int) -> Tensor:
    """Return the sums and the count of the rest, together with those of the other ranks' rows."""
    own = torch.zeros_like(rest)
    for i, span in enumerate(spans.tolist()):
        found = join(pieces(rows, span), rows)
        own[i, :-1], own[i, -1] = found.sum(0, dtype=rest.dtype), len(found)
    return torch.stack([rest, *_from_peers(own, peers, number)]).sum(0)


peer_sums = define(
    "peer_sums(Tensor rows, Tensor rest, Tensor spans, Tensor peers, int number) -> Tensor",
    _peer_sums,
    lambda rows, rest, *_, **__: torch.empty_like(rest),
)


def _sum_ranks(value: Tensor, peers: Tensor, number: int) -> Tensor:
    own = value.clone(memory_format=torch.contiguous_format)  # it may be sent after the operator
    return torch.stack([own, *_from_peers(own, peers, number)]).sum(0)


sum_ranks = define(
    "sum_ranks(Tensor value, Tensor peers, int number) -> Tensor",
    _sum_ranks,
    lambda value, peers, number: torch.empty_like(value),
)


attend_part = define(
    "attend_part(Tensor q, Tensor k, Tensor v, Tensor rest_k, Tensor rest_v, Tensor q_spans, "
    "Tensor k_spans, Tensor rest_spans, float? scale) -> (Tensor, Tensor)",
    attend_with_weights,
    lambda q, k, v, *_, **__: (
        q.new_empty(q.shape[0], q.shape[1], v.shape[2]),
        q.new_empty(q.shape[0], q.shape[1], 1, dtype=wide(q.dtype)),
    ),
)


def _merge_parts(
    out: Tensor, weight: Tensor, send: Tensor, counts: Tensor, order: Tensor, number: int
) -> Tensor:
    """Merge the ranks' partial attentions of this rank's queries by their log-sum-exps.

    Args:
        out: (queries, heads, depth): this rank's part, for all ranks' queries.
        weight: (queries, heads, 1): its log-sum-exps.
        send: The queries of other ranks, one rank after another.
        counts: (2, ranks): the number of queries for each rank, and of each.
        order: (ranks, own queries): places in [own part | received parts | one row of no weight].
        number: The exchange's number.
    """
    kind = wide(out.dtype)
    sent, received = counts.tolist()
    joined = torch.cat([out.to(kind), weight], 2)
    incoming = [joined.new_empty(count, *joined.shape[1:]) for count in received]
    if any(sent) or any(received):
        parts = joined.index_select(0, send).split(sent)
        group_of_step().exchange(
            {rank: part for rank, part in enumerate(parts) if len(part)},
            {rank: part for rank, part in enumerate(incoming) if len(part)},
            number,
        )
    nothing = joined.new_zeros(1, *joined.shape[1:])
    nothing[..., -1] = -torch.inf
    found = torch.cat([joined, *incoming, nothing])[order]
    shares = torch.softmax(found[..., -1:], 0)
    return (found[..., :-1] * shares).sum(0).to(out.dtype)


merge_parts = define(
    "merge_parts(Tensor out, Tensor weight, Tensor send, Tensor counts, Tensor order, int number) "
    "-> Tensor",
    _merge_parts,
    lambda out, weight, send, counts, order, number: out.new_empty(order.shape[1], *out.shape[1:]),
)


after = define(
    "after(Tensor value, Tensor before) -> Tensor",
    lambda value, before: value.clone(),
    lambda value, before: torch.empty_like(value),
)
