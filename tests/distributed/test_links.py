"""Which rows ranks share, by cost, and the time that a rank takes for its work."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from torch import nn

from maskfx import CompiledDenoiser, DenseStep
from maskfx.distributed.links import LinkCosts
from maskfx.distributed.partition import Partition
from maskfx.distributed.rank_group import RankGroup
from maskfx.distributed.work import RankWork, Work
from tests.distributed import tiny

CHEAP = LinkCosts(exchange=0.0, send=0.0)


def batch_of(denoiser: CompiledDenoiser, count: int = 1) -> tuple[Any, Any]:
    """Return the program and the members of a step."""
    found: list[Any] = []

    def seen(program: Any, recording: bool, frame: Any, calls: Any, members: Any) -> None:
        found.append((program, members))

    denoiser.step([DenseStep(tiny.inputs(seed)) for seed in range(count)], seen)
    return found[0][0], found[0][1]


def group_of(denoiser: CompiledDenoiser, costs: LinkCosts) -> RankGroup:
    return RankGroup(denoiser, 2, costs=costs)  # its processes start at the first step


@pytest.mark.parametrize(
    ("kind", "costs", "shared"),
    [
        (tiny.Joint, CHEAP, True),
        (tiny.Joint, LinkCosts(exchange=0.0, send=1.0), False),
        (tiny.Joint, LinkCosts(exchange=1.0, send=0.0), False),  # of the text with itself
        (tiny.Tiny, CHEAP, False),  # nothing is computed of its text
    ],
    ids=["cheap", "slow bytes", "slow exchanges", "no rows"],
)
def test_a_text_is_shared_where_that_costs_less(
    kind: Callable[[], nn.Module], costs: LinkCosts, shared: bool
) -> None:
    denoiser = tiny.compiled(kind)
    program, members = batch_of(denoiser)
    found = group_of(denoiser, costs).partition(program, members, 2)
    assert found.texts == (shared,)


def test_a_text_on_one_rank_is_whole() -> None:
    denoiser = tiny.compiled(tiny.Joint)
    program, members = batch_of(denoiser, 2)
    assert group_of(denoiser, CHEAP).partition(program, members, 2).texts == (False, False)


def test_the_work_of_a_member() -> None:
    denoiser = tiny.compiled(tiny.Joint)
    program, (member,) = batch_of(denoiser)
    work = RankWork(1.0).of(program, member)
    text, sites, square = 5, 16, 2 * 16 * 16  # rows, and the FLOPs of a layer 16 wide
    joint = 2 * 4 * 16 * (text + sites)  # queries with all keys and values, twice
    alone = 3 * square + 4 * 16 * text
    # nothing reads the text after the last attention
    assert work.text == text * (joint + alone + 2 * 3 * square + square)
    assert work.sites == sites * (joint + 2 * 4 * square + 2 * square)
    assert work.once == 2 * 16  # the time


def test_the_seconds_of_a_flop_are_those_of_the_quickest_step() -> None:
    work, member = RankWork(7.0), Work(once=1.0, text=4.0, sites=6.0)
    assert work.flop == 7.0
    work.note([member], Partition(((2.0, 1.0, 0.0),)), [18.0, 70.0, 0.0])
    assert work.flop == 18.0 / (1 + 4 + 4)
    work.note([member], Partition(((1.0, 1.0),), (True,)), [6.0, 9.0])
    assert work.flop == 6.0 / (1 + 2 + 3)
    work.note([member], Partition(((1.0, 1.0),)), [100.0, 100.0])
    assert work.flop == 1.0
