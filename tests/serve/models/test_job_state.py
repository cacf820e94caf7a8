"""Jobs in flight that wait for an adapter, or for another one's recording."""

from __future__ import annotations

from typing import Any

import pytest

from maskfx.engine.ticket import TicketState
from maskfx.serve.models.job_runner import JobState
from maskfx.serve.request import Pictures
from tests.factories.served import job


class Submitted:
    """A ticket of the engine, in some state."""

    def __init__(self, state: TicketState) -> None:
        self.state = state


@pytest.mark.parametrize("state", list(TicketState))
def test_a_job_waits_while_its_request_stands_aside(state: TicketState) -> None:
    found = JobState(job(), Pictures())
    assert not found.waits, "before it is submitted"
    ticket: Any = Submitted(state)
    found.submitted(ticket)
    assert found.waits == (state is TicketState.WAITING)
