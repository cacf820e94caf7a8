"""The simulated engine: what shares the core, which requests join a step, which end when late."""

from __future__ import annotations

from math import inf

import msgspec
import pytest

from bench.simulate.engine_simulation import EngineSimulation
from maskfx.engine.admission.batch_policy import BatchPolicy
from maskfx.scheduling.admission_policy import AdmissionPolicy
from maskfx.scheduling.cost_model import FittedCosts
from maskfx.scheduling.load import Demand, Work
from maskfx.scheduling.slack_admission import SlackAdmission

# a step of any batch takes 1 s; a request 2 s before its steps, and 2 s after them
STEPS = FittedCosts(base=1.0, per_request=0.0, per_site=0.0)
COSTS = msgspec.structs.replace(STEPS, around_base=4.0, decode_share=0.5)


def served(
    *demands: tuple[float, float], steps: int = 3, admission: AdmissionPolicy | None = None
) -> EngineSimulation:
    """Serve requests, each with its arrival and deadline; two may step together."""
    made = EngineSimulation(COSTS, BatchPolicy(batch=2), 2, admission)
    work = Work(64, 64, steps)
    made.run([Demand(str(n), work, at, due) for n, (at, due) in enumerate(demands)])
    return made


def test_requests_share_the_core_and_the_steps() -> None:
    assert served((0.0, inf)).latency == pytest.approx([7.0])
    # both are prepared in 4 s, make three steps together and are decoded in 4 s
    found = served((0.0, inf), (0.0, inf))
    assert found.latency == pytest.approx([11.0, 11.0])
    assert found.batches == [2, 2, 2]
    # prepared beside two steps of the first one, each of which takes twice as long
    found = served((0.0, inf), (2.0, inf))
    assert found.batches == [1, 1, 2, 1, 1]


def test_a_third_request_waits_until_one_is_done() -> None:
    found = served((0.0, inf), (0.0, inf), (0.0, inf))
    assert found.latency == pytest.approx([11.0, 11.0, 18.0])


def test_late_requests_end_between_two_steps_and_before_they_start() -> None:
    found = served((0.0, 3.5), (0.0, 2.5))  # prepared after 4 s
    assert (found.late, found.batches) == (2, [])
    found = served((0.0, 3.5), steps=9)
    assert (found.late, found.batches) == (1, [1, 1])
    found = served((0.0, 6.5))  # its steps are done by then, its picture isn't
    assert (found.late, found.batches) == (1, [1, 1, 1])


def test_the_policy_drops_what_cant_be_in_time() -> None:
    found = served((0.0, 4.5), admission=SlackAdmission(STEPS, fixed=True))
    assert (found.late, found.batches) == (1, [])
    found = served((0.0, 7.5), admission=SlackAdmission(STEPS, fixed=True))
    assert found.latency == pytest.approx([7.0])
