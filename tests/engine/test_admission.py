"""Admission: the order of requests that are admitted together."""

from threading import Condition
from types import SimpleNamespace
from typing import Any

from maskfx.engine.admission.admission import Admission


def test_requests_that_are_admitted_together_have_an_order() -> None:
    """With equal times they would take turns in full steps, and all of them would end late."""
    admission = Admission(4, 8, Condition())
    tickets: list[Any] = [SimpleNamespace(user="", stopped=lambda now: None) for _ in range(3)]
    admission.queued.extend(tickets)
    assert admission.admit(5.0) == tickets
    times = [ticket.started for ticket in tickets]
    assert times == sorted(set(times))
    assert times[-1] - 5.0 < 1e-6
