"""A server with its own Ray cluster, as a process: it serves, drains, and leaves nothing behind."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable

import httpx
import psutil  # type: ignore[import-untyped]
import pytest

from tests.serve.launched import Served, served, start
from tests.serve.served import PICTURE

pytest.importorskip("ray", reason="needs the extra `ray`")
pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("ray"), pytest.mark.timeout(600)]

MODEL = "fake:seconds_per_step=0.1,steps=8,width=64,height=64"
START_SECONDS = 150.0


def soon(true: Callable[[], bool], seconds: float) -> None:
    until = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < until, "it didn't come to that"
        time.sleep(0.05)


def actors(server: Served) -> list[psutil.Process]:
    pids = {event["pid"] for event in server.events("worker_placed")}
    return [psutil.Process(pid) for pid in pids if psutil.pid_exists(pid)]


def left(processes: list[psutil.Process]) -> list[psutil.Process]:
    return [p for p in processes if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]


def test_it_serves_drains_and_leaves_nothing() -> None:
    with served(START_SECONDS, model=MODEL, executor="ray", workers=2) as server:
        with httpx.Client(base_url=server.url, timeout=60) as client:
            health = client.get("/health").json()
            assert sum(health["nodes"].values()) == health["workers"]
            files = {"image": ("a.png", PICTURE)}
            answer = client.post("/v1/images/edits", data={"prompt": "a cat"}, files=files)
            assert answer.status_code == 200
        assert {event["node"] for event in server.events("worker_placed")} == set(health["nodes"])
        there = [*server.children(), *actors(server)]
        os.kill(server.process.pid, signal.SIGTERM)
        assert server.process.wait(30) == 0
        soon(lambda: not left(there), 15)


@pytest.mark.parametrize("how", ["killed", "aborted"])
def test_workers_end_with_a_server_that_has_no_time(how: str) -> None:
    with served(START_SECONDS, model=MODEL, executor="ray") as server:
        there = actors(server)
        assert there
        if how == "killed":  # Ray's own agents look for their parent at longer intervals
            os.kill(server.process.pid, signal.SIGKILL)
        else:
            there += server.children()
            os.kill(server.process.pid, signal.SIGTERM)
            time.sleep(0.05)
            os.kill(server.process.pid, signal.SIGTERM)
        server.process.wait(20)
        soon(lambda: not left(there), 15)


def test_a_machine_with_too_few_cpus_is_refused_with_numbers() -> None:
    with start(model="fake", executor="ray", ray={"cpus": 1000}) as process:
        _, said = process.communicate(timeout=START_SECONDS)
    assert process.returncode == 2
    assert "1 workers need CPU 1000 each, on one node" in said
    assert "add nodes, or lower workers" in said
