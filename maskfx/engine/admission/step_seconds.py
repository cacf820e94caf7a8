"""StepSeconds: what steps of edits and recordings took, to predict what a template saves."""

from __future__ import annotations

import statistics
from collections import Counter, deque
from collections.abc import Sequence
from math import inf

from maskfx.engine.ticket import ParkedCalls, Ticket
from maskfx.pipelines.handlers.edit_handler import EditHandler

SEEN = 16  # latest steps of a kind, and edits, that count


class StepSeconds:
    """Seconds of steps that one request made alone, per site of its picture, by what they compute.

    An edit without a template computes all sites in some of its steps, and one with a template in
    none. Knows no deadlines and no requests that share a step.
    """

    def __init__(self) -> None:
        self._recorded, self._whole, self._masked = (deque[float](maxlen=SEEN) for _ in range(3))
        self._counts: deque[int] = deque(maxlen=SEEN)  # steps with all sites, of such an edit
        self._under_way: Counter[Ticket] = Counter()

    def note(self, batch: Sequence[ParkedCalls], seconds: float) -> None:
        """Learn from a step."""
        for p in batch:
            member = p.member()
            seen = self._like(p, member.sites == member.whole)
            if seen is self._whole:
                self._under_way[p.ticket] += 1
            if seen is not None and len(batch) == 1 and not member.first:
                seen.append(seconds / max(1, member.whole))

    def _like(self, parked: ParkedCalls, whole: bool) -> deque[float] | None:
        """Return the seconds of such steps; None for those that predict nothing."""
        handler = parked.calls[-1].run.handler
        if handler.records:
            return self._recorded
        if not isinstance(handler, EditHandler):
            return None
        if not whole:
            return self._masked
        return self._whole if handler.template is None else None

    def end(self, ticket: Ticket) -> None:
        """Note the end of a request."""
        count = self._under_way.pop(ticket, 0)
        if count:
            self._counts.append(count)

    def saved(self) -> float:
        """Return the predicted seconds by which a template shortens an edit; 0 if unknown."""
        if not (self._counts and self._whole and self._masked):
            return 0.0
        longer = statistics.median(self._whole) - statistics.median(self._masked)
        return statistics.median(self._counts) * max(0.0, longer)

    def recording(self, steps: float) -> float:
        """Return the predicted seconds of these steps of a recording; infinite if unknown."""
        return steps * statistics.median(self._recorded) if self._recorded else inf
