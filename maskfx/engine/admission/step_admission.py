"""StepAdmission: which requests' calls may be in a step, as a policy of admission decides.

Used by the engine's loop alone, between two steps. Owns which requests were admitted, and what
they have left; `admission_policy.py` has what decides, `batch_policy.py` when a step starts.
"""

from __future__ import annotations

import logging
import statistics
from collections import deque
from collections.abc import Hashable, Sequence
from dataclasses import replace
from math import isfinite

from maskfx.engine.admission.default_admission import Default, DefaultAdmission
from maskfx.engine.admission.request_estimates import RequestEstimates
from maskfx.engine.step_runner import Step
from maskfx.engine.ticket import ParkedCalls, Ticket, TicketState
from maskfx.errors import DeadlineMissed, InputError
from maskfx.scheduling.admission_policy import AdmissionDecision, AdmissionPolicy, check
from maskfx.scheduling.rounds.round_policy import RoundCall

log = logging.getLogger(__name__)

GAPS = 32  # latest times between two steps that count


class StepAdmission:
    """Admits prepared requests to the steps.

    Args:
        policy: Decides.
        slots: Number of requests that may step together.
    """

    def __init__(self, policy: AdmissionPolicy, slots: int) -> None:
        self.policy, self.slots = policy, slots
        self.dropped = 0  # requests that ended because they couldn't meet their deadline
        self._estimates = RequestEstimates()
        self._admitted: set[Ticket] = set()
        self._active: dict[Ticket, RoundCall] = {}  # admitted, with steps left
        self._decided: Hashable = None  # what the last decision was about
        self._made = 0  # steps
        self._watching = False  # whether the policy has acted, or may when it has seen more steps
        self._ended: tuple[float, set[Ticket]] = 0.0, set()  # the last step: end, requests going on
        self._gaps: deque[float] = deque(maxlen=GAPS)  # seconds between two steps

    def select(self, now: float, parked: Sequence[ParkedCalls]) -> list[ParkedCalls]:
        """Return the calls that may be in the next step; those dropped have an error."""
        self._forget()
        dues = [ticket.due for ticket in {p.ticket for p in parked} | self._admitted]
        acts = self.policy.acts(dues)
        if not acts:
            self._admitted.update(p.ticket for p in parked)
        # a policy that doesn't act yet may do so at the next step
        self._watching |= acts or any(map(isfinite, dues))
        if not self._watching:
            return list(parked)
        new = [p for p in parked if p.ticket not in self._admitted]
        for p in parked:
            if p.ticket in self._admitted:
                self._estimate(p)
        if new:
            self._decide(now, new)
        return [p for p in parked if p.ticket in self._admitted]

    def note(self, batch: Sequence[ParkedCalls], step: Step) -> None:
        """Learn from a step that was made."""
        ended, going = self._ended
        if going and going <= {p.ticket for p in batch}:  # none of them was waited for in vain
            self._gaps.append(max(0.0, step.began - ended))
        self._made += 1
        if not self._watching:
            return
        for p in batch:
            known = self._active.get(p.ticket)
            if known is None or p.error is not None:
                continue
            left = known.left - 1
            if left < 1 and p.calls[-1].recording:
                left = known.steps  # of the edit that may follow: as many, and no longer ones
            if left < 1:
                del self._active[p.ticket]
            else:
                self._active[p.ticket] = replace(known, left=left)
        self._ended = step.ended, {p.ticket for p in batch if not (p.last or p.error)}
        loads = self._estimates.note(batch)
        if loads:
            between = statistics.median(self._gaps) if self._gaps else 0.0
            self.policy.learn(loads, step.seconds + between)

    def _forget(self) -> None:
        self._estimates.forget()
        self._admitted = {ticket for ticket in self._admitted if not ticket.done()}
        self._active = {t: call for t, call in self._active.items() if not t.done()}

    def _estimate(self, parked: ParkedCalls) -> RoundCall | None:
        """Note and return what an admitted request has left, by the call that waits."""
        try:
            found = self._estimates.call(parked)
        except Exception:
            log.exception("a request's step can't be estimated; it isn't planned for")
            self._active.pop(parked.ticket, None)
            return None
        self._active[parked.ticket] = found
        return found

    def _decide(self, now: float, new: Sequence[ParkedCalls]) -> None:
        stepping = {t: call for t, call in self._active.items() if t.state != TicketState.WAITING}
        about = self._made, frozenset(p.ticket for p in new), frozenset(stepping)
        if about == self._decided:
            return
        self._decided = about
        active = list(stepping.values())  # one that waits may wait for one that isn't admitted
        by_id: dict[int, ParkedCalls] = {}
        waiting = []
        for p in new:
            call = self._estimate(p)
            self._active.pop(p.ticket, None)
            if call is None:
                self._admitted.add(p.ticket)
            else:
                waiting.append(call)
                by_id[call.id] = p
        if not waiting:
            return
        calls = {call.id: call for call in waiting}
        if len(active) > self.slots:  # they began before the policy acted
            return
        decision = self._decision(now, waiting, active)
        for number in decision.starts:
            self._admitted.add(by_id[number].ticket)
            self._active[by_id[number].ticket] = calls[number]
        for number, seconds in decision.drops.items():
            self._drop(by_id[number], now, seconds)

    def _decision(
        self, now: float, waiting: Sequence[RoundCall], active: Sequence[RoundCall]
    ) -> AdmissionDecision:
        """Return the policy's decision; if it fails, or starts none beside none, the oldest's."""
        try:
            decision = self.policy.decide(now, waiting, active, self.slots)
            check(decision, waiting, active, self.slots)
        except Exception:
            log.exception("an admission can't be decided; the oldest requests start")
            room = max(0, self.slots - len(active))
            oldest = sorted(waiting, key=lambda call: (call.arrived, call.id))[:room]
            return AdmissionDecision(tuple(call.id for call in oldest))
        left = [call for call in waiting if call.id not in decision.drops]
        if decision.starts or active or not left:
            return decision
        first = min(left, key=lambda call: (call.arrived, call.id))
        return AdmissionDecision((first.id,), decision.drops)

    def _drop(self, parked: ParkedCalls, now: float, seconds: float) -> None:
        self.dropped += 1
        parked.error = DeadlineMissed(
            f"its picture is predicted to take {seconds:.3f} s from now, even alone, and its "
            f"deadline is in {parked.ticket.due - now:.3f} s; it made no step: allow more time, or "
            "submit it when fewer requests run"
        )
        parked.answered.set()


def step_admission(
    asked: AdmissionPolicy | Default | None, slots: int, has_rounds: bool
) -> StepAdmission | None:
    """Return what admits an engine's requests; None if they begin at once, or rounds decide.

    Args:
        asked: `Engine(admission=)`.
        slots: Number of requests that may step together.
        has_rounds: Whether rounds decide which requests step.
    """
    if asked == "default":
        return None if has_rounds else StepAdmission(DefaultAdmission(), slots)
    if asked is not None and has_rounds:
        raise InputError("Engine: rounds= decides which requests step: leave out admission=")
    if asked is not None and not hasattr(asked, "decide"):
        raise InputError(
            f'Engine: admission={asked!r:.60}: give a policy, None, or leave it out ("default")'
        )
    return None if asked is None else StepAdmission(asked, slots)
