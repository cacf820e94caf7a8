"""Partition: stretches that cover a member, and members before sites."""

import itertools
import random

import pytest

from maskfx.distributed.division.partition import Partition, cut_members, divisions, whole_members


@pytest.mark.parametrize("seed", range(20))
def test_stretches_cover_the_rows_once_and_in_order(seed: int) -> None:
    rng = random.Random(seed)
    shares = tuple(rng.choice([0.0, 1.0, rng.random()]) for _ in range(rng.randint(1, 5)))
    shares = shares if sum(shares) else (1.0, *shares[1:])
    partition = Partition((shares,))
    for count in (0, 1, 2, 7, 100):
        stretches = [partition.stretch(0, rank, count) for rank in range(len(shares))]
        assert stretches[0][0] == 0
        assert stretches[-1][1] == count
        assert all(a[1] == b[0] for a, b in itertools.pairwise(stretches))
        empty = [rank for rank, share in enumerate(shares) if not share]
        assert all(stretches[rank][0] == stretches[rank][1] for rank in empty)


def test_a_text_is_whole_on_each_rank_with_a_share_or_shared_like_the_sites() -> None:
    partition = Partition(((2.0, 1.0, 0.0), (2.0, 1.0, 0.0)), (False, True))
    assert [partition.text(0, rank, 9) for rank in range(3)] == [(0, 9), (0, 9), (0, 0)]
    assert [partition.text(1, rank, 9) for rank in range(3)] == [(0, 6), (6, 9), (9, 9)]
    assert Partition(partition.shares).texts == (False, False)


def test_whole_members_go_to_the_rank_with_the_least_work() -> None:
    assert whole_members([3.0, 3.0], 2).shares == ((1.0, 0.0), (0.0, 1.0))
    assert whole_members([2.0, 1.0, 1.0], 2).shares == ((1.0, 0.0), (0.0, 1.0), (0.0, 1.0))
    assert whole_members([0.0], 2).shares == ((1.0, 0.0),)


def test_a_member_alone_is_cut_into_equal_parts() -> None:
    assert cut_members([6.0], 3, 3).shares == ((2.0, 2.0, 2.0),)
    assert cut_members([6.0], 3, 2).shares == ((3.0, 3.0, 0.0),)
    assert cut_members([6.0], 3, 2).cut == (True,)


def test_members_are_cut_so_that_ranks_have_equal_work() -> None:
    partition = cut_members([3.0, 1.0], 2, 2)
    assert partition.shares == ((2.0, 1.0), (0.0, 1.0))
    assert partition.peers(0) == [1]
    assert partition.cut == (True, False)


@pytest.mark.parametrize("seed", range(20))
def test_no_rank_has_much_more_work_than_another(seed: int) -> None:
    rng = random.Random(seed)
    costs = [rng.random() + 0.01 for _ in range(rng.randint(1, 6))]
    ranks = rng.randint(1, 4)
    partition = cut_members(costs, ranks, ranks)
    work = [
        sum(c * own[r] / sum(own) for c, own in zip(costs, partition.shares, strict=True))
        for r in range(ranks)
    ]
    assert sum(work) == pytest.approx(sum(costs))
    assert max(work) <= 1.3 * sum(costs) / ranks


def test_a_batch_may_be_divided_over_fewer_ranks() -> None:
    found = [one.shares for one in divisions([6.0], 3)]
    assert found == [((1.0, 0.0, 0.0),), ((3.0, 3.0, 0.0),), ((2.0, 2.0, 2.0),)]
    assert len(list(divisions([0.0], 3))) == 1


def test_peers_share_a_member() -> None:
    partition = Partition(((1.0, 1.0, 0.0), (0.0, 0.0, 1.0)))
    assert [partition.peers(rank) for rank in range(3)] == [[1], [0], []]
    assert [partition.holder(member) for member in range(2)] == [0, 2]
