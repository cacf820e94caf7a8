"""Parked: the denoiser calls that wait for a step of an engine."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from threading import Condition

from maskfx.engine.ticket import ParkedCalls, Ticket, TicketState
from maskfx.pipelines.waiting import LOOK


class Parked:
    """The waiting calls; all but `take` is called with the lock of `changed` held.

    Args:
        changed: The engine's condition, notified when there are further calls.
    """

    def __init__(self, changed: Condition) -> None:
        self.calls: list[ParkedCalls] = []
        self._changed = changed

    def add(self, parked: ParkedCalls) -> None:
        self.calls.append(parked)
        self._changed.notify_all()

    def remove(self, taken: Collection[ParkedCalls]) -> None:
        self.calls = [p for p in self.calls if p not in taken]

    def drop(self, now: float) -> None:
        """End the calls of stopped requests."""
        for p in self.calls:
            p.error = p.ticket.stopped(now)
            if p.error is not None:
                p.answered.set()
        self.calls = [p for p in self.calls if p.error is None]

    def take(
        self, tickets: Collection[Ticket], first: float, others: float, ended: Callable[[], bool]
    ) -> list[ParkedCalls]:
        """Wait for the next calls of these requests, and return them.

        Args:
            tickets: The requests; those that end or finish their steps aren't waited for.
            first: Seconds to wait for any call.
            others: Seconds to wait for further ones.
            ended: Returns True if no further step runs.
        """
        began = time.perf_counter()
        with self._changed:
            while True:
                now = time.perf_counter()
                self.drop(now)
                found = [p for p in self.calls if p.ticket in tickets]
                coming = [t for t in tickets if t.state is TicketState.STEPPING]
                left = began + (others if found else first) - now
                if len(found) >= len(coming) or left <= 0 or ended():
                    self.remove(found)
                    return found
                self._changed.wait(min(left, LOOK))
