"""Ranks that are stopped or hang are found by their heartbeats, and their step runs again soon."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

import maskfx
from maskfx import CompiledDenoiser
from maskfx.distributed.division.partition import Partition
from maskfx.distributed.heartbeat import (
    LOOK,
    USED,
    HeartbeatWatch,
    Signs,
    Waits,
    hung,
    process_state,
)
from maskfx.distributed.rank_group import RankGroup
from tests.distributed import tiny
from tests.distributed.hanging import VARIABLE, HangingTiny
from tests.distributed.test_rank_group import EVEN, edit_and_dense, worst
from tests.distributed.test_ranks import BOUND

AGAIN = 2.0  # seconds in which the step has run again, after a rank was found


class Written:
    """Heartbeats that a test writes."""

    def __init__(self) -> None:
        self.beats, self.cpu, self.exchange, self.state = 0, 0, 0, "S"

    def watch(self) -> HeartbeatWatch:
        return HeartbeatWatch(self, 10.0, lambda: self.state)

    def read(self) -> tuple[int, ...]:
        return self.beats, self.cpu, self.exchange


def test_what_counts_as_silence_and_as_progress() -> None:
    written = Written()
    watch = written.watch()
    signs = watch.look(10.0 + LOOK)
    assert (signs.silent, signs.idle) == pytest.approx((LOOK, LOOK))
    written.beats, written.cpu = 1, USED // 2  # less than counts
    signs = watch.look(10.0 + 2 * LOOK)
    assert (signs.silent, signs.idle) == pytest.approx((0.0, 2 * LOOK))
    written.cpu = 2 * USED
    signs = watch.look(10.0 + 3 * LOOK)
    assert (signs.silent, signs.idle) == pytest.approx((LOOK, 0.0))
    written.exchange = 3
    assert watch.look(10.0 + 4 * LOOK).idle == 0.0
    signs = watch.look(10.0 + 5 * LOOK)
    assert (signs.idle, signs.exchange, signs.waited) == pytest.approx((LOOK, 3, LOOK))
    written.cpu = 4 * USED  # it polls
    signs = watch.look(10.0 + 6 * LOOK)
    assert (signs.idle, signs.waited) == pytest.approx((0.0, 2 * LOOK))


def test_time_in_which_nobody_looked_isnt_silence() -> None:
    watch = Written().watch()
    signs = watch.look(5000.0)
    assert max(signs.silent, signs.idle) <= 4 * LOOK


@pytest.mark.parametrize(
    ("state", "counts"), [("R", False), ("D", False), ("S", True), ("T", True)]
)
def test_a_thread_that_waits_for_a_core_or_a_disk_isnt_idle(state: str, counts: bool) -> None:
    written = Written()
    watch = written.watch()
    watch.look(10.0 + LOOK)
    written.state = state
    signs = watch.look(10.0 + 2 * LOOK)
    assert (signs.silent, signs.idle) == pytest.approx((2 * LOOK * counts,) * 2)


def test_the_state_of_a_process() -> None:
    assert process_state(os.getpid()) in ("R", "")
    assert process_state(1 << 30) == ""


def waiting(exchange: int, idle: float = 1.0, waited: float = 1.0) -> Signs:
    return Signs(idle=idle, exchange=exchange, waited=waited)


@pytest.mark.parametrize(
    ("signs", "found"),
    [
        ({0: Signs(), 1: Signs()}, []),
        ({0: Signs(silent=1.0), 1: Signs()}, [0]),
        ({0: waiting(4), 1: Signs()}, []),  # it waits for one that computes
        ({0: waiting(4), 1: Signs(idle=0.9)}, []),
        ({0: waiting(4), 1: Signs(idle=1.0)}, [1]),
        ({0: waiting(4), 1: waiting(3)}, [1]),
        ({0: waiting(4, idle=0.0), 1: waiting(3)}, [1]),  # it polls
        ({0: waiting(4), 1: waiting(3, idle=0.0)}, []),
        ({0: waiting(4), 1: waiting(4)}, [0, 1]),
        ({0: waiting(4), 1: waiting(3, waited=0.9)}, []),
        ({}, []),
    ],
    ids=[
        *("both compute", "stopped", "waits", "not yet", "hangs", "behind", "polls", "busy"),
        *("both", "moved", "none"),
    ],
)
def test_who_is_to_blame(signs: dict[int, Signs], found: list[int]) -> None:
    assert sorted(hung(signs, Waits())) == found


@pytest.fixture(scope="module")
def denoiser() -> CompiledDenoiser:
    made = maskfx.compile(tiny.build(HangingTiny))
    made.record(**tiny.inputs(0))
    return made


@pytest.mark.parametrize(
    "fault",
    [
        "before",
        pytest.param("within", marks=pytest.mark.slow),
        pytest.param("stopped", marks=pytest.mark.slow),
        pytest.param("killed", marks=pytest.mark.slow),
    ],
)
def test_a_step_runs_again_within_two_seconds(
    denoiser: CompiledDenoiser, fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the time when the rank is found, beyond the step's usual time, with the default limits."""
    monkeypatch.setenv(VARIABLE, str(tmp_path / "hang"))
    group, steps = RankGroup(denoiser, 2), edit_and_dense(denoiser, 3)
    try:
        wanted, split = denoiser.step(steps), group.on(2, EVEN)
        denoiser.step(steps, split)
        usual = -time.monotonic()
        denoiser.step(steps, split)
        usual += time.monotonic()
        assert group.failures == 0
        assert group.pool.ranks is not None
        failing = group.pool.ranks.all[1].child
        if fault in ("before", "within"):
            (tmp_path / "hang").write_text(f"{fault} 1")
        else:
            os.kill(failing.pid, signal.SIGKILL if fault == "killed" else signal.SIGSTOP)
        took = -time.monotonic()
        got = denoiser.step(steps, split)
        took += time.monotonic()
        assert worst(got, wanted) < BOUND
        assert took < usual + AGAIN + (0.0 if fault == "killed" else Waits().stall + 4 * LOOK)
        assert (group.failures, group.computed_here) == (1, 0)
        assert failing.exited()  # and the other one computed the step
        until = time.monotonic() + 120
        while group.pool.size < 2 or len(group.pool.ranks.all) < 2:
            assert time.monotonic() < until
            assert worst(denoiser.step(steps, group.on(2)), wanted) < BOUND
            time.sleep(0.2)
        assert worst(denoiser.step(steps, split), wanted) < BOUND
        assert len([part for part in group.last if part is not None]) == 2
        assert group.failures == 1
    finally:
        group.stop()


@pytest.mark.slow
def test_ranks_that_wait_for_one_that_left_fail_at_once(
    denoiser: CompiledDenoiser, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 0 waits for rank 1, and rank 2 for rank 0; only rank 1 is ended."""
    monkeypatch.setenv(VARIABLE, str(tmp_path / "hang"))
    group, steps = RankGroup(denoiser, 3), edit_and_dense(denoiser, 3)
    try:
        wanted = denoiser.step(steps)
        split = group.on(3, Partition(((1.0, 1.0, 0.0), (1.0, 0.0, 1.0))))
        assert worst(denoiser.step(steps, split), wanted) < BOUND
        (tmp_path / "hang").write_text("before 1")
        start = time.monotonic()
        assert worst(denoiser.step(steps, split), wanted) < BOUND
        assert time.monotonic() - start < AGAIN + Waits().stall + 4 * LOOK
        assert group.pool.ranks is not None
        assert len(group.pool.ranks.all) == 2
        assert (group.failures, group.computed_here) == (1, 0)
    finally:
        group.stop()
