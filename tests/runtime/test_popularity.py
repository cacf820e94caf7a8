"""Which keys stay within a limit of bytes, by their uses."""

from __future__ import annotations

import random

import pytest

from maskfx.errors import InputError
from maskfx.runtime.popularity import (
    LeastFrequentlyUsed,
    LeastRecentlyUsed,
    Popularity,
    ResidentSet,
)


def used(popularity: Popularity, keys: str) -> Popularity:
    for key in keys:
        popularity.use(key)
    return popularity


def test_the_least_recently_used_key_is_evicted() -> None:
    assert used(LeastRecentlyUsed(), "aabac").least("abc") == "b"


def test_the_least_frequently_used_key_is_evicted() -> None:
    assert used(LeastFrequentlyUsed(), "aabbbac").least("abc") == "c"
    assert used(LeastFrequentlyUsed(), "abab").least("ab") == "a", "of equal ones the older"


def test_old_uses_count_less() -> None:
    trace = "a" * 8 + "b" * 4
    assert used(LeastFrequentlyUsed(), trace).least("ab") == "b"
    assert used(LeastFrequentlyUsed(2), trace).least("ab") == "a"
    aged = LeastFrequentlyUsed(2)
    used(aged, "aabb")
    assert aged.count("a") == pytest.approx((0.5**0.5 + 1) * 0.5)


def test_a_policy_forgets_keys_without_recent_uses() -> None:
    aged = LeastFrequentlyUsed(2)
    for key in range(1000):
        aged.use(key)
    assert len(aged._counts) < 60


@pytest.mark.parametrize("half_life", [0, -1, float("nan")])
def test_a_half_life_is_positive(half_life: float) -> None:
    with pytest.raises(InputError, match="half_life"):
        LeastFrequentlyUsed(half_life)


def test_keys_are_evicted_until_another_fits() -> None:
    resident = ResidentSet(10, LeastRecentlyUsed())
    for key, nbytes in (("a", 4), ("b", 4), ("c", 2)):
        assert not resident.use(key)
        assert resident.admit(key, nbytes) == []
    assert resident.use("a")
    assert resident.admit("a", 4) == []
    resident.use("d")
    assert resident.admit("d", 5) == ["b", "c"]
    assert "b" not in resident
    assert resident.nbytes == 9


def test_pinned_keys_stay_and_may_leave_no_room() -> None:
    resident = ResidentSet(10, LeastRecentlyUsed())
    for key in "ab":
        resident.use(key)
        resident.admit(key, 5)
    resident.pin("a")
    for key in ("c", "d", "large"):
        resident.use(key)
    assert resident.admit("c", 5) == ["b"]
    resident.pin("c")
    assert resident.admit("d", 1) is None
    assert sorted(filter(resident.__contains__, "abcd")) == ["a", "c"], "something changed"
    assert resident.admit("large", 11) is None
    resident.unpin("a")
    assert resident.admit("d", 1) == ["a"]


def test_no_key_is_evicted_for_a_less_popular_one() -> None:
    resident = ResidentSet(10, LeastFrequentlyUsed())
    for key, uses in (("rare", 1), ("often", 3)):
        for _ in range(uses):
            resident.use(key)
        assert resident.admit(key, 5) == []
    for _ in range(2):
        resident.use("new")
    assert resident.admit("new", 10) is None, "it is used less than `often`"
    assert "rare" in resident
    assert "often" in resident
    assert resident.admit("new", 5) == ["rare"]


def test_without_a_limit_nothing_is_evicted() -> None:
    resident = ResidentSet(None, LeastRecentlyUsed())
    assert all(resident.admit(key, 1 << 40) == [] for key in range(50))
    assert len(resident) == 50


@pytest.mark.parametrize("policy", [LeastRecentlyUsed, LeastFrequentlyUsed])
def test_random_traces_keep_the_limit_and_the_pins(policy: type[Popularity]) -> None:
    draw = random.Random(0)
    resident = ResidentSet(100, policy())
    sizes = {key: draw.randint(1, 40) for key in range(20)}
    pinned: list[int] = []
    for _ in range(3000):
        key = draw.randrange(20)
        resident.use(key)
        before = {k for k in sizes if k in resident}
        evicted = resident.admit(key, sizes[key])
        if evicted is None:
            assert {k for k in sizes if k in resident} == before
            popular = {k for k in before if resident.popularity.least([k, key]) == key}
            assert sum(sizes[k] for k in before & popular.union(pinned)) + sizes[key] > 100
        else:
            assert not set(evicted) & set(pinned)
            assert key in resident
        assert resident.nbytes <= 100
        if key in resident and len(pinned) < 3 and draw.random() < 0.3:
            resident.pin(key)
            pinned.append(key)
        elif pinned and draw.random() < 0.3:
            resident.unpin(pinned.pop(draw.randrange(len(pinned))))
