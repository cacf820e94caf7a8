"""Ticket: one request's place in the engine, from its submission to its picture."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from math import inf
from typing import Any

from maskfx.errors import Cancelled, DeadlineMissed
from maskfx.pipelines.run import DenoiserCall
from maskfx.runtime.cpu_threads import give_back

log = logging.getLogger(__name__)


class TicketState(Enum):
    """Where a request is."""

    QUEUED = "queued"
    RUNNING = "running"  # before its first step, or after its last
    STEPPING = "stepping"
    WAITING = "waiting"  # for a template that another request records; it has no place meanwhile
    DONE = "done"


@dataclass(frozen=True)
class AnsweredStep:
    """A step as one of its requests saw it, in seconds of the engine's clock (`perf_counter`)."""

    number: int  # of its run, from 0
    recording: bool  # of a template
    asked: float  # when the request's call came
    began: float
    ended: float


Told = Callable[[AnsweredStep], None]


@dataclass(eq=False)
class Ticket:
    """A request; `result()` waits for its picture and raises what went wrong."""

    work: Callable[[], Any]
    due: float = inf  # on the engine's clock
    user: str = ""
    told: Told | None = None  # hears of each of its steps, in the engine's thread
    state: TicketState = TicketState.QUEUED
    submitted: float = field(default_factory=time.perf_counter)
    started: float = inf
    first_step: float = inf
    finished: float = inf
    steps: int = 0
    sites: int = 0  # computed for the picture so far, a template's recording aside
    whole: int = 0  # that dense steps would have computed
    _value: Any = None
    _error: BaseException | None = None
    _cancelled: bool = False
    _done: threading.Event = field(default_factory=threading.Event)

    def result(self, timeout: float | None = None) -> Any:
        give_back()
        if not self._done.wait(timeout):
            raise TimeoutError(f"no picture within {timeout} s; the request is {self.state.value}")
        if self._error is not None:
            raise self._error
        return self._value

    def done(self) -> bool:
        return self._done.is_set()

    def cancel(self) -> None:
        """Give the request up: the engine lets it go before its next step."""
        self._cancelled = True

    def stopped(self, now: float) -> Exception | None:
        """Why the request mustn't go on, if it mustn't."""
        if isinstance(self._error, Exception):  # given up by the engine itself
            return self._error
        if self._cancelled:
            return Cancelled(f"cancelled after {self.steps} steps")
        if now > self.due:
            late = now - self.due
            return DeadlineMissed(f"its deadline passed {late:.3f} s ago, after {self.steps} steps")
        return None

    def finish(self, value: Any = None, error: BaseException | None = None) -> None:
        if self._done.is_set():
            return
        self._value, self._error = value, error
        self.state, self.finished = TicketState.DONE, time.perf_counter()
        self._done.set()


@dataclass(eq=False)
class ParkedCalls:
    """Calls of one request that wait for a step."""

    ticket: Ticket
    calls: list[DenoiserCall]
    at: float
    last: bool = False  # of its run: nobody need wait for the request after this
    overtaken: int = 0  # in so many steps, by requests that were let in later
    error: Exception | None = None
    answered: threading.Event = field(default_factory=threading.Event)

    def sites(self) -> tuple[int, int]:
        """Computed, and had; a network beside the denoiser has the same sites once more."""
        own = [call for call in self.calls if call.name == self.calls[-1].name]
        return sum(call.sites for call in own), sum(call.whole for call in own)


def tell(told: Callable[[Any], None], what: Any) -> None:
    """Who listens mustn't end the loop."""
    try:
        told(what)
    except Exception:
        log.exception("what hears of the engine's steps failed")
