"""Patches that are chosen while a step runs, over ranks: the same choices as on one process."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from maskfx import CompiledDenoiser
from maskfx.distributed.heartbeat import Waits
from maskfx.distributed.rank_group import RankGroup
from maskfx.errors import InputError
from maskfx.ir.programs.head_sources import AttentionWay
from maskfx.runtime.cache.rolling.rolling_pool import RollingPool
from maskfx.runtime.reuse.judges import Bools, PatchFeatures
from tests.distributed.test_rank_rolling import FLUX, SD3, UNET
from tests.distributed.test_ranks import BOUND, error, shares
from tests.factories.thread_ranks import ThreadRanks
from tests.runtime.reuse.test_patches import BYTES, Chosen, Run
from tests.runtime.test_stretches import denoiser_of

Make = Callable[..., RankGroup]


@pytest.fixture
def make() -> Iterator[Make]:
    made: list[RankGroup] = []

    def group(denoiser: CompiledDenoiser, ranks: int) -> RankGroup:
        made.append(RankGroup(denoiser, ranks, waits=Waits(exchange=10.0)))
        return made[-1]

    yield group
    for one in made:
        one.stop()


def pairs(name: str, **settings: Any) -> list[tuple[Run, Run]]:
    """Two requests of other sizes, each for one process and for ranks."""
    own = {"order": "stretch", "age": 99, "threshold": 0.1, **settings}
    return [
        (Run(name, RollingPool(BYTES), i, i, **own), Run(name, pool, i, i, **own))
        for i, pool in enumerate([RollingPool(BYTES)] * 2)
    ]


def check(requests: list[tuple[Run, Run]], split: Any) -> float:
    """Make a step of all requests; return the share of stretches and patches it computed."""
    denoiser = requests[0][0].denoiser
    wanted = denoiser.step([one.ask() for one, _ in requests])
    got = denoiser.step([other.ask() for _, other in requests], split)
    computed = []
    for (one, other), a, b in zip(requests, wanted, got, strict=True):
        first, second = one.session._asked, other.session._asked
        choices = [asked[one.number, ""].choice for asked in (first, second)]
        if choices[0] is not None and choices[1] is not None:
            assert np.array_equal(choices[0].computed, choices[1].computed)
            computed.append(choices[0].computed.mean())
        assert error([other.take(b)], [one.take(a)]) < BOUND
        if one.session._branches[""].state is not None:
            assert np.allclose(one.state.since, other.state.since, rtol=1e-3, atol=1e-5)
    return float(np.mean(computed)) if computed else 1.0


def test_steps_over_threads() -> None:
    requests = pairs(UNET)
    own = shares("unequal", 2, 2, seed=1, texts=(True, False))
    split = ThreadRanks(requests[0][0].denoiser.settings, own)
    found = [check(requests, one) for one in (None, None, split, split, split)]
    assert 0.1 < min(found) < 0.9, found
    assert split.batches == 3


@pytest.mark.slow
@pytest.mark.parametrize("name", [UNET, FLUX, SD3])
def test_steps_over_processes_and_after_one_was_killed(name: str, make: Make) -> None:
    requests = pairs(name)
    group = make(requests[0][0].denoiser, 3)
    ways: tuple[AttentionWay, ...] = ("gathered", "keys by rank", "heads", "gathered")
    sets: list[Any] = [None, None, group.on((0, 1)), group.on((2,)), group.on((1, 2, 0))]
    found = []
    for step, (split, way) in enumerate(zip([*sets, group.on((1, 0))], ways * 2, strict=False)):
        if split is not None and len(split.ranks) > 1:
            split.partition = shares("unequal", len(split.ranks), 2, seed=step)
            split.attention = way
        found.append(check(requests, split))
    assert 0.1 < min(found) < 0.9, found
    assert group.computed_here == group.failures == 0
    assert group.pool.ranks is not None
    os.kill(group.pool.ranks.all[1].child.pid, signal.SIGKILL)
    check(requests, group.on((0, 1)))
    assert (group.failures, group.computed_here) == (1, 0)


class ByProcess:
    """A judge that decides otherwise in other processes."""

    keeps_nothing = False

    def __init__(self) -> None:
        self.pid = os.getpid()

    def refusal(self, stretches: int) -> str:
        return ""

    def computes(self, features: PatchFeatures) -> Bools:
        here = features.stretch == 1 or os.getpid() == self.pid
        return np.full(features.change.shape, here)


@pytest.mark.slow
def test_choices_that_ranks_cannot_make(make: Make) -> None:
    """One that can't be sent is made here; one that ranks make otherwise is an error."""
    requests = pairs(UNET, judge=Chosen(lambda features: np.ones(features.change.shape, bool)))
    group = make(denoiser_of(UNET), 2)
    for split in (None, None, group.on(2)):
        check(requests, split)
    assert (group.computed_here, group.failures) == (1, 0)
    requests = pairs(UNET, judge=ByProcess())
    for _ in range(2):
        check(requests, None)
    with pytest.raises(InputError, match="ranks chose other sites for stretch 2"):
        check(requests, group.on(2))
