"""Operators of exchanges: what two ranks compute together is what one computes."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from maskfx import ops
from maskfx.ops.exchange import merge_moments, own_moments, within
from tests.factories.thread_ranks import Boxes, ThreadGroup

KEYS = torch.tensor([[0, 3]]), torch.tensor([[0, 4]])


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def on_two(run: Callable[[int], Tensor]) -> list[Tensor]:
    boxes = Boxes()

    def one(rank: int) -> Tensor:
        with within(ThreadGroup(rank, boxes, 10.0)):
            return run(rank)

    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(one, (0, 1)))


def test_moments_merge_to_those_of_all_numbers() -> None:
    value = numbers(40) * 3 + 5

    def moments(part: Tensor) -> Tensor:
        spread = (part - part.mean()).square().sum() if len(part) else torch.tensor(0.0)
        mean = part.mean() if len(part) else torch.tensor(0.0)
        return torch.stack([torch.tensor(float(len(part))), mean, spread])

    for cut in (0, 1, 17, 40):
        merged = merge_moments(moments(value[:cut]), moments(value[cut:]))
        assert torch.allclose(merged, moments(value), rtol=1e-5)


@pytest.mark.parametrize("offset", [0.0, 300.0])
def test_moments_of_a_rank_are_those_of_double_precision(offset: float) -> None:
    rows = numbers(50, 12) * torch.arange(1.0, 13) + offset
    rest = torch.zeros(2, 3, 3)
    found = own_moments(rows, rest, torch.tensor([[0, 10, 20, 50], [10, 20, 0, 0]]), 3)
    for own, numbers_ in zip(found, (torch.cat([rows[:10], rows[20:]]), rows[10:20]), strict=True):
        groups = numbers_.double().view(-1, 3, 4).transpose(0, 1).flatten(1)
        spread, mean = torch.var_mean(groups, 1, correction=0)
        count = torch.full((3,), float(groups.shape[1]), dtype=torch.double)
        wanted = torch.stack([count, mean, spread * count], 1)
        assert torch.allclose(own.double(), wanted, rtol=1e-5)


@pytest.mark.parametrize("cut", [0, 2, 5, 12])
def test_a_group_norm_over_two_ranks(cut: int) -> None:
    rows = numbers(12, 8) * 2 + 3
    parts = rows[:cut], rows[cut:]
    rest = torch.zeros(1, 2, 3)

    def run(rank: int) -> Tensor:
        own = parts[rank]
        spans, peers = torch.tensor([[0, len(own)]]), torch.tensor([1 - rank])
        merged = ops.peer_moments(own, rest, spans, peers, 2, 1)
        scales = ops.group_scale(own, merged, spans, 2, None, None, 1e-5)
        owner = torch.zeros(len(own), dtype=torch.long)
        found: Tensor = ops.scale_shift(own, scales, owner)
        return found

    wanted = F.group_norm(rows.t()[None], 2)[0].t()
    assert torch.allclose(torch.cat(on_two(run)), wanted, atol=1e-5)


@pytest.mark.parametrize("dim_v", [8, 4])  # the second has no CPU kernel that returns the weights
@pytest.mark.parametrize("kv_heads", [2, 1])
def test_partial_attentions_merge(dim_v: int, kv_heads: int) -> None:
    q, k, v = numbers(5, 2, 8), numbers(7, kv_heads, 8, seed=1), numbers(7, kv_heads, dim_v, seed=2)
    cuts = [(0, 3), (3, 7)]
    nothing = k[:0], v[:0]
    spans, none = torch.tensor([[0, 5]]), torch.tensor([[0, 0]])

    def run(rank: int) -> Tensor:
        start, stop = cuts[rank]
        own = k[start:stop], v[start:stop]
        part = ops.attend_part(q, *own, *nothing, spans, KEYS[rank], none, None)
        mine = [slice(0, 2), slice(2, 5)][rank]
        theirs = [slice(2, 5), slice(0, 2)][rank]
        places = torch.arange(5)
        count = [[0, 3], [2, 0]][rank], [[0, 2], [3, 0]][rank]
        order = torch.empty(2, len(places[mine]), dtype=torch.long)
        order[rank] = places[mine]
        order[1 - rank] = torch.arange(5, 5 + len(places[mine]))
        found: Tensor = ops.merge_parts(*part, places[theirs], torch.tensor(count), order, 1)
        return found

    all_q, all_k, all_v = (x.transpose(0, 1)[None] for x in (q, k, v))
    wanted = F.scaled_dot_product_attention(all_q, all_k, all_v, enable_gqa=True)[0].transpose(0, 1)
    assert torch.allclose(torch.cat(on_two(run)), wanted, atol=1e-6)


def test_rows_travel_with_all_their_values() -> None:
    values = [numbers(6, 2, 3), numbers(6, 4, seed=1)]
    halves = [slice(0, 2), slice(2, 6)]

    def run(rank: int) -> Tensor:
        own = [value[halves[rank]] for value in values]
        send = torch.arange(len(own[0]))
        counts = torch.tensor([[[0, 2], [0, 4]], [[4, 0], [2, 0]]][rank])
        order = torch.arange(6) if rank == 0 else torch.tensor([4, 5, 0, 1, 2, 3])
        found = ops.exchange(own, send, counts, order, 3)
        return torch.cat([part.flatten(1) for part in found], 1)

    wanted = torch.cat([value.flatten(1) for value in values], 1)
    for found in on_two(run):
        assert torch.equal(found, wanted)


def test_outside_of_a_group_an_exchange_is_an_error() -> None:
    rows, counts = numbers(2, 3), torch.tensor([[0, 1], [0, 1]])
    with pytest.raises(AssertionError, match="within"):
        ops.exchange([rows], torch.tensor([0]), counts, torch.arange(3), 1)


def alone() -> dict[object, tuple[object, ...]]:
    """Arguments of each operator with which a rank has no peers."""
    rows, none = numbers(4, 2, 8), torch.tensor([], dtype=torch.long)
    spans, empty = torch.tensor([[0, 4]]), torch.tensor([[0, 0]])
    counts, order = torch.tensor([[0], [0]]), torch.tensor([0, 1, 3])
    flat, rest, weight = rows.flatten(1), torch.zeros(1, 4, 3), torch.zeros(4, 2, 1)
    return {
        ops.exchange: ([rows, flat], none, counts, order, 1),
        ops.peer_moments: (flat, rest, spans, none, 4, 1),
        ops.peer_sums: (flat, torch.zeros(1, 17), spans, none, 1),
        ops.sum_ranks: (rows, none, 1),
        ops.attend_part: (rows, rows, rows, rows[:0], rows[:0], spans, spans, empty, None),
        ops.merge_parts: (rows, weight, none, counts, order[None], 1),
        ops.exchange_normed: (flat, rest, spans, none, 4, none, counts, order, 1),
        ops.to_heads: ([rows, rows], 2, none, counts, order, 1),
        ops.from_heads: (rows, 2, none, counts, torch.arange(4), 1),
        ops.after: (rows, flat),
    }


def test_every_operator_is_sampled() -> None:
    assert set(alone()) == set(ops.EXCHANGES)


@pytest.mark.parametrize("op", ops.EXCHANGES, ids=str)
def test_the_fake_result_is_like_the_real_one(op: Any) -> None:
    torch.library.opcheck(op, alone()[op], test_utils=("test_schema", "test_faketensor"))
