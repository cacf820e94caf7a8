"""Worker processes: started, watched, killed when silent, started again, given up.

Knows processes and when they were heard; what they work on is `frontend/dispatch.py`'s.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

import structlog

from maskfx.serve.config import ServeSettings
from maskfx.serve.workers.process import REFUSED, WorkerAddress

FIRST_PAUSE, LONGEST_PAUSE = 0.1, 5.0  # seconds before a start again
LOADING_SECONDS = 60.0  # of silence: loading a library holds up every thread
STOP_SECONDS = 5.0  # from "stop" to SIGKILL
SCARCE_PAUSE = 1.0
# a process couldn't be started for want of something that comes back: no failure of the worker's
SCARCE = (errno.EAGAIN, errno.EMFILE, errno.ENFILE, errno.ENOMEM)
SECRETS = ("MASKFX_API_KEY",)

log = structlog.get_logger(__name__)


class ChildState(Enum):
    """Where a worker stands."""

    DOWN = "down"  # until `again`
    LOADING = "loading"
    READY = "ready"
    STOPPING = "stopping"
    GIVEN_UP = "given_up"


@dataclass(eq=False)
class Child:
    """One worker, through all its processes."""

    index: int
    starts: int = 0
    failures: int = 0  # of restarts, in a row
    state: ChildState = ChildState.DOWN
    again: float = 0.0
    heard: float = 0.0
    process: subprocess.Popen[bytes] | None = None

    @property
    def name(self) -> str:
        """New with every process: what an earlier one says late is known by it."""
        return f"worker-{self.index}.{self.starts}"


class Workers:
    """All of them. `lost` is called with the name of each that dies, `restarted` at each return."""

    def __init__(
        self,
        settings: ServeSettings,
        address: str,
        memory: Path,
        lost: Callable[[str], None],
        restarted: Callable[[], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._settings, self._address, self._memory = settings, address, memory
        self._lost, self._restarted, self._clock = lost, restarted, clock
        self.children = [Child(index) for index in range(settings.workers)]
        self.refused = False  # a worker said that its model can't be loaded at all
        self._loaded = False  # it was, once

    def start(self) -> None:
        for child in self.children:
            self._spawn(child)

    def ready(self, name: str) -> bool:
        """A model is loaded. False for a process that isn't one of ours any more."""
        child = self._named(name)
        if child is None or child.state is not ChildState.LOADING:
            return False
        child.state, child.failures, self._loaded = ChildState.READY, 0, True
        return True

    def heard(self, name: str) -> bool:
        child = self._named(name)
        if child is None or child.process is None:
            return False
        child.heard = self._clock()
        return True

    def names(self) -> list[str]:
        """Of processes that can be told something."""
        return [child.name for child in self.children if child.process is not None]

    def hopeless(self) -> bool:
        """None is there and none will be."""
        return all(child.state is ChildState.GIVEN_UP for child in self.children)

    def tick(self) -> None:
        """See who died, who is silent, whose turn to start has come."""
        now = self._clock()
        for child in self.children:
            process = child.process
            if process is not None:
                if exited(process):
                    self._buried(child)
                elif now - child.heard > self._patience(child):
                    self._kill(child, "silent")
            elif child.state is ChildState.DOWN and now >= child.again:
                self._spawn(child)

    def kill(self, name: str, why: str) -> None:
        child = self._named(name)
        if child is not None and child.process is not None:
            self._kill(child, why)

    def stopping(self) -> None:
        """From now on none is started again; those that end aren't missed. Who loads is killed."""
        for child in self.children:
            loading, child.state = child.state is ChildState.LOADING, ChildState.STOPPING
            if loading and child.process is not None:
                end(child.process)
                child.process = None

    async def ended(self, seconds: float = STOP_SECONDS) -> None:
        """Wait for the end of all; who needs longer is killed."""
        until = self._clock() + seconds
        while self._clock() < until and not all(
            child.process is None or exited(child.process) for child in self.children
        ):
            await asyncio.sleep(0.02)
        self.kill_all()

    def kill_all(self) -> None:
        self.stopping()
        for child in self.children:
            if child.process is not None:
                end(child.process)
                child.process = None

    def _named(self, name: str) -> Child | None:
        return next((child for child in self.children if child.name == name), None)

    def _spawn(self, child: Child) -> None:
        child.starts += 1
        place = WorkerAddress(self._address, child.name, os.getpid(), self._memory)
        command = [sys.executable, "-m", "maskfx.serve.workers.process", *place.arguments()]
        environment = {key: x for key, x in os.environ.items() if key not in SECRETS}
        try:
            # a session of its own: Ctrl-C in the front's terminal isn't for workers
            process = subprocess.Popen(
                command, stdin=subprocess.PIPE, env=environment, start_new_session=True
            )
        except OSError as error:
            log.warning("worker_not_started", worker=child.name, error=error.strerror)
            if error.errno in SCARCE:
                child.state, child.again = ChildState.DOWN, self._clock() + SCARCE_PAUSE
            else:
                self._failed(child)
            return
        child.process, child.state, child.heard = process, ChildState.LOADING, self._clock()
        log.info("worker_started", worker=child.name, pid=process.pid)
        give(process, self._settings.model_dump_json(exclude={"api_key"}).encode())
        if child.starts > 1:
            self._restarted()

    def _kill(self, child: Child, why: str) -> None:
        log.warning("worker_killed", worker=child.name, why=why)
        self._buried(child)

    def _buried(self, child: Child) -> None:
        """A process is over, or is made to be."""
        process, name, was = child.process, child.name, child.state
        assert process is not None
        code = end(process)
        child.process = None
        if was is ChildState.STOPPING:
            return
        log.warning("worker_died", worker=name, code=code, state=was.value)
        if was is ChildState.LOADING and code == REFUSED and not self._loaded:
            self.refused, child.failures = True, self._settings.restarts
        if was is ChildState.LOADING:
            self._failed(child)
        else:
            self._rest(child)
        self._lost(name)

    def _patience(self, child: Child) -> float:
        lost = max(self._settings.lost_seconds, 2 * self._settings.heartbeat_seconds)
        return max(lost, LOADING_SECONDS) if child.state is ChildState.LOADING else lost

    def _failed(self, child: Child) -> None:
        """A start that came to nothing."""
        child.failures += child.starts > 1
        self._rest(child)

    def _rest(self, child: Child) -> None:
        """Until its next start, if there is to be one."""
        if child.failures >= self._settings.restarts:
            child.state = ChildState.GIVEN_UP
            log.error("worker_given_up", worker=child.name, failures=child.failures)
        else:
            pause = min(LONGEST_PAUSE, FIRST_PAUSE * 2**child.failures)
            child.state, child.again = ChildState.DOWN, self._clock() + pause


def give(process: subprocess.Popen[bytes], text: bytes) -> None:
    """All of a process's standard input. If it died already its end will be seen."""
    assert process.stdin is not None
    with contextlib.suppress(BrokenPipeError), process.stdin as stdin:
        stdin.write(text)


def exited(process: subprocess.Popen[bytes]) -> bool:
    """Without reaping it: until then its id stays its own, and its group's."""
    try:
        flags = os.WEXITED | os.WNOHANG | os.WNOWAIT
        return os.waitid(os.P_PID, process.pid, flags) is not None
    except ChildProcessError:
        return True


def end(process: subprocess.Popen[bytes]) -> int:
    """Kill a worker with all that it started. Returns its exit code."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    try:
        return process.wait(timeout=1.0)
    except subprocess.TimeoutExpired:
        return -signal.SIGKILL  # the kernel holds it, in a driver say; it will go
