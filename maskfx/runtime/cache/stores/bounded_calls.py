"""BoundedCalls: calls of an object store that end in time, whether the store answers or not.

All calls of a process run in one event loop, on a thread of its own. After a failure the store is
left alone for a pause: calls fail at once, until a single one is let through as a trial.
"""

from __future__ import annotations

import asyncio
import errno
import functools
import logging
import os
import threading
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any, TypeVar

from maskfx.runtime.cache.stores.objects import Objects, first_line, open_objects

Result = TypeVar("Result")
SECONDS = 15.0  # for one request
PAUSE = 30.0  # after a failure
GRACE = 1.0  # seconds for the event loop to notice the end of a call's time
log = logging.getLogger(__name__)


class Unavailable(OSError):
    """Raised if the store failed, did not answer in time, or is left alone after a failure."""

    def __init__(self, why: str) -> None:
        super().__init__(errno.EIO, why)


class BoundedCalls:
    """Calls of one kind, reads or writes, to one store; thread-safe.

    Args:
        what: The store and the kind of calls, for the log.
        instead: What happens without the store, for the log.
        seconds: The time for one call.
        pause: Seconds after a failure in which no call is made.
        clock: Returns the time in seconds, for the pause.
    """

    def __init__(
        self,
        what: str,
        instead: str,
        seconds: float,
        pause: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._what, self._instead = what, instead
        self.seconds, self._pause, self._clock = seconds, pause, clock
        self._lock = threading.Lock()
        self._until: float | None = None  # end of the pause; None: the last call succeeded
        self.failures = 0  # calls that failed or did not end in time

    @property
    def paused(self) -> bool:
        """Return True while calls fail at once."""
        with self._lock:
            return self._until is not None and self._clock() < self._until

    def run(self, call: Callable[[], Coroutine[Any, Any, Result]], units: int = 1) -> Result:
        """Return the result of a call; raise Unavailable if there is none in time.

        Args:
            call: Makes the coroutine.
            units: How many times the time of one call it may take.
        """
        seconds = self.seconds * units
        self._admit(seconds)
        future = asyncio.run_coroutine_threadsafe(self._timed(call, seconds), loop_of(os.getpid()))
        try:
            return future.result(seconds + GRACE)
        except TimeoutError:  # the event loop itself is held up
            future.cancel()
            raise self._failed(f"no answer in {seconds:g} s") from None

    async def run_in_loop(
        self, call: Callable[[], Coroutine[Any, Any, Result]], units: int = 1
    ) -> Result:
        """Do the same as `run`, from a coroutine of the event loop."""
        seconds = self.seconds * units
        self._admit(seconds)
        return await self._timed(call, seconds)

    async def _timed(
        self, call: Callable[[], Coroutine[Any, Any, Result]], seconds: float
    ) -> Result:
        try:
            result = await asyncio.wait_for(call(), seconds)
        except (TimeoutError, asyncio.CancelledError):
            raise self._failed(f"no answer in {seconds:g} s") from None
        except Exception as error:
            raise self._failed(first_line(error)) from error
        self._succeeded()
        return result

    def _admit(self, seconds: float) -> None:
        with self._lock:
            if self._until is None:
                return
            now = self._clock()
            if now < self._until:
                raise Unavailable(f"{self._what} failed less than {self._pause:g} s ago")
            self._until = now + seconds + GRACE + self._pause  # others wait for this trial

    def _failed(self, why: str) -> Unavailable:
        with self._lock:
            first, self._until = self._until is None, self._clock() + self._pause
            self.failures += 1
        if first:
            log.warning(
                "%s failed: %s; %s, and it is tried again every %g s",
                self._what,
                why,
                self._instead,
                self._pause,
            )
        return Unavailable(f"{self._what} failed: {why}")

    def _succeeded(self) -> None:
        with self._lock:
            again, self._until = self._until is not None, None
        if again:
            log.warning("%s succeed again", self._what)


@dataclass(frozen=True)
class RemoteAccess:
    """The objects below a URL, with its reads and its writes bounded."""

    objects: Objects
    reads: BoundedCalls
    writes: BoundedCalls

    @classmethod
    def of(cls, objects: Objects, seconds: float = SECONDS, pause: float = PAUSE) -> RemoteAccess:
        """Bound the calls of some objects.

        Args:
            objects: The operations.
            seconds: The time for one request, and for each 8 MiB of a payload.
            pause: Seconds after a failure in which no call is made.
        """
        instead = "templates are recorded again, or kept in memory, without it"
        return cls(
            objects,
            BoundedCalls(f"reads from {objects.url}", instead, seconds, pause),
            BoundedCalls(f"writes to {objects.url}", instead, seconds, pause),
        )


@functools.cache
def open_remote(url: str) -> RemoteAccess:
    """Open a URL, once per process; InputError if that isn't possible."""
    return RemoteAccess.of(open_objects(url))


STARTING = threading.Lock()


def loop_of(process: int) -> asyncio.AbstractEventLoop:
    """Return the running event loop of this process; a forked process has another one."""
    with STARTING:
        return start_loop(process)


@functools.cache
def start_loop(process: int) -> asyncio.AbstractEventLoop:
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name=f"maskfx-remote-{process}", daemon=True).start()
    return loop
