"""Supervises worker processes: starts, watches, kills silent ones, restarts and gives up.

Knows workers and the time of their last message; an `Executor` knows where they run, and
`frontend/dispatch.py` owns their work.
"""

from __future__ import annotations

import asyncio
import errno
import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from itertools import count

import structlog

from maskfx.serve.config import ServeSettings
from maskfx.serve.workers.executor import LOCAL, Executor, RunningWorker, WorkerAddress
from maskfx.serve.workers.link_keys import RemoteAddress
from maskfx.serve.workers.process import REFUSED

FIRST_PAUSE, LONGEST_PAUSE = 0.1, 5.0  # seconds before a restart; the pause doubles per failure
LOADING_SECONDS = 60.0  # tolerated silence while loading: importing a library blocks all threads
STOP_SECONDS = 5.0  # from "stop" to SIGKILL
SCARCE_PAUSE = 1.0
# a process couldn't be started for lack of a transient resource: not counted as a worker failure
SCARCE = (errno.EAGAIN, errno.EMFILE, errno.ENFILE, errno.ENOMEM)

log = structlog.get_logger(__name__)


class ChildState(Enum):
    """The state of a worker."""

    DOWN = "down"  # until the time `Child.again`
    LOADING = "loading"
    READY = "ready"
    RETIRING = "retiring"  # it ends for good
    STOPPING = "stopping"
    GIVEN_UP = "given_up"


@dataclass(eq=False)
class Child:
    """One worker slot with its current process, across restarts."""

    index: int
    starts: int = 0
    failures: int = 0  # consecutive failed restarts
    state: ChildState = ChildState.DOWN
    again: float = 0.0
    heard: float = 0.0
    process: RunningWorker | None = None

    @property
    def name(self) -> str:
        """The current process's name, unique per start so that late messages are recognised."""
        return f"worker-{self.index}.{self.starts}"


class Workers:
    """Supervises all workers.

    Args:
        settings: Settings of the server.
        address: Address of the front end's socket.
        lost: Called with the name of each process that died.
        restarted: Called at each restart.
        clock: Monotonic clock.
        executor: Starts the workers; defaults to child processes of this one.
        remote: The front end's address for workers of other machines, if there can be any.
    """

    def __init__(
        self,
        settings: ServeSettings,
        address: str,
        lost: Callable[[str], None],
        restarted: Callable[[], None],
        clock: Callable[[], float] = time.monotonic,
        executor: Executor = LOCAL,
        remote: RemoteAddress | None = None,
    ) -> None:
        self._executor = executor
        self._settings, self._address, self._remote = settings, address, remote
        self._lost, self._restarted, self._clock = lost, restarted, clock
        self._indices = count()
        self.children = [Child(next(self._indices)) for _ in range(settings.workers)]
        self.refused = False  # a worker reported that its model can't be loaded at all
        self._loaded = False  # whether any worker has ever loaded the model

    def start(self) -> None:
        self._executor.expect(len(self.children))
        for child in self.children:
            self._spawn(child)

    def add(self) -> None:
        """Start one more worker."""
        self.children.append(Child(next(self._indices)))
        self._executor.expect(self.count())
        self._spawn(self.children[-1])

    def retire(self, name: str) -> None:
        """Remove a worker that was asked to stop, or kill it if it isn't ready."""
        child = self._named(name)
        if child is None:
            return
        ready, child.state = child.state is ChildState.READY, ChildState.RETIRING
        log.info("worker_retired", worker=name)
        self._executor.expect(self.count())  # before it ends, whose place is given back then
        if child.process is None:
            self.children.remove(child)
        elif not ready:
            self._end(child)

    def count(self) -> int:
        """Return the number of workers without retired ones; those given up aren't replaced."""
        return sum(child.state is not ChildState.RETIRING for child in self.children)

    def unplaced(self) -> str | None:
        """Return the name of the newest worker that waits for a machine or for its start."""
        for child in reversed(self.children):
            waits = child.process is not None and child.process.waiting()
            if waits or child.state is ChildState.DOWN:
                return child.name
        return None

    def ready(self, name: str) -> bool:
        """Mark a loading worker as ready; return False if no current process has this name."""
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
        """Return the names of running processes."""
        return [child.name for child in self.children if child.process is not None]

    def hopeless(self) -> bool:
        """Return True if all workers are given up."""
        return all(child.state is ChildState.GIVEN_UP for child in self.children)

    def tick(self) -> None:
        """Handle dead processes, kill silent ones, and start those whose pause is over."""
        now = self._clock()
        for child in list(self.children):
            process = child.process
            if process is not None:
                if process.waiting():
                    child.heard = now
                if process.exited():
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
        """Stop restarting and reporting ended processes; kill the processes that are loading."""
        for child in self.children:
            loading, child.state = child.state is ChildState.LOADING, ChildState.STOPPING
            if loading and child.process is not None:
                child.process.end()
                child.process = None

    async def ended(self, seconds: float = STOP_SECONDS) -> None:
        """Wait for all processes to end; kill the remaining ones after `seconds`."""
        until = self._clock() + seconds
        while self._clock() < until and not all(
            child.process is None or child.process.exited() for child in self.children
        ):
            await asyncio.sleep(0.02)
        self.kill_all()

    def close(self) -> None:
        """Close what ran the workers; all have ended."""
        self._executor.close()

    def kill_all(self) -> None:
        self.stopping()
        for child in self.children:
            if child.process is not None:
                child.process.end()
                child.process = None

    def _named(self, name: str) -> Child | None:
        return next((child for child in self.children if child.name == name), None)

    def _spawn(self, child: Child) -> None:
        child.starts += 1
        place = WorkerAddress(self._address, child.name, self._remote)
        try:
            process = self._executor.start(place, self._settings)
        except OSError as error:
            log.warning("worker_not_started", worker=child.name, error=error.strerror)
            if error.errno in SCARCE:
                child.state, child.again = ChildState.DOWN, self._clock() + SCARCE_PAUSE
            else:
                self._failed(child)
            return
        child.process, child.state, child.heard = process, ChildState.LOADING, self._clock()
        log.info("worker_started", worker=child.name, pid=process.pid)
        if child.starts > 1:
            self._restarted()

    def _kill(self, child: Child, why: str) -> None:
        log.warning("worker_killed", worker=child.name, why=why)
        self._buried(child)

    def _buried(self, child: Child) -> None:
        """End a process if it still runs, account for its death and report it."""
        name, was, code = child.name, child.state, self._end(child)
        if was is ChildState.STOPPING:
            return
        if was is ChildState.RETIRING:
            self._lost(name)
            return
        log.warning("worker_died", worker=name, code=code, state=was.value)
        if was is ChildState.LOADING and code == REFUSED and not self._loaded:
            self.refused, child.failures = True, self._settings.restarts
        if was is ChildState.LOADING:
            self._failed(child)
        else:
            self._rest(child)
        self._lost(name)

    def _end(self, child: Child) -> int:
        """End a child's process and return its exit code; a retired child is forgotten."""
        assert child.process is not None
        code = child.process.end()
        child.process = None
        if child.state is ChildState.RETIRING:
            self.children.remove(child)
        return code

    def _patience(self, child: Child) -> float:
        lost = max(self._settings.lost_seconds, 2 * self._settings.heartbeat_seconds)
        return max(lost, LOADING_SECONDS) if child.state is ChildState.LOADING else lost

    def _failed(self, child: Child) -> None:
        """Count a failed restart and schedule the next one; a failed first start isn't counted."""
        child.failures += child.starts > 1
        self._rest(child)

    def _rest(self, child: Child) -> None:
        """Schedule the next start, or give the worker up after too many failures."""
        if child.failures >= self._settings.restarts:
            child.state = ChildState.GIVEN_UP
            log.error("worker_given_up", worker=child.name, failures=child.failures)
        else:
            pause = min(LONGEST_PAUSE, FIRST_PAUSE * 2**child.failures)
            child.state, child.again = ChildState.DOWN, self._clock() + pause
