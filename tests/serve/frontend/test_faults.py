"""What befalls workers: killed, crashed, stopped, hung, out of memory. All of it is real."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from maskfx.serve.errors import ApiError
from maskfx.serve.frontend.frontend import Front
from tests.serve.fronts import (
    QUICK,
    PlainCosts,
    alive,
    eventually,
    fronted,
    made,
    processes,
    request,
    run,
)

LONG = "fake:seconds_per_step=0.05,steps=10"
METRIC = "maskfx_worker_restarts_total"


def restarts(front: Front) -> float:
    line = next(x for x in front.metrics().decode().splitlines() if x.startswith(METRIC + " "))
    return float(line.split()[1])


async def under_way(front: Front, count: int) -> None:
    await eventually(lambda: front.health().running == count)
    await asyncio.sleep(0.1)  # a step or two


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSEGV])
def test_a_killed_workers_requests_are_made_again_bit_for_bit(how: signal.Signals) -> None:
    async def test() -> None:
        async with fronted(LONG, lost_seconds=2) as front:
            wanted = await made(front, request())
            tasks = [asyncio.create_task(made(front, request(str(k)))) for k in range(3)]
            await under_way(front, 3)
            killed = time.monotonic()
            os.kill(processes(front)[0], how)
            await eventually(lambda: front.health().workers == 0)
            await eventually(lambda: front.health().workers == 1)
            assert time.monotonic() - killed < 5
            for one in await asyncio.gather(*tasks):
                assert np.array_equal(one.pixels, wanted.pixels)
                assert one.tries == 2
                assert one.worker == "worker-0.2"
            assert restarts(front) == 1

    run(test())


@pytest.mark.parametrize("pause", [0.0, 0.01, 0.05])
def test_a_worker_that_is_killed_while_large_pictures_travel_costs_none(pause: float) -> None:
    """48 MB to the worker and 48 MB back, of one step; whatever is cut off is sent again."""
    large = np.random.default_rng(0).integers(0, 256, (2048, 2048, 3), np.uint8)

    async def test() -> None:
        async with fronted("fake:seconds_per_step=0.001,steps=1", lost_seconds=2) as front:
            one = request(images=(large,), mask=None)
            wanted = await made(front, one)
            tasks = [asyncio.create_task(made(front, one)) for _ in range(4)]
            await eventually(lambda: front.health().running == 4)
            await asyncio.sleep(pause)
            os.kill(processes(front)[0], signal.SIGKILL)
            for answer in await asyncio.gather(*tasks):
                assert np.array_equal(answer.pixels, wanted.pixels)
            assert restarts(front) == 1

    run(test())


def test_a_stopped_worker_is_replaced_and_its_late_answers_are_dropped() -> None:
    async def test() -> None:
        async with fronted(LONG, workers=2, lost_seconds=1, heartbeat_seconds=0.2) as front:
            tasks = [asyncio.create_task(made(front, request(str(k)))) for k in range(6)]
            await under_way(front, 6)
            stopped = processes(front)[0]
            os.kill(stopped, signal.SIGSTOP)
            results = await asyncio.gather(*tasks)
            assert {one.tries for one in results} == {1, 2}
            assert all(np.array_equal(one.pixels, results[0].pixels) for one in results)
            assert not alive(stopped)
            assert restarts(front) == 1

    run(test())


def test_when_no_worker_can_be_started_again_requests_are_told_so(tmp_path: Path) -> None:
    async def test() -> None:
        needed = tmp_path / "weights"
        needed.touch()
        model = f"{LONG},needs={needed}"
        async with fronted(model, restarts=3) as front:
            task = asyncio.create_task(made(front, request()))
            await under_way(front, 1)
            needed.unlink()
            os.kill(processes(front)[0], signal.SIGKILL)
            with pytest.raises(ApiError) as caught:
                await asyncio.wait_for(task, 20)
            assert caught.value.code == "no_workers"
            assert caught.value.retry_after
            assert not front.health().ready
            assert front.health().reason == "no_workers"
            assert not front.health().live, "only a restart helps"
            assert front.workers.children[0].starts == 4  # once, and three times again
            with pytest.raises(ApiError, match="no worker runs"):
                front.seat()
            with pytest.raises(ApiError, match="no worker runs"):
                await made(front, request())

    run(test())


def test_a_request_that_kills_workers_ends_after_three_and_harms_nobody_twice_more() -> None:
    async def test() -> None:
        async with fronted(LONG, lost_seconds=2) as front:
            mates = [asyncio.create_task(made(front, request(str(k)))) for k in range(3)]
            poison = asyncio.create_task(made(front, request("p", prompt="fake:crash")))
            with pytest.raises(ApiError) as caught:
                await poison
            assert caught.value.code == "worker_lost"
            for mate in await asyncio.gather(*mates):
                assert mate.tries <= 3
            await eventually(lambda: restarts(front) == 3)
            await eventually(lambda: front.health().workers == 1)

    run(test())


@pytest.mark.parametrize("fault", ["crash", "lost"])
def test_who_was_in_two_deaths_runs_alone_and_gets_its_picture(fault: str) -> None:
    async def test() -> None:
        async with fronted(LONG) as front:
            unlucky = asyncio.create_task(made(front, request("p", prompt=f"fake:{fault}:2")))
            await eventually(lambda: restarts(front) == 2)
            others = [asyncio.create_task(made(front, request(str(k)))) for k in range(3)]
            await eventually(lambda: front.health().running == 1)
            most = 0
            while not unlucky.done():
                most = max(most, front.health().running)
                await asyncio.sleep(0.005)
            assert (await unlucky).tries == 3
            assert most == 1
            await asyncio.gather(*others)

    run(test())


@pytest.mark.parametrize("prompt", ["fake:fail", "fake:nan"])
def test_one_members_failure_is_its_own(prompt: str) -> None:
    async def test() -> None:
        async with fronted(LONG) as front:
            good = [asyncio.create_task(made(front, request(str(k)))) for k in range(3)]
            bad = asyncio.create_task(made(front, request("b", prompt=prompt)))
            with pytest.raises(ApiError) as caught:
                await bad
            assert caught.value.code == "generation_failed"
            assert {one.tries for one in await asyncio.gather(*good)} == {1}
            assert restarts(front) == 0

    run(test())


def test_a_worker_that_makes_no_step_is_replaced() -> None:
    async def test() -> None:
        async with fronted(QUICK, stuck_seconds=0.5, heartbeat_seconds=0.2) as front:
            one = await made(front, request(prompt="fake:hang:1"))
            assert one.tries == 2
            assert restarts(front) == 1

    run(test())


def test_out_of_memory_halves_the_batch_until_it_suffices() -> None:
    async def test() -> None:
        async with fronted(LONG, max_num_seqs=8) as front:
            wanted = [request(str(k), prompt="fake:oom:2") for k in range(8)]
            done = await asyncio.gather(*(made(front, one) for one in wanted))
            assert max(one.tries for one in done) > 1
            assert all(np.array_equal(one.pixels, done[0].pixels) for one in done)
            assert restarts(front) == 0

    run(test())


def test_who_has_no_memory_even_alone_is_told_and_the_others_go_on() -> None:
    async def test() -> None:
        async with fronted(LONG) as front:
            good = [asyncio.create_task(made(front, request(str(k)))) for k in range(3)]
            with pytest.raises(ApiError) as caught:
                await made(front, request("b", prompt="fake:oom"))
            assert caught.value.code == "out_of_memory"
            assert caught.value.status == 503
            await asyncio.gather(*good)

    run(test())


def test_who_leaves_mid_step_is_out_of_the_batch_within_a_step() -> None:
    async def test() -> None:
        async with fronted("fake:seconds_per_step=0.1,steps=50") as front:
            staying = asyncio.create_task(made(front, request("stays")))
            task = asyncio.create_task(made(front, request("leaves")))
            await under_way(front, 2)
            task.cancel()
            left = time.monotonic()
            await eventually(lambda: front.health().running == 1, 1)
            assert time.monotonic() - left < 0.1
            costs = front._dispatch._costs
            assert isinstance(costs, PlainCosts)
            steps = len(costs.observed)
            await eventually(lambda: len(costs.observed) >= steps + 3)
            # at most the step under way still had both
            assert [len(told.members) for told, _ in costs.observed[steps + 1 :]] == [1, 1]
            staying.cancel()

    run(test())


def test_who_leaves_while_waiting_is_never_started() -> None:
    async def test() -> None:
        async with fronted(LONG, max_num_seqs=1) as front:
            first = asyncio.create_task(made(front, request("first")))
            await under_way(front, 1)
            second = asyncio.create_task(made(front, request("second")))
            await eventually(lambda: front.health().waiting == 1)
            second.cancel()
            await eventually(lambda: front.health().waiting == 0, 1)
            await first
            assert front.health().running == 0

    run(test())


def test_a_deadline_that_cant_be_met_is_told_early() -> None:
    async def test() -> None:
        async with fronted(LONG, max_num_seqs=1) as front:
            front._dispatch._scheduler.costs.seconds = 0.05  # type: ignore[attr-defined]
            began = time.monotonic()
            with pytest.raises(ApiError) as caught:
                await made(front, request(seconds=0.3))
            assert caught.value.code == "deadline_exceeded"
            assert caught.value.retry_after
            assert time.monotonic() - began < 0.2

    run(test())


def test_who_runs_when_its_time_is_over_is_stopped() -> None:
    async def test() -> None:
        async with fronted("fake:seconds_per_step=0.1,steps=100") as front:
            began = time.monotonic()
            with pytest.raises(ApiError) as caught:
                await made(front, request(seconds=1.5))
            assert caught.value.code == "deadline_exceeded"
            assert 1.4 < time.monotonic() - began < 2.5
            assert front.health().running == 0

    run(test())


FRONT = """
import asyncio, sys
from maskfx.serve.logs import configure_logs
from tests.serve.fronts import fronted, processes
configure_logs("error")
async def main():
    async with fronted(sys.argv[1], workers=2) as front:
        print(*processes(front), front._link.address, flush=True)
        await asyncio.sleep(60)
asyncio.run(main())
"""


@pytest.mark.parametrize(
    "how", [signal.SIGKILL, pytest.param(signal.SIGSTOP, marks=pytest.mark.slow)]
)
def test_workers_end_with_their_front(how: signal.Signals) -> None:
    """Killed, or so silent that it might as well be."""
    command = [sys.executable, "-c", FRONT, QUICK]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as front:
        assert front.stdout is not None
        first, second, _ = front.stdout.readline().split()
        os.kill(front.pid, how)
        until = time.monotonic() + 10
        while any(running(int(pid)) for pid in (first, second)):
            assert time.monotonic() < until, "a worker outlived its front by 10 s"
            time.sleep(0.05)
        front.kill()


def running(pid: int) -> bool:
    """Not a zombie, either: a stopped parent can't reap."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except FileNotFoundError:
        return False
    return stat.rpartition(")")[2].split()[0] != "Z"
