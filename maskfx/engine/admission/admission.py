"""Admission: which requests of an engine are queued, which run, and which wait aside.

A request that waits for another one's recording, or for an adapter, is active but doesn't count
as running, so that another one can be admitted meanwhile.
"""

from __future__ import annotations

import time
from collections import deque
from math import inf, nextafter
from threading import Condition

from maskfx.engine.admission.batch_policy import admitted
from maskfx.engine.ticket import Ticket, TicketState
from maskfx.errors import Busy, Closed
from maskfx.pipelines.waiting import LOOK, Waiting
from maskfx.runtime.hardware.cpu_threads import give_back


class Admission:
    """The requests of an engine that haven't ended.

    All but `step_aside`, `stepping` and `is_full` are called with the lock of `changed` held.

    Args:
        running: maximum number of requests running at once.
        queue: maximum number of requests that wait besides.
        changed: the engine's condition, notified when a request may continue.
    """

    def __init__(self, running: int, queue: int, changed: Condition) -> None:
        self.running, self.queue = running, queue
        self.queued: deque[Ticket] = deque()
        self.active: list[Ticket] = []
        self.aside: list[Ticket] = []  # active, but not counted against `running`
        self._back: deque[Ticket] = deque()  # of those, the ones that are ready to continue
        self._turns: dict[str, int] = {}  # number of each user's last admission
        self._admissions = 0
        self._latest = 0.0  # time of the last admission
        self._changed = changed

    @property
    def is_full(self) -> bool:
        """Whether as many requests are active as may run."""
        return len(self.active) >= self.running

    @property
    def are_over(self) -> bool:
        """Whether no request is queued or active."""
        return not self.active and not self.queued

    @property
    def are_running(self) -> bool:
        """Whether any request is queued, or active and not aside."""
        return len(self.active) > len(self.aside) or bool(self.queued)

    def stepping(self) -> list[Ticket]:
        """Return the requests in their denoising loop; needs no lock."""
        return [t for t in tuple(self.active) if t.state is TicketState.STEPPING]

    def add(self, ticket: Ticket) -> None:
        """Queue a request; raise Busy if the queue is full."""
        waiting = len(self.queued) + len(self.aside)
        if waiting >= self.queue:
            raise Busy(
                f"the queue is full: {waiting} requests wait, and Engine(queue={self.queue}); "
                "submit again later"
            )
        self.queued.append(ticket)

    def admit(self, now: float) -> list[Ticket]:
        """Return the queued requests that run from now on; end those that were stopped.

        Requests that are ready to continue go before queued ones.
        """
        kept: deque[Ticket] = deque()
        for ticket in self.queued:
            stopped = ticket.stopped(now)
            if stopped is None:
                kept.append(ticket)
            else:
                ticket.finish(error=stopped)
        room = self.running - len(self.active) + len(self.aside)
        while self._back and room > 0:
            self.aside.remove(self._back.popleft())
            room -= 1
            self._changed.notify_all()
        users = [t.user for t in self.active]
        waiting = [t.user for t in kept]
        chosen = admitted(waiting, users, room, self._turns) if room > 0 else []
        self._turns = {u: n for u, n in self._turns.items() if u in waiting or u in users}
        for index in chosen:
            ticket = kept[index]
            self._turns[ticket.user] = self._admissions = self._admissions + 1
            self.active.append(ticket)
            # no two are equal: requests admitted together would take turns otherwise
            self._latest = max(now, nextafter(self._latest, inf))
            ticket.state, ticket.started = TicketState.RUNNING, self._latest
        self.queued = deque(t for i, t in enumerate(kept) if i not in chosen)
        return [kept[index] for index in chosen]

    def join(self, ticket: Ticket) -> None:
        """Make a ticket that runs already a request."""
        self._latest = ticket.started = nextafter(max(self._latest, ticket.started), inf)
        self.active.append(ticket)

    def leave(self, ticket: Ticket) -> None:
        """Remove a request that has ended."""
        for kept in (self.active, self.aside, self._back):
            if ticket in kept:
                kept.remove(ticket)

    def end(self, why: str) -> None:
        """Finish all requests with `Closed` and empty the queue."""
        for ticket in (*self.queued, *self.active):
            ticket.finish(error=Closed(f"{why}; submit it to another one"))
        self.queued.clear()

    def step_aside(self, ticket: Ticket, waiting: Waiting) -> None:
        """Block until another request has recorded a template, or an adapter is loaded.

        Then wait until the request may run again.
        """

        def go_on() -> None:
            stopped = ticket.stopped(time.perf_counter())
            if stopped is not None:
                raise stopped

        with self._changed:
            self.aside.append(ticket)
            ticket.state = TicketState.WAITING
            self._changed.notify_all()
        give_back()
        while not waiting(LOOK):
            go_on()
        with self._changed:
            self._back.append(ticket)
            self._changed.notify_all()
            while ticket in self.aside:
                go_on()
                self._changed.wait(LOOK)
            ticket.state = TicketState.RUNNING
