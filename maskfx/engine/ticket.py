"""Ticket: the handle and state of one request in the engine, from submission to its image."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from math import inf
from typing import Any, TypeVar

from maskfx.errors import Cancelled, DeadlineMissed
from maskfx.ir.argument_checks import check_number
from maskfx.ir.geometry.level_shares import MaskWork
from maskfx.pipelines.runs.run import DenoiserCall
from maskfx.runtime.hardware.cpu_threads import give_back
from maskfx.runtime.reuse.patch_calls import PatchCounts
from maskfx.runtime.step_kinds import StepKind

log = logging.getLogger(__name__)

T = TypeVar("T")


class TicketState(Enum):
    """The state of a request."""

    QUEUED = "queued"
    RUNNING = "running"  # before its first step, or after its last
    STEPPING = "stepping"
    WAITING = "waiting"  # for another request's template or an adapter; doesn't count as running
    DONE = "done"


@dataclass(frozen=True)
class AnsweredStep:
    """Timing of a step for one of its requests, in seconds of the engine's clock (`perf_counter`).

    Args:
        number: index of the step in the request's run, from 0.
        recording: True if the step records a template.
        asked: time at which the request submitted its denoiser call.
        began: time at which the step started.
        ended: time at which the step ended.
    """

    number: int
    recording: bool
    asked: float
    began: float
    ended: float


Told = Callable[[AnsweredStep], None]


@dataclass(eq=False)
class Ticket:
    """A submitted request; `result()` blocks until its image is done or raises its error."""

    work: Callable[[], object]
    due: float = inf  # deadline on the engine's clock
    user: str = ""
    told: Told | None = None  # callback after each of the request's steps, in the engine's thread
    state: TicketState = TicketState.QUEUED
    submitted: float = field(default_factory=time.perf_counter)
    started: float = inf
    first_step: float = inf
    finished: float = inf
    steps: int = 0
    sites: int = 0  # computed so far, not counting the recording of a template
    whole: int = 0  # sites that dense steps would have computed
    patches: PatchCounts = field(default_factory=PatchCounts)  # of calls that may reuse patches
    idle: bool = False  # a recording that no request waits for: steps while no request runs
    _value: object = None
    _error: BaseException | None = None
    _cancelled: bool = False
    _done: threading.Event = field(default_factory=threading.Event)

    def result(self, timeout: float | None = None) -> Any:
        check_number("result", "timeout", timeout, "seconds", or_none=True)
        give_back()
        if not self._done.wait(timeout):
            raise TimeoutError(
                f"no picture within {timeout} s; the request is {self.state.value}: wait again, or "
                "cancel()"
            )
        if self._error is not None:
            raise self._error
        return self._value

    def done(self) -> bool:
        return self._done.is_set()

    @property
    def succeeded(self) -> bool:
        """Whether it has a result."""
        return self._done.is_set() and self._error is None

    def cancel(self) -> None:
        """Cancel the request; the engine drops it before its next step."""
        self._cancelled = True

    def stopped(self, now: float) -> Exception | None:
        """Return the error that ends the request (cancelled, deadline missed), or None."""
        if isinstance(self._error, Exception):  # set by the engine when it closes
            return self._error
        if self._cancelled:
            return Cancelled(f"cancelled after {self.steps} steps")
        if now > self.due:
            late = now - self.due
            return DeadlineMissed(f"its deadline passed {late:.3f} s ago, after {self.steps} steps")
        return None

    def finish(self, value: object = None, error: BaseException | None = None) -> None:
        if self._done.is_set():
            return
        self._value, self._error = value, error
        self.state, self.finished = TicketState.DONE, time.perf_counter()
        self._done.set()


@dataclass(frozen=True)
class MemberWork:
    """What a request computes in one step, summed over its guidance branches.

    Args:
        kind: what its denoiser call computes.
        samples: number of pictures, one per guidance branch.
        sites: number of sites computed.
        whole: number of all sites.
        first: whether it is the first step of its run, which prepares tables and texts.
        work: what the sites take at all levels, if it is known.
    """

    kind: StepKind
    samples: int
    sites: int
    whole: int
    first: bool = False
    work: MaskWork | None = None


@dataclass(eq=False)
class ParkedCalls:
    """Denoiser calls of one request that wait for a step."""

    ticket: Ticket
    calls: list[DenoiserCall]
    at: float
    last: bool = False  # call of its run: later steps needn't wait for this request
    overtaken: int = 0  # number of steps that ran calls of requests admitted later instead
    error: Exception | None = None
    answered: threading.Event = field(default_factory=threading.Event)

    def member(self) -> MemberWork:
        """Return what the calls computed.

        Counts one network only: a second one beside the denoiser has the same sites again.
        """
        own = [call for call in self.calls if call.name == self.calls[-1].name]
        samples, sites, whole = (
            sum(getattr(call, name) for call in own) for name in ("samples", "sites", "whole")
        )
        works = [call.work for call in own if call.work is not None]
        work = MaskWork(*map(sum, zip(*works, strict=True))) if len(works) == len(own) else None
        first = self.calls[-1].step == 0
        return MemberWork(self.calls[-1].kind, samples, sites, whole, first, work)


def tell(told: Callable[[T], None], what: T) -> None:
    """Call a step callback; log its exception, which must not end the engine's loop."""
    try:
        told(what)
    except Exception:
        log.exception("the callback for the engine's steps failed")
