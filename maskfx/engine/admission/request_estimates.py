"""RequestEstimates: what remains of requests, by their calls and by what others took.

For the policies of rounds and of admission. Used by one thread at a time; knows no policy.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections import defaultdict, deque
from collections.abc import Hashable, Sequence

from maskfx.engine.admission.step_load import load_ahead, load_of, steps_left
from maskfx.engine.ticket import ParkedCalls, Ticket
from maskfx.scheduling.rounds.round_policy import RoundCall, StepLoad

DECODES = 8  # latest times from the last step to the result that count, by size of the picture


class RequestEstimates:
    """Estimates the steps of requests whose calls wait, from masks and from their steps so far."""

    def __init__(self) -> None:
        self._numbers: dict[Ticket, int] = {}
        self._numbered = itertools.count()
        self._shares: dict[tuple[Ticket, bool], float] = {}  # of computed sites, by last step
        self._warm: set[Hashable] = set()  # kinds of steps that were made
        self._decoding: dict[Ticket, tuple[float, int]] = {}  # end of last step, sites
        self._decodes: defaultdict[int, deque[float]] = defaultdict(lambda: deque(maxlen=DECODES))

    def number(self, ticket: Ticket) -> int:
        if ticket not in self._numbers:
            self._numbers[ticket] = next(self._numbered)
        return self._numbers[ticket]

    def call(self, parked: ParkedCalls) -> RoundCall:
        """Return what remains of a request whose call waits."""
        ticket, recording = parked.ticket, parked.calls[-1].recording
        load = load_ahead(parked.calls, self._shares.get((ticket, recording)))
        left, steps = steps_left(parked.calls[-1])
        decodes = self._decodes.get(load.whole)
        after = statistics.median(decodes) if decodes else 0.0
        number = self.number(ticket)
        return RoundCall(
            number, load, left, steps, ticket.submitted, ticket.due, after, ticket.user
        )

    def note(self, batch: Sequence[ParkedCalls], where: Hashable = ()) -> list[StepLoad]:
        """Note a step that was made; return its loads, or none if its seconds aren't usual.

        A first step of its kind compiles, a recording is rare, and a failed one stopped early.

        Args:
            batch: The calls of the requests that made it.
            where: What computed it, such as the ranks.
        """
        now, fresh = time.perf_counter(), False
        loads = [load_of(parked.calls) for parked in batch]
        for parked, load in zip(batch, loads, strict=True):
            ticket, recording = parked.ticket, parked.calls[-1].recording
            self._shares[ticket, recording] = load.sites / load.whole
            if parked.last and not recording:
                self._decoding[ticket] = now, load.whole
            kind = id(parked.calls[-1].denoiser), where, load.whole, load.sites < load.whole
            fresh |= kind not in self._warm
            self._warm.add(kind)
        recordings = any(parked.calls[-1].recording for parked in batch)
        failed = any(parked.error for parked in batch)
        return [] if fresh or recordings or failed else loads

    def forget(self) -> None:
        """Forget the requests that are done, and note how long they took after their last step."""
        for ticket, (ended, whole) in list(self._decoding.items()):
            if ticket.done():
                del self._decoding[ticket]
                self._decodes[whole].append(max(0.0, ticket.finished - ended))
        for key in [key for key in self._shares if key[0].done()]:
            del self._shares[key]
        self._numbers = {t: number for t, number in self._numbers.items() if not t.done()}
