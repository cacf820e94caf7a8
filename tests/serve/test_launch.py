"""Servers as processes: what they refuse to start with, and how they end."""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import signal
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import psutil  # type: ignore[import-untyped]
import pytest

from maskfx.serve.config import is_loopback
from tests.serve.launched import Served, served, start
from tests.serve.served import PICTURE

MODEL = "fake:seconds_per_step=0.05,steps=8,width=64,height=64"
FILES = {"image": ("a.png", PICTURE)}
BODY = {"prompt": "a cat", "seed": 7, "size": "64x64"}


def refused(**settings: Any) -> tuple[int, str, float]:
    """Exit code, what was printed, and how long that took."""
    began = time.monotonic()
    with start(**settings) as process:
        _, said = process.communicate(timeout=20)
    return process.returncode, said, time.monotonic() - began


def test_a_port_that_is_in_use_is_said_at_once() -> None:
    """Before a worker starts, and about as fast as the check of the settings before it."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        taken_times, setting_times = [], []
        for _ in range(3):  # in turn: the machine's load is in both
            code, said, seconds = refused(port=port, model="fake:seconds_to_load=60")
            taken_times.append(seconds)
            setting_times.append(refused(host="192.0.2.1")[2])
    assert code == 2
    assert said.count("\n") == 1
    assert f"port {port}" in said
    assert "--port" in said
    assert min(taken_times) < 2 * min(setting_times)


def test_nothing_large_is_imported_before_that() -> None:
    code = "import sys, maskfx.serve.launch\n"
    code += "sys.exit(any(x in sys.modules for x in ('torch', 'fastapi', 'uvicorn', 'zmq')))"
    assert os.spawnl(os.P_WAIT, sys.executable, sys.executable, "-c", code) == 0


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.1", "192.168.1.4", "example.org"])
def test_beyond_this_machine_it_wants_a_key(host: str) -> None:
    code, said, _ = refused(host=host)
    assert code == 2
    assert said.count("\n") == 1
    assert "--api-key" in said


@pytest.mark.parametrize(
    ("host", "loopback"),
    [("localhost", True), ("127.0.0.9", True), ("::1", True), ("10.0.0.1", False), ("me", False)],
)
def test_loopback(host: str, loopback: bool) -> None:
    assert is_loopback(host) is loopback


def test_sixty_four_descriptors_are_refused_with_what_to_do() -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    code = f"import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64)); {ONE_SERVER}"
    with subprocess_of(code) as process:
        _, said = process.communicate(timeout=20)
    assert process.returncode == 2
    assert "ulimit -n" in said
    assert said.count("\n") == 1
    assert resource.getrlimit(resource.RLIMIT_NOFILE) == before


ONE_SERVER = """
import sys
from maskfx.serve.launch import serve
from maskfx.serve.config import ServeSettings
sys.exit(serve(ServeSettings(model='fake', port=0)))
"""


def subprocess_of(code: str) -> Any:
    import subprocess

    return subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.PIPE, text=True)


def test_costs_that_arent_any_are_refused(tmp_path: Path) -> None:
    (tmp_path / "costs.json").write_text('{"speed": 3}')
    for path in ("costs.json", "missing.json"):
        code, said, _ = refused(model="fake", costs=str(tmp_path / path))
        assert code == 2
        assert path in said


def test_a_folder_that_isnt_there_is_refused_before_a_worker_starts(tmp_path: Path) -> None:
    for model, why in (("nofolder", "neither a folder"), (str(tmp_path), "no model_index.json")):
        code, said, _ = refused(model=model)
        assert code == 2
        assert said.count("\n") == 1
        assert why in said


def test_a_model_that_cant_be_loaded_ends_the_server() -> None:
    code, said, seconds = refused(model="fake:speed=3")
    assert code == 1
    assert "the model can't be loaded" in said
    assert "isn't one of" in said
    assert seconds < 10


def test_a_client_that_comes_before_the_model_is_served() -> None:
    model = "fake:seconds_to_load=1.5,seconds_per_step=0.01,steps=4"
    with served(model=model, ready=False) as server, httpx.Client(base_url=server.url) as client:
        assert client.get("/health/live").status_code == 200
        for path in ("/health", "/health/ready"):
            response = client.get(path)
            assert response.status_code == 503
            assert response.json()["error"]["code"] == "model_loading"
            assert int(response.headers["retry-after"]) > 0
        (listed,) = client.get("/v1/models").json()["data"]
        assert (listed["id"], listed["maskfx"]["state"]) == ("fake", "loading")
        early = client.post("/v1/images/edits", data={"prompt": "a", "slo_ms": 100}, files=FILES)
        assert early.json()["error"]["code"] == "model_loading"
        assert int(early.headers["retry-after"]) > 0
        answer = client.post("/v1/images/edits", data={"prompt": "a"}, files=FILES, timeout=30)
        assert answer.status_code == 200, answer.text
        assert client.get("/v1/models/fake").json()["maskfx"]["state"] == "ready"


async def post(client: httpx.AsyncClient, **body: Any) -> httpx.Response:
    return await client.post("/v1/images/generations", json=BODY | body)


@contextlib.asynccontextmanager
async def in_flight(server: Served, count: int) -> Any:
    """A client with a number of requests that have arrived, and their tasks."""
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=server.url, limits=limits, timeout=30) as client:
        tasks = [asyncio.create_task(post(client, seed=k)) for k in range(count)]
        async with httpx.AsyncClient(base_url=server.url) as other:
            health = (await other.get("/health")).json()
            while health["waiting"] + health["running"] < count:
                await asyncio.sleep(0.01)
                health = (await other.get("/health")).json()
            yield tasks, other


def to_all(server: Served) -> None:
    """As a terminal does it."""
    os.killpg(server.process.pid, signal.SIGINT)


def closed(server: Served) -> None:
    """As a terminal that is closed does it."""
    os.killpg(server.process.pid, signal.SIGHUP)


@pytest.mark.slow
@pytest.mark.parametrize("ask", [lambda server: server.process.terminate(), to_all, closed])
def test_with_64_in_flight_it_drains(ask: Callable[[Served], None]) -> None:
    async def test(server: Served) -> None:
        async with in_flight(server, 64) as (tasks, other):
            ask(server)
            await asyncio.sleep(0.05)
            ready = await other.get("/health/ready")
            assert ready.status_code == 503
            refused = await post(other)
            assert refused.status_code == 503
            assert refused.json()["error"]["code"] == "draining"
            assert not all(task.done() for task in tasks)
            answers = await asyncio.gather(*tasks)
            assert [answer.status_code for answer in answers] == [200] * 64

    with served(model=MODEL, workers=2, max_num_seqs=8) as server:
        children = server.children()
        asyncio.run(test(server))
        assert server.process.wait(10) == 0
        assert not [child for child in children if child.is_running()]
        assert server.events("ended")[0]["drained"]


def test_a_second_signal_aborts() -> None:
    async def test(server: Served) -> None:
        async with in_flight(server, 8) as (tasks, _):
            server.process.terminate()
            server.wait_for("draining")
            server.process.terminate()
            began = time.monotonic()
            await asyncio.to_thread(server.process.wait, 10)
            assert time.monotonic() - began < 4
            answers = await asyncio.gather(*tasks, return_exceptions=True)
            for answer in answers:
                told = isinstance(answer, httpx.Response) and answer.status_code == 503
                assert told or isinstance(answer, httpx.HTTPError)

    with served(model="fake:seconds_per_step=1,steps=100,width=64,height=64") as server:
        children = server.children()
        asyncio.run(test(server))
        assert server.process.returncode == 1
        gone, left = psutil.wait_procs(children, 5)
        assert not left


@pytest.mark.slow
def test_who_doesnt_finish_in_time_is_told() -> None:
    async def test(server: Served) -> None:
        async with in_flight(server, 2) as (tasks, _):
            server.process.terminate()
            for answer in await asyncio.gather(*tasks):
                assert answer.status_code == 503
                assert answer.json()["error"]["code"] == "draining"

    model = "fake:seconds_per_step=1,steps=100,width=64,height=64"
    with served(model=model, shutdown_timeout=1) as server:
        asyncio.run(test(server))
        assert server.process.wait(10) == 1


@pytest.mark.slow
def test_a_killed_server_leaves_no_process() -> None:
    with served(model=MODEL, workers=2) as server:
        children = server.children()
        assert len(children) >= 2
        server.process.kill()
        gone, left = psutil.wait_procs(children, 10)
        assert not left


@pytest.mark.slow
def test_a_killed_worker_costs_nobody_a_picture() -> None:
    """Over HTTP: same bytes as without."""

    async def test(server: Served) -> None:
        async with httpx.AsyncClient(base_url=server.url, timeout=30) as client:
            wanted = (await post(client)).json()["data"][0]["b64_json"]
            tasks = [asyncio.create_task(post(client)) for _ in range(8)]
            await asyncio.sleep(0.2)
            server.workers()[0].kill()
            for answer in await asyncio.gather(*tasks):
                assert answer.status_code == 200
                assert answer.json()["data"][0]["b64_json"] == wanted
            assert "maskfx_worker_restarts_total 1.0" in (await client.get("/metrics")).text

    with served(model=MODEL) as server:
        asyncio.run(test(server))


@pytest.mark.slow
def test_without_workers_health_fails_and_calls_are_refused(tmp_path: Path) -> None:
    """Over HTTP: all workers die and none can be started again, while requests wait."""
    needed = tmp_path / "weights"
    needed.touch()

    async def test(server: Served) -> None:
        async with in_flight(server, 12) as (tasks, other):
            needed.unlink()
            for worker in server.workers():
                worker.kill()
            for answer in [*await asyncio.gather(*tasks), await post(other)]:
                assert answer.status_code == 503
                assert answer.json()["error"]["code"] == "no_workers"
                assert int(answer.headers["retry-after"]) > 0
            for path in ("/health", "/health/ready"):
                assert (await other.get(path)).status_code == 503
            assert (await other.get("/health/live")).status_code == 503, "only a restart helps"
            assert (await other.get("/v1/models")).json()["data"][0]["maskfx"]["state"] == "failed"

    model = f"fake:seconds_per_step=0.2,steps=50,width=64,height=64,needs={needed}"
    with served(model=model, workers=2, restarts=3) as server:
        asyncio.run(test(server))
