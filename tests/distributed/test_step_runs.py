"""Steps on several ranks: whole members first, the rest divided by sites."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Iterator
from typing import Any

import pytest

from maskfx import CompiledDenoiser, DenseStep, RecordStep
from maskfx.distributed.division.links import LinkCosts
from maskfx.distributed.heartbeat import Waits
from maskfx.distributed.messages import PartResult, WholeResult
from maskfx.distributed.rank_group import RankGroup
from tests.distributed import tiny
from tests.distributed.test_ranks import BOUND, cache_error, error
from tests.distributed.test_samples import an_edit
from tests.factories.lora import update_of

FREE = LinkCosts(exchange=0.0, load=1e-12, send=0.0, flop=1.0)  # dividing costs nothing


@pytest.fixture(scope="module")
def denoiser() -> CompiledDenoiser:
    return tiny.compiled()


@pytest.fixture
def group(denoiser: CompiledDenoiser) -> Iterator[RankGroup]:
    made = RankGroup(denoiser, 2, waits=Waits(exchange=3.0), costs=FREE)
    yield made
    made.stop()


def check(denoiser: CompiledDenoiser, group: RankGroup, steps: list[Any]) -> None:
    for ours, wanted in zip(group.run(denoiser, steps), denoiser.step(steps), strict=True):
        if isinstance(wanted, tuple):
            assert error(ours[0], wanted[0]) < BOUND
            assert cache_error(ours[1], wanted[1]) < BOUND
        else:
            assert error(ours, wanted) < BOUND


def test_branches_are_whole_and_what_is_left_is_divided(
    denoiser: CompiledDenoiser, group: RankGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both branches of dense steps, recordings and edits; then one dense step alone, and three.

    Arguments are validated once, and what is made of them is computed by the ranks alone.
    """
    made: list[object] = []

    def counted(name: str, usual: Any) -> Any:
        def call(*given: Any, **named: Any) -> Any:
            made.append(name)
            return usual(*given, **named)

        return call

    branches = tiny.inputs(1, batch=2)
    for step in (DenseStep(branches), RecordStep(branches), an_edit(denoiser, 2, 2)):
        check(denoiser, group, [step])
        assert [type(one) for one in group.last] == [WholeResult] * 2
        assert [one.sent for one in group.last if one is not None] == [0, 0]
    for count in (1, 3):
        steps = [DenseStep(tiny.inputs(seed)) for seed in range(count)]
        check(denoiser, group, steps)
        for owner, name in ((denoiser._known, "serving"), (denoiser._executor.sides, "run")):
            monkeypatch.setattr(owner, name, counted(name, getattr(owner, name)))
        group.run(denoiser, steps)
        monkeypatch.undo()
        assert made == ["serving"] * count
        made.clear()
        assert [type(one) for one in group.last] == [PartResult] * 2
        assert all(one is not None and one.sent > 0 for one in group.last)
    assert group.computed_here == group.failures == 0
    assert group.pool.ranks is not None
    os.kill(group.pool.ranks.all[1].child.pid, signal.SIGKILL)
    check(denoiser, group, [DenseStep(tiny.inputs(1, batch=2))])
    assert (group.failures, group.computed_here) == (1, 0)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_any_members_on_any_number_of_ranks(denoiser: CompiledDenoiser, ranks: int) -> None:
    """By predictions, and by what the first steps took; with adapters, recordings, other sizes."""
    own = (update_of(denoiser.module, 4, 1),)
    rng = random.Random(ranks)
    groups = [RankGroup(denoiser, ranks, costs=costs) for costs in (FREE, LinkCosts(), None)]
    try:
        for turn in range(12):
            steps: list[Any] = []
            for _ in range(rng.randint(1, 4)):
                seed, batch = rng.randrange(99), rng.randint(1, 3)
                side, adapters = rng.choice([8, 12]), rng.choice([(), own])
                steps.append(
                    rng.choice(
                        [
                            DenseStep(tiny.inputs(seed, side, 8, batch), adapters),
                            RecordStep(tiny.inputs(seed, side, 8, batch), adapters),
                            an_edit(denoiser, seed, batch),
                        ]
                    )
                )
            check(denoiser, groups[turn % 3], steps)
        assert all(group.computed_here == group.failures == 0 for group in groups)
    finally:
        for group in groups:
            group.stop()
