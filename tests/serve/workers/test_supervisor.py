"""Processes: started, buried, started again, given up. The program is the test's, time as well."""

from __future__ import annotations

import os
import resource
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from maskfx.serve.config import ServeSettings
from maskfx.serve.workers.executor import WorkerAddress
from maskfx.serve.workers.process import REFUSED
from maskfx.serve.workers.supervisor import LOADING_SECONDS, ChildState, Workers
from tests.serve.fronts import alive


@dataclass
class Watched:
    """Workers that run some program, and what they reported."""

    workers: Workers
    now: list[float]
    lost: list[str] = field(default_factory=list)
    restarts: list[float] = field(default_factory=list)

    def tick(self, seconds: float = 0.0) -> None:
        self.now[0] += seconds
        self.workers.tick()

    def after_its_end(self) -> None:
        """One look, when the process is over."""
        child = self.workers.children[0]
        assert child.process is not None
        until = time.monotonic() + 5
        while child.process is not None:
            assert time.monotonic() < until
            self.tick()
            time.sleep(0.005)


def watched(monkeypatch: pytest.MonkeyPatch, program: str, **settings: Any) -> Watched:
    monkeypatch.setattr(sys, "executable", program)
    now = [1000.0]
    told = ServeSettings(model="fake", **settings)
    workers = Workers(
        told,
        "ipc:///nowhere",
        lambda name: made.lost.append(name),
        lambda: made.restarts.append(now[0]),
        lambda: now[0],
    )
    made = Watched(workers, now)
    return made


@pytest.fixture
def sleeper(tmp_path: Path) -> str:
    """A worker that started something itself."""
    script = tmp_path / "sleeper"
    script.write_text(f"#!/bin/sh\nsleep 60 & echo $! > {tmp_path}/pid.new\n")
    with script.open("a") as file:
        file.write(f"mv {tmp_path}/pid.new {tmp_path}/pid\nwait\n")
    script.chmod(0o755)
    return str(script)


def grandchild(folder: Path) -> int:
    until = time.monotonic() + 5
    while not (folder / "pid").exists():
        assert time.monotonic() < until
        time.sleep(0.01)
    return int((folder / "pid").read_text())


@pytest.mark.parametrize("program", ["/bin/false", "/nowhere/python"])
def test_pauses_grow_and_after_three_failed_restarts_it_is_given_up(
    monkeypatch: pytest.MonkeyPatch, program: str
) -> None:
    made = watched(monkeypatch, program, restarts=3)
    made.workers.start()
    starts: list[float] = []
    for _ in range(100):
        child = made.workers.children[0]
        if child.process is not None:
            made.after_its_end()
        if child.starts > len(starts):
            starts.append(made.now[0])
        if child.state is ChildState.GIVEN_UP:
            break
        made.tick(0.05)
    assert len(starts) == 4
    pauses = [b - a for a, b in zip(starts, starts[1:], strict=False)]
    assert pauses == pytest.approx([0.1, 0.2, 0.4], abs=0.06)
    assert made.workers.hopeless()
    made.tick(1e6)
    assert made.workers.children[0].starts == 4


def test_want_of_descriptors_passes_and_gives_nobody_up(
    monkeypatch: pytest.MonkeyPatch, sleeper: str
) -> None:
    made = watched(monkeypatch, sleeper, restarts=1)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    used = os.dup(0)
    os.close(used)
    resource.setrlimit(resource.RLIMIT_NOFILE, (used, hard))
    try:
        made.workers.start()
        for _ in range(20):
            made.tick(5)
        assert made.workers.names() == []
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert not made.workers.hopeless()
    made.tick(5)
    assert len(made.workers.names()) == 1
    made.workers.kill_all()


def test_a_worker_that_was_ready_has_all_its_restarts_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = watched(monkeypatch, "/bin/true", restarts=2)
    made.workers.start()
    made.after_its_end()
    assert made.lost == ["worker-0.1"]
    for _ in range(4):
        made.tick(10)
        made.after_its_end()  # a failure
        made.tick(10)
        assert made.workers.ready(made.workers.children[0].name)
        made.after_its_end()
        assert made.workers.children[0].state is ChildState.DOWN
    for _ in range(2):
        made.tick(10)
        made.after_its_end()
    assert made.workers.hopeless()


def test_a_model_that_was_loaded_once_isnt_given_up_at_one_refusal(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    script = tmp_path / "refuses"
    script.write_text(f"#!/bin/sh\nexit {REFUSED}\n")
    script.chmod(0o755)
    made = watched(monkeypatch, str(script), restarts=3)
    made.workers.start()
    assert made.workers.ready("worker-0.1")
    made.after_its_end()
    made.tick(10)
    made.after_its_end()
    assert not made.workers.hopeless()
    assert not made.workers.refused
    for _ in range(2):
        made.tick(10)
        made.after_its_end()
    assert made.workers.hopeless()
    never = watched(monkeypatch, str(script), restarts=3)
    never.workers.start()
    never.after_its_end()
    assert never.workers.hopeless()
    assert never.workers.refused


def test_with_no_restarts_the_first_end_is_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    made = watched(monkeypatch, "/bin/true", restarts=0)
    made.workers.start()
    assert made.workers.ready("worker-0.1")
    made.after_its_end()
    assert made.workers.hopeless()
    assert not made.restarts


def test_silence_is_death_also_of_what_it_started(
    monkeypatch: pytest.MonkeyPatch, sleeper: str, tmp_path: Path
) -> None:
    made = watched(monkeypatch, sleeper, lost_seconds=5)
    made.workers.start()
    pid = grandchild(tmp_path)
    made.tick(LOADING_SECONDS - 1)  # loading may hold up every thread
    assert not made.lost
    assert made.workers.ready("worker-0.1")
    made.workers.heard("worker-0.1")
    made.tick(4)
    assert not made.lost
    made.tick(2)
    assert made.lost == ["worker-0.1"]
    assert gone(pid)
    made.tick(1)
    assert len(made.restarts) == 1
    made.workers.kill_all()


def gone(pid: int) -> bool:
    until = time.monotonic() + 5
    while alive(pid) and time.monotonic() < until:
        if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
            return True  # no process here reaps orphans
        time.sleep(0.01)
    return not alive(pid)


def test_names_of_earlier_processes_mean_nobody(
    monkeypatch: pytest.MonkeyPatch, sleeper: str
) -> None:
    made = watched(monkeypatch, sleeper)
    made.workers.start()
    made.workers.kill("worker-0.1", "a test")
    made.tick(1)
    assert not made.workers.heard("worker-0.1")
    assert not made.workers.ready("worker-0.1")
    assert not made.workers.heard("worker-9.1")
    assert made.workers.heard("worker-0.2")
    assert made.workers.names() == ["worker-0.2"]
    made.workers.kill_all()
    assert made.workers.names() == []


def test_while_stopping_none_is_started_again(
    monkeypatch: pytest.MonkeyPatch, sleeper: str
) -> None:
    made = watched(monkeypatch, sleeper, workers=2)
    made.workers.start()
    assert made.workers.ready("worker-0.1")
    made.workers.stopping()
    assert made.workers.names() == ["worker-0.1"]  # the other was still loading
    made.workers.kill_all()
    made.tick(100)
    assert made.workers.names() == []
    assert not made.lost


def test_a_worker_gets_no_key(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    script = tmp_path / "spy"
    script.write_text(
        f"#!/bin/sh\n(env; timeout 1 cat) > {tmp_path}/new; mv {tmp_path}/new {tmp_path}/seen\n"
    )
    script.chmod(0o755)
    monkeypatch.setenv("MASKFX_API_KEY", "secret-1")
    made = watched(monkeypatch, str(script), api_key="secret-2")
    made.workers.start()
    made.after_its_end()
    seen = (tmp_path / "seen").read_bytes().decode("latin-1")
    assert '"model":"fake"' in seen
    assert "secret" not in seen


@dataclass
class Placed:
    """A worker of a cluster, in the test's hands."""

    name: str
    room: bool = False
    code: int | None = None
    pid: int | None = None
    ended: bool = False

    def waiting(self) -> bool:
        return not self.room

    def exited(self) -> bool:
        return self.code is not None

    def end(self) -> int:
        self.ended = True
        return -9 if self.code is None else self.code


class Somewhere:
    """An executor of such workers."""

    listen: tuple[str, int] | None = None

    def __init__(self) -> None:
        self.started: list[Placed] = []
        self.expected: list[int] = []
        self.closed = False

    def start(self, place: WorkerAddress, settings: ServeSettings) -> Placed:
        self.started.append(Placed(place.name))
        return self.started[-1]

    def expect(self, workers: int) -> None:
        self.expected.append(workers)

    def close(self) -> None:
        self.closed = True


def scattered(count: int) -> tuple[Watched, Somewhere]:
    now, executor = [1000.0], Somewhere()
    told = ServeSettings(model="fake", workers=count, lost_seconds=5)
    workers = Workers(
        told,
        "ipc:///nowhere",
        lambda name: made.lost.append(name),
        lambda: made.restarts.append(now[0]),
        lambda: now[0],
        executor,
    )
    made = Watched(workers, now)
    workers.start()
    return made, executor


def test_a_worker_that_waits_for_a_machine_is_not_silent() -> None:
    made, executor = scattered(1)
    for _ in range(10):
        made.tick(LOADING_SECONDS)
    assert not made.lost
    executor.started[0].room = True
    made.tick(LOADING_SECONDS - 1)
    assert not made.lost
    made.tick(2)
    assert made.lost == ["worker-0.1"]
    assert executor.started[0].ended


def test_workers_are_added_and_retired_for_good() -> None:
    made, executor = scattered(1)
    executor.started[0].room = True
    assert made.workers.ready("worker-0.1")
    made.workers.add()
    made.workers.add()
    assert [one.name for one in executor.started] == ["worker-0.1", "worker-1.1", "worker-2.1"]
    assert executor.expected == [1, 2, 3]
    assert made.workers.unplaced() == "worker-2.1"
    made.workers.retire("worker-2.1")  # has no machine yet
    assert executor.started[2].ended
    assert made.workers.names() == ["worker-0.1", "worker-1.1"]
    executor.started[1].room = True
    assert made.workers.ready("worker-1.1")
    assert made.workers.unplaced() is None
    made.workers.retire("worker-1.1")
    assert not executor.started[1].ended, "it was asked to stop, and may finish"
    assert (made.workers.count(), executor.expected[-1]) == (1, 1)
    executor.started[1].code = 0
    made.tick(0.1)
    assert made.lost == ["worker-1.1"]
    made.workers.heard("worker-0.1")
    made.tick(4)
    assert len(executor.started) == 3, "nothing is started in its place"
    assert [child.name for child in made.workers.children] == ["worker-0.1"]
    made.workers.add()
    assert executor.started[-1].name == "worker-3.1", "a name means one worker"
    made.workers.kill_all()
    made.workers.close()
    assert executor.closed


def test_a_retired_worker_that_does_not_end_is_killed() -> None:
    made, executor = scattered(2)
    for one in executor.started:
        one.room = True
        assert made.workers.ready(one.name)
    made.workers.retire("worker-1.1")
    made.tick(6)
    assert executor.started[1].ended
    assert made.workers.count() == 1
