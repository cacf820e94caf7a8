"""Templates that are recorded ahead of edits, on real workers: limits, faults, where they go."""

from __future__ import annotations

import asyncio
import os
import signal
import time

import numpy as np
import pytest

from maskfx.serve.config import Limits
from maskfx.serve.errors import ApiError
from maskfx.serve.frontend.frontend import Front
from maskfx.serve.frontend.ticket import picture_name
from maskfx.serve.request import Pictures, Request, RequestKind
from tests.serve.fronts import eventually, fronted, made, processes, request, run

SLOW = "fake:seconds_per_step=0.1,steps=20"
QUICK = "fake:seconds_per_step=0.005,steps=4"
HEARTBEAT = 0.05


def ahead(number: int, user: str = "u") -> tuple[Request, Pictures]:
    """A picture of its own, to record."""
    image = np.full((48, 64, 3), number, np.uint8)
    kind = RequestKind.AHEAD
    return request(f"a{number}", kind=kind, images=(image,), mask=None, user=user)


def edit_of(number: int) -> tuple[Request, Pictures]:
    return request(f"e{number}", images=ahead(number)[1].images)


def metric(front: Front, name: str) -> float:
    found = front._metrics.registry.get_sample_value(f"maskfx_{name}")
    assert found is not None, name
    return found


def test_of_fifty_pictures_at_once_the_latest_are_recorded_and_no_request_waits() -> None:
    async def test() -> None:
        model, four = "fake:seconds_per_step=0.02,steps=4", Limits(recordings=4)
        async with fronted(model, limits=four, heartbeat_seconds=HEARTBEAT, queue=1) as front:
            for number in range(50):
                front.record_ahead(*ahead(number))
            assert len(front._ahead) == 4
            health = front.health()
            assert (health.waiting, health.running) == (0, 0)
            with front.seat():  # they take no place
                pass
            began = time.monotonic()
            await made(front, request())
            assert time.monotonic() - began < 1.0, "four steps, and at most one of a recording"
            await eventually(lambda: len(front._ahead) == 0)
            await eventually(lambda: front.health().recordings == 0)
            finished = metric(front, "idle_recordings_finished_total")
            assert 4 <= finished <= 6, "one or two were under way before the others came"
            assert metric(front, "idle_recordings_dropped_total") == 50 - finished
            assert metric(front, "e2e_request_latency_seconds_count") == 1
            assert metric(front, "step_latency_seconds_count") == 4

    run(test())


def test_users_have_limits_of_their_own() -> None:
    async def test() -> None:
        async with fronted(SLOW, limits=Limits(recordings=2)) as front:
            for number in range(5):
                front.record_ahead(*ahead(number))
            for number in range(5, 7):
                front.record_ahead(*ahead(number, user="other"))
            users = [one.user for one in front._ahead._open.values()]
            assert users == ["u", "u", "other", "other"]

    run(test())


def test_a_worker_that_is_killed_drops_its_recordings() -> None:
    async def test() -> None:
        async with fronted(SLOW, heartbeat_seconds=HEARTBEAT, lost_seconds=2) as front:
            for number in range(3):
                front.record_ahead(*ahead(number))
            await eventually(lambda: front.health().recordings == 3)
            os.kill(processes(front)[0], signal.SIGKILL)
            await eventually(lambda: front.health().workers == 0)
            assert len(front._ahead) == 0
            assert metric(front, "idle_recordings_dropped_total") == 3
            with pytest.raises(ApiError) as caught:
                front.record_ahead(*ahead(4))
            assert caught.value.code == "no_workers"
            await eventually(lambda: front.health().workers == 1)
            assert front.health().recordings == 0, "none is tried again"

    run(test())


def test_a_server_that_shuts_down_waits_for_no_recording() -> None:
    async def test() -> None:
        began = time.monotonic()
        async with fronted("fake:seconds_per_step=0.5,steps=40") as front:
            front.record_ahead(*ahead(1))
            await asyncio.sleep(0.2)
            assert await front.drain(1.0)
            assert len(front._ahead) == 0
        assert time.monotonic() - began < 10, "a recording takes 20 s"

    run(test())


def test_a_picture_is_recorded_where_it_was_edited_and_edited_where_it_is_recorded() -> None:
    async def test() -> None:
        async with fronted(QUICK, workers=2, heartbeat_seconds=HEARTBEAT) as front:
            pool = front._dispatch.pool
            for number in range(6):
                one = await made(front, edit_of(number))
                front.record_ahead(*ahead(number))
                await eventually(lambda: len(front._ahead) == 0)
                name = picture_name(ahead(number)[1].images[0])
                assert pool.with_template(name) == (one.worker,)
                assert front._enter(*edit_of(number)).demand.work.template == name
            for number in range(10, 14):
                front.record_ahead(*ahead(number))
            workers = {one.worker for one in front._ahead._open.values()}
            assert len(workers) == 2, "pictures that no worker knows are shared by all"

    run(test())
