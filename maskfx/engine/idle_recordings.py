"""IdleRecordings: the templates that an engine records while it runs no request.

A recording is a ticket that takes part in no step of a request: its calls are computed in steps of
their own, and only while no request is queued or running. A request that arrives waits for the
step under way, if there is one, and for no other. Recordings wait in memory, the newest first, and
end with the engine. One whose template a request needs at once is from then on a request itself.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from math import inf
from threading import Condition
from typing import Any

from maskfx.engine.admission.admission import Admission
from maskfx.engine.admission.step_load import steps_left
from maskfx.engine.admission.step_seconds import StepSeconds
from maskfx.engine.ticket import ParkedCalls, Ticket, TicketState
from maskfx.errors import Cancelled
from maskfx.pipelines.compile import pipeline_state_of
from maskfx.pipelines.templates.later import Record
from maskfx.pipelines.waiting import LOOK, Waiting

Run = Callable[[Any, Ticket, Callable[[Any], object]], object]  # runs a request's code

QUIET = 1.0  # the longest time without a request, in seconds, before a step


@dataclass(eq=False)
class IdleRecording:
    """A recording that waits or is under way."""

    ticket: Ticket
    template: str | None = None  # None: not known before it begins
    left: float = inf  # its steps; unknown before the first one
    seen: float = inf  # that number when a request looked last
    starved: int = 0  # requests that looked since it last made a step


class IdleRecordings:
    """The recordings of an engine that no request waits for; one of them is under way at a time.

    All but `queue` is called with the lock of `changed` held.

    Args:
        most: Maximum number of recordings that wait; 0 for none. Beyond it, the oldest of the user
            with the most ends.
        requests: The requests of the engine.
        changed: The engine's condition.
    """

    def __init__(self, most: int, requests: Admission, changed: Condition) -> None:
        self.most = most
        self._changed, self._ended = changed, False
        self.seconds = StepSeconds()
        self.finished = self.dropped = 0
        self._requests = requests
        self._waiting: list[IdleRecording] = []  # the newest last
        self._running: IdleRecording | None = None
        self._steps = inf  # of the latest recording
        self._busy = 0.0  # when a request was seen last
        self._took = 0.0  # seconds of the latest step

    def __len__(self) -> int:
        return len(self._waiting) + (self._running is not None)

    def queue(
        self, pipe: object, run: Run, record: Record, user: str, template: str | None = None
    ) -> Ticket:
        """Queue a recording.

        Args:
            pipe: The pipeline.
            run: Runs code over the pipeline of a ticket.
            record: Records the template over that pipeline.
            user: The user that it is for.
            template: The template, if it is known.
        """

        def work(own: object) -> object:
            return record(own, pipeline_state_of(own))

        pipeline_state_of(pipe)
        ticket = Ticket(lambda: None, user=user, idle=True)
        ticket.work = lambda: run(pipe, ticket, work)
        with self._changed:
            self._add(IdleRecording(ticket, template))
            self._changed.notify_all()
        return ticket

    def of(self, ticket: Ticket, pipe: object, run: Run) -> RequestRecordings | None:
        """Return the recordings as a request sees them; None if there aren't any."""
        if not self.most:
            return None
        return RequestRecordings(self, ticket, partial(self.queue, pipe, run), self._changed)

    def _add(self, recording: IdleRecording) -> None:
        self._waiting.append(recording)
        if self._ended:
            self._drop(recording, "the engine is closed")
        elif len(self._waiting) > self.most:
            users = Counter(one.ticket.user for one in self._waiting)
            (user, _), *_ = users.most_common(1)
            oldest = next(one for one in self._waiting if one.ticket.user == user)
            self._drop(oldest, f"more than {self.most} recordings wait for idle time")

    def find(self, template: str) -> IdleRecording | None:
        """Return the recording of a template; None without one."""
        known = [*self._waiting, *([self._running] if self._running else [])]
        return next((one for one in known if one.template == template), None)

    def renew(self, recording: IdleRecording) -> None:
        """Make a recording the next one."""
        if recording in self._waiting:
            self._waiting.remove(recording)
            self._waiting.append(recording)

    def pays(self, recording: IdleRecording | None, requests: int) -> bool:
        """Return True if an edit should wait for a recording, by the predicted seconds.

        What is left is compared with what a template saves in one edit or, where several requests
        in turn found no progress, in as many: an engine without idle time records too.

        Args:
            recording: The recording; None if there is none.
            requests: The number of requests for the template so far, this one included.
        """
        left, edits = self._steps, requests - 1
        if recording is not None:
            left = min(left, recording.left)
            recording.starved = 0 if recording.left < recording.seen else recording.starved + 1
            recording.seen, edits = recording.left, max(1, recording.starved)
        seconds = self.seconds.recording(left)
        return seconds < inf and self.seconds.saved() * edits >= seconds

    def begin(self, ticket: Ticket, template: str) -> None:
        """Note that a ticket records a template, or waits for one under way.

        A request takes its recording over: one that waits ends, one under way is a request too.
        """
        running = self._running
        if running is not None and running.ticket is ticket:
            running.template = template
            return
        found = self.find(template)
        if found is None:
            return
        if found is not running:
            self._drop(found, "a request records its template")
            return
        ticket = found.ticket
        ticket.idle = False
        self._requests.join(ticket)

    def due(self, now: float) -> list[Ticket]:
        """End stopped recordings; return one to start, if the engine is idle for long enough."""
        for one in [one for one in self._waiting if one.ticket.stopped(now) is not None]:
            self._drop(one, "it was cancelled")
        if self._requests.are_running:
            self._busy = now
        if self._running is not None or not self._waiting or not self._quiet(now):
            return []
        self._running = self._waiting.pop()
        ticket = self._running.ticket
        ticket.state, ticket.started = TicketState.RUNNING, now
        return [ticket]

    def select(self, now: float, parked: Sequence[ParkedCalls]) -> list[ParkedCalls]:
        """Return the calls of a recording that may step now."""
        found = [p for p in parked if p.ticket.idle]
        if not found or self._running is None or not self._quiet(now):
            return []
        self._running.left, self._steps = steps_left(found[0].calls[-1])
        return found

    def note(self, batch: Sequence[ParkedCalls], seconds: float) -> None:
        """Learn from a step of the engine."""
        self.seconds.note(batch, seconds)
        if all(p.ticket.idle for p in batch):
            self._took = seconds
        for p in batch:
            if self._running is not None and p.ticket is self._running.ticket:
                self._running.left = max(0, self._running.left - 1)

    def leave(self, ticket: Ticket) -> None:
        """Note that a ticket has ended."""
        self.seconds.end(ticket)
        if self._running is not None and self._running.ticket is ticket:
            self._running = None
            self.finished += ticket.succeeded
            self.dropped += not ticket.succeeded

    def end(self) -> None:
        """End all recordings; the one under way before its next step."""
        self._ended = True
        for one in list(self._waiting):
            self._drop(one, "the engine is closed")
        if self._running is not None and self._running.ticket.idle:
            self._running.ticket.cancel()

    def _drop(self, recording: IdleRecording, why: str) -> None:
        self._waiting.remove(recording)
        self.dropped += 1
        recording.ticket.finish(error=Cancelled(f"the template isn't recorded ahead: {why}"))

    def _quiet(self, now: float) -> bool:
        """Return True if no request runs, and none did for about the time of a step.

        A request that follows another at once then finds no step under way.
        """
        if self._requests.are_running:
            return False
        return now - self._busy >= min(QUIET, self._took)


@dataclass(frozen=True, eq=False)
class RequestRecordings:
    """The idle recordings of an engine as one of its requests sees them (`LaterRecordings`).

    Args:
        idle: The recordings.
        ticket: The request.
        add: Queues a recording of the same pipeline.
        changed: The engine's condition.
    """

    idle: IdleRecordings
    ticket: Ticket
    add: Callable[[Record, str, str], object]
    changed: Condition

    def begin(self, template: str) -> None:
        with self.changed:
            self.idle.begin(self.ticket, template)
            self.changed.notify_all()

    def waits(self, template: str, record: Record, n: int) -> bool:
        with self.changed:
            found = self.idle.find(template)
            if self.idle.pays(found, n):
                return True
            if found is not None:
                self.idle.renew(found)
                return False
        self.add(record, self.ticket.user, template)
        return False


def wait_apart(ticket: Ticket, waiting: Waiting) -> None:
    """Block until a condition holds, or raise what ends the ticket, which is no request."""
    while not waiting(LOOK):
        stopped = ticket.stopped(time.perf_counter())
        if stopped is not None:
            raise stopped
