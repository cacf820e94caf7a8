"""Real child processes: how they are started, how they end, and that none is left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from maskfx.runtime.processes.child_process import ChildProcess

MODULE = "tests.runtime.processes.echo"


@pytest.fixture
def child() -> Iterator[ChildProcess]:
    made = ChildProcess(MODULE, environment={**os.environ, "COLOUR": "red"})
    yield made
    made.end()


def ask(child: ChildProcess, *parts: bytes) -> list[bytearray]:
    child.channel.send(*parts)
    return child.channel.receive()


def ended(pid: int) -> bool:
    """Ended, or a zombie that its parent hasn't collected."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except FileNotFoundError:
        return True
    return stat.rpartition(")")[2].split()[0] == "Z"


def wait_for_end(*pids: int) -> None:
    until = time.monotonic() + 10
    while not all(ended(pid) for pid in pids):
        assert time.monotonic() < until, "a process is left"
        time.sleep(0.01)


def started_by(pid: int) -> list[int]:
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return [int(x) for task in tasks for x in (task / "children").read_text().split()]


def test_messages_go_both_ways_and_standard_input_is_empty(child: ChildProcess) -> None:
    big = os.urandom(5_000_000)
    assert ask(child, b"a", big) == [b"a", big]
    assert ask(child, b"stdin") == [b""]
    assert ask(child, b"b") == [b"b"]


def test_a_child_imports_from_the_same_places(child: ChildProcess) -> None:
    path, colour = ask(child, b"path")
    here = [os.path.abspath(place) for place in sys.path]
    assert path.decode().split("\n")[: len(set(here))] == list(dict.fromkeys(here))
    assert colour == b"red"


def test_an_end_is_seen_without_collecting_it(child: ChildProcess) -> None:
    assert not child.exited()
    child.channel.send(b"exit", b"79")
    until = time.monotonic() + 10
    while not child.exited():
        assert time.monotonic() < until
        time.sleep(0.01)
    assert child.exited()
    assert Path(f"/proc/{child.pid}").exists()
    assert child.end() == 79
    assert child.end() == 79


def test_a_child_ends_with_what_it_started(child: ChildProcess) -> None:
    ask(child, b"sleep")
    (sleeper,) = started_by(child.pid)
    assert child.end() == -signal.SIGKILL
    wait_for_end(sleeper)


def test_a_killed_child_wakes_who_waits_for_it(child: ChildProcess) -> None:
    ask(child, b"sleep")
    child.kill()
    with pytest.raises(EOFError):
        child.channel.receive()


def test_a_closed_channel_ends_a_child_in_the_middle_of_its_work(child: ChildProcess) -> None:
    ask(child, b"sleep")
    began = time.monotonic()
    assert child.close(30) == 1
    assert time.monotonic() - began < 10


def test_a_child_that_doesnt_end_by_itself_is_killed(child: ChildProcess) -> None:
    ask(child, b"a")
    os.kill(child.pid, signal.SIGSTOP)
    os.waitpid(child.pid, os.WUNTRACED)  # all of its threads have stopped
    assert child.close(0.1) == -signal.SIGKILL


PARENT = """
import os, threading, time
from maskfx.runtime.processes.child_process import ChildProcess
made = []
thread = threading.Thread(target=lambda: made.append(ChildProcess("tests.runtime.processes.echo")))
thread.start()
thread.join()  # the child outlives the thread that asked for it
[child] = made
child.channel.send(b"sleep")
child.channel.receive()
if os.fork() == 0:  # it keeps the parent's end of the channel open
    time.sleep(30)
    os._exit(0)
print(child.pid, flush=True)
time.sleep(30)
"""


@pytest.mark.parametrize("stopped", [False, True])
def test_a_child_ends_when_its_parent_is_killed(stopped: bool) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        if stopped:
            os.kill(pid, signal.SIGSTOP)
        parent.kill()
        wait_for_end(pid)
        os.killpg(parent.pid, signal.SIGKILL)  # the forked one


def test_a_child_that_cant_be_started_leaves_no_descriptor(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(OSError, match="nowhere"):
        ChildProcess(MODULE)
    assert len(os.listdir("/proc/self/fd")) == before
