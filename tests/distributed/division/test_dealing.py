"""Dealing whole members to ranks, and which members are left to be divided."""

import random

import pytest

from maskfx.distributed.division.dealing import Dealing, dealings, dealt, is_even


@pytest.mark.parametrize("seed", range(20))
def test_every_member_is_in_one_place_of_each_dealing(seed: int) -> None:
    rng = random.Random(seed)
    costs = [rng.random() + 0.01 for _ in range(rng.randint(1, 7))]
    modules = [n for n in range(len(costs)) if rng.random() < 0.6]
    ranks = rng.randint(1, 4)
    found = list(dealings(costs, modules, ranks))
    assert found[0].divided == ()
    assert len(set(found)) == len(found)
    for dealing in found:
        assert len(dealing.whole) == ranks
        own = [number for rank in dealing.whole for number in rank]
        assert sorted([*own, *dealing.divided]) == list(range(len(costs)))
        if dealing.divided:  # the module computes what is left whole
            assert set(own) <= set(modules)


def test_equal_members_are_even_if_their_number_is_a_multiple_of_the_ranks() -> None:
    for count, ranks, even in ((2, 2, True), (3, 2, False), (4, 2, True), (4, 3, False)):
        costs = [1.0] * count
        assert is_even(dealt(costs, ranks), costs) == even


def test_the_most_expensive_members_of_the_module_are_divided_first() -> None:
    assert list(dealings([1.0, 3.0, 2.0], [0, 1], 2)) == [
        Dealing(((1,), (0, 2))),
        Dealing(((1,), (0,)), (2,)),
        Dealing(((0,), ()), (1, 2)),
        Dealing(((), ()), (0, 1, 2)),
    ]
