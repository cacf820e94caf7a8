"""Entries of a template that may never be read take no room of templates in use."""

from __future__ import annotations

from pathlib import Path

import pytest

from maskfx.errors import BudgetError
from maskfx.runtime.cache.stores.store import Store
from maskfx.runtime.cache.tier_entry import Tier
from maskfx.runtime.cache.tiers import Tiers
from tests.factories.step_caches import a_step, key

STEP = a_step(0, sites=4, width=32, batch=1)
ONE = STEP.nbytes()


def put(tiers: Tiers, template: str, *steps: int) -> None:
    for step in steps:
        tiers.put(key(template, step), STEP)


def held(tiers: Tiers, template: str, count: int) -> str:
    """One letter per step: x in memory, - not."""
    return "".join("-x"[tiers.where(key(template, step)) is not None] for step in range(count))


def test_a_sparing_template_evicts_unread_ones_and_none_in_use() -> None:
    tiers = Tiers(host_bytes=4 * ONE)
    put(tiers, "used", 0, 1)
    for step in (0, 1):
        tiers.get(key("used", step))
    put(tiers, "unread", 0, 1)
    with tiers.sparing("new"):
        put(tiers, "new", 0, 1)
        assert (held(tiers, "used", 2), held(tiers, "unread", 2)) == ("xx", "--")
        with pytest.raises(BudgetError, match="no room"):
            put(tiers, "new", 2)
    assert (held(tiers, "used", 2), held(tiers, "new", 3)) == ("xx", "xx-")
    put(tiers, "new", 2)  # one that is asked for evicts the least recently used
    assert (held(tiers, "used", 2), held(tiers, "new", 3)) == ("-x", "xxx")


def test_what_was_read_long_ago_gives_a_share_of_the_room_to_sparing_templates() -> None:
    tiers = Tiers(host_bytes=8 * ONE)
    for template in "abcd":
        put(tiers, template, 0, 1)
    for template in "dcba":
        tiers.get(key(template, 1))  # one entry is enough: without the other it is of no use
    with tiers.sparing("new"):
        put(tiers, "new", 0, 1)
        assert [held(tiers, template, 2) for template in "abcd"] == ["xx", "xx", "xx", "--"]
        put(tiers, "new", 2, 3)
        assert [held(tiers, template, 2) for template in "abcd"] == ["xx", "xx", "--", "--"]
        with pytest.raises(BudgetError):
            put(tiers, "new", 4)


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_templates_of_any_size_find_room_for_one_that_may_be_read(size: int) -> None:
    """Each is read once it is there, and none of them hinders the next one for good."""
    tiers = Tiers(host_bytes=8 * ONE)
    for number in range(20):
        template, steps = f"t{number}", range(size)
        with tiers.sparing(template):
            put(tiers, template, *steps)
        assert held(tiers, template, size) == "x" * size
        assert number == 0 or held(tiers, f"t{number - 1}", size) == "x" * size
        for step in steps:
            tiers.get(key(template, step))


def test_a_sparing_template_removes_nothing_on_disk(tmp_path: Path) -> None:
    put(Tiers(Store(tmp_path), host_bytes=ONE), "used", 0, 1)
    size = Store(tmp_path).total_bytes() // 2
    tiers = Tiers(Store(tmp_path), host_bytes=2 * ONE, disk_bytes=size * 5 // 2)
    with tiers.sparing("new"):
        put(tiers, "new", 0)
    assert tiers.bytes_of(key("new", 0)) == {Tier.HOST: ONE}, "no room on disk"
    assert tiers.holds([key("used", 0), key("used", 1)])
    put(tiers, "other", 0)
    assert not tiers.holds([key("used", 0)]), "one that is asked for takes the place of the oldest"
