"""Workers as actors on several nodes. All of it is real but the model."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from maskfx.serve.errors import ApiError
from maskfx.serve.frontend.frontend import Front
from maskfx.serve.request import Finished, Pictures, Request, RequestKind
from tests.serve.fronts import alive, eventually, made, processes, request, run
from tests.serve.ray_nodes import START_SECONDS, nodes, on_nodes

pytest.importorskip("ray", reason="needs the extra `ray`")
pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("ray"), pytest.mark.timeout(900)]

LONG = "fake:seconds_per_step=0.05,steps=10"


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    with nodes(2, 2) as made:
        yield made


async def answers(front: Front, id: str) -> tuple[str, list[Finished]]:
    """All results of one request; one is right."""
    found = [one async for one in front.serve(*request(id)) if isinstance(one, Finished)]
    return id, found


def metric(front: Front, name: str) -> float:
    lines = front.metrics().decode().splitlines()
    return sum(
        float(line.split()[-1]) for line in lines if line.startswith((name + " ", name + "{"))
    )


def test_200_requests_and_a_node_that_is_lost_under_load(cluster: Any) -> None:
    """None is lost, none is answered twice, and all pictures are the same."""

    async def test() -> None:
        extra = cluster.add_node(num_cpus=2, object_store_memory=80 << 20, include_dashboard=False)
        async with on_nodes(
            cluster.address, LONG, workers=3, cpus=2, max_num_seqs=8, stuck_seconds=30
        ) as front:
            assert sorted(front.health().nodes.values()) == [1, 1, 1]
            wanted = await made(front, request())
            tasks = [asyncio.create_task(answers(front, str(k))) for k in range(200)]
            await eventually(lambda: front.health().running == 24, 30)
            await asyncio.sleep(0.5)
            await asyncio.to_thread(cluster.remove_node, extra, False)
            results = dict(await asyncio.gather(*tasks))
            assert Counter(len(found) for found in results.values()) == {1: 200}
            assert all(np.array_equal(f[0].pixels, wanted.pixels) for f in results.values())
            assert 0 < sum(found[0].tries == 2 for found in results.values()) <= 8
            assert metric(front, "maskfx_request_success_total") == 201
            assert metric(front, "maskfx_workers_lost_total") == 1
            await eventually(lambda: sum(front.health().nodes.values()) == 2, 30)

    run(test(), 300)


def test_a_killed_actor_is_replaced_and_its_requests_run_again(cluster: Any) -> None:
    async def test() -> None:
        async with on_nodes(cluster.address, LONG, cpus=2) as front:
            wanted = await made(front, request())
            tasks = [asyncio.create_task(made(front, request(str(k)))) for k in range(3)]
            await eventually(lambda: front.health().running == 3)
            await asyncio.sleep(0.1)
            (pid,) = processes(front)
            os.kill(pid, signal.SIGKILL)
            for one in await asyncio.gather(*tasks):
                assert np.array_equal(one.pixels, wanted.pixels)
                assert one.tries == 2
            await eventually(lambda: front.health().workers == 1, START_SECONDS)
            assert processes(front) != [pid]

    run(test(), 300)


def test_a_killed_actor_drops_its_recordings(cluster: Any) -> None:
    """An actor records ahead of edits as a child process does."""

    async def test() -> None:
        def ahead(id: str) -> tuple[Request, Pictures]:
            return request(id, kind=RequestKind.AHEAD, mask=None)

        finished = "maskfx_idle_recordings_finished_total"
        async with on_nodes(cluster.address, LONG, cpus=2, heartbeat_seconds=0.1) as front:
            front.record_ahead(*ahead("a"))
            await eventually(lambda: metric(front, finished) == 1, 30)
            front.record_ahead(*ahead("b"))
            await eventually(lambda: front.health().recordings == 1)
            (pid,) = processes(front)
            os.kill(pid, signal.SIGKILL)
            await eventually(lambda: metric(front, "maskfx_idle_recordings_dropped_total") == 1, 30)
            await eventually(lambda: front.health().workers == 1, START_SECONDS)
            assert front.health().recordings == 0
            assert metric(front, finished) == 1

    run(test(), 300)


def test_a_stopped_actor_is_silent_and_replaced(cluster: Any) -> None:
    """As with a node behind a broken network: it runs on, and nothing comes from it."""

    async def test() -> None:
        async with on_nodes(cluster.address, LONG, workers=2, cpus=2, lost_seconds=2) as front:
            tasks = [asyncio.create_task(made(front, request(str(k)))) for k in range(6)]
            await eventually(lambda: front.health().running == 6)
            stopped = processes(front)[0]
            os.kill(stopped, signal.SIGSTOP)
            assert {one.tries for one in await asyncio.gather(*tasks)} == {1, 2}
            await eventually(lambda: front.health().workers == 2, START_SECONDS)
            await eventually(lambda: not alive(stopped), 60)

    run(test(), 300)


def test_no_room_is_reported_and_ends_a_server_that_never_had_any(
    cluster: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    async def test() -> None:
        told: dict[str, Any] = {"cpus": 64, "place_seconds": 1}
        async with on_nodes(cluster.address, wait=False, **told) as front:
            await eventually(front.refused, 30)
            assert not front.health().live

    run(test(), 120)
    said = capfd.readouterr()
    assert "worker_without_node" in said.out + said.err
    assert "1 workers need CPU 64 each, on one node" in said.out + said.err


def test_a_worker_waits_for_a_node_that_comes_later(cluster: Any) -> None:
    async def test() -> None:
        async with on_nodes(cluster.address, wait=False, resources="big=1") as front:
            await asyncio.sleep(2)
            assert front.health().reason == "model_loading"
            common = {"object_store_memory": 80 << 20, "include_dashboard": False}
            node = cluster.add_node(num_cpus=1, resources={"big": 1}, **common)
            await eventually(lambda: front.health().workers == 1, START_SECONDS)
            assert (await made(front, request())).tries == 1
        await asyncio.to_thread(cluster.remove_node, node)

    run(test(), 300)


def test_a_group_of_ranks_stays_on_one_node_and_keeps_its_place(cluster: Any) -> None:
    """Both nodes have two CPUs: a group of two fits one, and the next worker the other."""

    async def test() -> None:
        async with on_nodes(cluster.address, LONG, workers=2, ranks=2) as front:
            assert sorted(front.health().nodes.values()) == [1, 1]
            before, nodes_before = groups(), dict(front.health().nodes)
            assert sorted(before.values()) == [("CREATED", "STRICT_PACK")] * 2
            os.kill(processes(front)[0], signal.SIGKILL)
            await eventually(lambda: front.health().workers == 1)
            assert groups() == before, "what it reserved is kept for the next one"
            await eventually(lambda: front.health().workers == 2, START_SECONDS)
            assert groups() == before
            assert front.health().nodes == nodes_before

    run(test(), 300)


def groups() -> dict[str, tuple[str, str]]:
    """State and strategy of the placement groups that there are, by id."""
    import ray

    table = ray.util.placement_group_table().values()
    there = [group for group in table if group["state"] != "REMOVED"]
    return {g["placement_group_id"]: (g["state"], g["strategy"]) for g in there}


def test_the_queue_adds_workers_and_asks_for_their_nodes(cluster: Any) -> None:
    async def test() -> None:
        told: dict[str, Any] = {"max_workers": 3, "grow_seconds": 0.5, "shrink_seconds": 1}
        async with on_nodes(cluster.address, LONG, max_num_seqs=2, **told) as front:
            assert wanted() == [{"CPU": 1}]
            tasks = [asyncio.create_task(made(front, request(str(k)))) for k in range(60)]
            await eventually(lambda: front.health().workers == 3, START_SECONDS)
            assert wanted() == [{"CPU": 1}] * 3
            assert {one.tries for one in await asyncio.gather(*tasks)} == {1}
            await eventually(lambda: front.health().workers == 1, 30)
            await eventually(lambda: wanted() == [{"CPU": 1}], 10)
            assert metric(front, "maskfx_workers_lost_total") == 0

    run(test(), 300)


def wanted() -> Any:
    """What the autoscaler was asked for."""
    from ray.autoscaler._private import constants
    from ray.experimental.internal_kv import _internal_kv_get

    channel = constants.AUTOSCALER_RESOURCE_REQUEST_CHANNEL  # type: ignore[attr-defined]
    return json.loads(_internal_kv_get(channel) or "[]")


def test_logs_of_workers_reach_the_front_end(
    cluster: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    async def test() -> None:
        async with on_nodes(cluster.address) as front:
            with pytest.raises(ApiError):
                await made(front, request(prompt="fake:fail"))
            (node,) = front.health().nodes
            assert f'maskfx_workers{{node="{node}"}} 1.0' in front.metrics().decode()

    run(test(), 300)
    said = capfd.readouterr().out
    line = next(line for line in said.splitlines() if "member_failed" in line)
    assert "worker-0.1" in line
    assert "node=" in line
    assert "the prompt asked for this" in said


def test_a_node_with_another_version_is_reported(
    cluster: Any, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("maskfx.__version__", "9.9")

    async def test() -> None:
        async with on_nodes(cluster.address, wait=False, restarts=1) as front:
            await eventually(lambda: not front.health().live, START_SECONDS)

    run(test(), 300)
    said = capfd.readouterr().out
    assert "the server has 9.9" in said
    assert "install maskfx 9.9 there" in said
