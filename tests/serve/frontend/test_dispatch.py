"""Requests between arrival and answer, step by step: workers and time are the test's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest

from maskfx.runtime.step_kinds import StepKind
from maskfx.scheduling.cost_model import START, LearnedCosts
from maskfx.scheduling.load import TemplateTier
from maskfx.scheduling.router import make_router
from maskfx.scheduling.scheduler import SlackScheduler
from maskfx.scheduling.step_reports import LoadFacts, StepMember, Stepped
from maskfx.serve.errors import ApiError
from maskfx.serve.frontend.dispatch import Dispatch
from maskfx.serve.frontend.ticket import Answer, RequestTicket, new_ticket, picture_name
from maskfx.serve.messages import (
    Cancel,
    Done,
    Failed,
    Job,
    JobProgress,
    JobSpan,
    Prefetch,
    PreviewSent,
    ToWorker,
)
from maskfx.serve.metrics import Metrics
from maskfx.serve.request import Card, Finished, Preview, RequestKind
from maskfx.serve.workers.pixels import Part
from tests.serve.fronts import InOrder, PlainCosts, request

CARD = Card("m", "F", (64, 48), 8, 4, None, frozenset({"image", "mask", "template"}), True)
PICTURE = np.full((48, 64, 3), 9, np.uint8)
DRAWN = PICTURE.shape


@dataclass
class Desk:
    """A dispatch with what it reported."""

    dispatch: Dispatch
    metrics: Metrics
    now: list[float]
    said: list[tuple[str, ToWorker]] = field(default_factory=list)
    there: bool = True

    def enter(self, id: str, **fields: Any) -> RequestTicket:
        ticket = new_ticket(id, *request(id, **fields), CARD, 0, self.now[0])
        self.dispatch.enter(ticket)
        return ticket

    def jobs(self) -> list[tuple[str, str, int]]:
        """What was started where, which time; since the last question."""
        jobs = [(worker, m.id, m.attempt) for worker, m in self.said if isinstance(m, Job)]
        self.said.clear()
        return jobs

    def done(self, worker: str, id: str, attempt: int = 1) -> None:
        done = Done(id=id, attempt=attempt, pixels=DRAWN, steps=4)
        self.dispatch.done(worker, done, [PICTURE.tobytes()])

    def failed(self, worker: str, id: str, code: str, attempt: int = 1) -> None:
        self.dispatch.failed(worker, Failed(id, attempt, code, "why"))


@pytest.fixture
def context() -> Desk:
    metrics, now = Metrics(), [100.0]

    def send(worker: str, message: ToWorker, parts: Sequence[Part] = ()) -> bool:
        made.said.append((worker, message))
        return made.there

    costs = PlainCosts(1.0)
    made = Desk(Dispatch(InOrder(costs), costs, send, metrics, lambda: now[0]), metrics, now)
    made.dispatch.joined("w", 8)
    return made


def answers(ticket: RequestTicket) -> list[Answer]:
    return [ticket.answers.get_nowait() for _ in range(ticket.answers.qsize())]


def only(ticket: RequestTicket) -> Answer:
    (answer,) = answers(ticket)
    return answer


def code(ticket: RequestTicket) -> str:
    error = only(ticket)
    assert isinstance(error, ApiError)
    return error.code


def test_a_worker_says_what_it_can_read_from_disk(context: Desk) -> None:
    context.dispatch.joined("v", 8, {"hat": 70})
    pool = context.dispatch.pool
    assert (pool.size("hat"), pool.with_template("hat")) == (70, ("w", "v"))


def test_times_of_another_machine_are_moved_to_this_clock(context: Desk) -> None:
    class Trace:
        def __init__(self) -> None:
            self.spans: list[JobSpan] = []

        def started(self, *_: object) -> None: ...

        def spent(self, span: JobSpan) -> None:
            self.spans.append(span)

    ticket = context.enter("a")
    ticket.trace = trace = Trace()  # type: ignore[assignment]
    context.dispatch.decide()
    here = JobSpan("a", 1, "step", 97.0, 99.0, 0)
    context.dispatch.spell("w", here)
    context.dispatch.spell("w", here.shifted(-100.0, relative=True))
    assert trace.spans == [here, here]


def test_a_generated_pictures_recording_is_known_by_the_picture(context: Desk) -> None:
    context.enter("a", kind=RequestKind.GENERATE, images=(), mask=None)
    context.dispatch.decide()
    said: dict[str, Any] = {"pixels": DRAWN, "template": "t", "template_bytes": {"host": 5}}
    context.dispatch.done("w", Done(id="a", attempt=1, steps=4, **said), [PICTURE.tobytes()])
    assert context.dispatch.pool.sizes(picture_name(PICTURE)) == {"host": 5}
    assert not context.dispatch.pool.with_template("t")


def test_where_only_made_pictures_are_edited_their_worker_edits_them(context: Desk) -> None:
    """Other workers have no recording of the picture, and can't make one."""
    context.dispatch.joined("v", 8)
    pool, name = context.dispatch.pool, picture_name(PICTURE)
    pool.warmed_in_memory("w", name, {"host": 5})
    pool.mates["w"].load.slots = 1
    own = replace(CARD, takes=frozenset({"image", "mask"}))
    for id in "ab":
        given = request(id, images=(PICTURE,))
        context.dispatch.enter(new_ticket(id, *given, own, 0, 100.0, name))
    context.dispatch.decide()
    assert context.jobs() == [("w", "a", 1)], "the other one waits"
    context.enter("c", images=(PICTURE,))
    context.dispatch.decide()
    assert context.jobs() == [("v", "c", 1)]
    context.done("w", "a")
    context.dispatch.decide()
    assert context.jobs() == [("w", "b", 1)]
    context.dispatch.lost("w")
    context.dispatch.decide()
    assert context.jobs() == [("v", "b", 2)], "a worker reports that none has it"


def test_what_a_worker_measured_of_its_loads_reaches_the_costs(context: Desk) -> None:
    facts = LoadFacts(1e9, 0.5, 0.4, 1e-10)
    context.dispatch.joined("v", 8, {}, facts)
    assert context.dispatch._costs.loads == [facts]  # type: ignore[attr-defined]


def test_a_waiting_requests_template_is_read_by_the_least_busy_worker(context: Desk) -> None:
    context.dispatch.joined("v", 8, {"hat": 70})
    for name in "wv":
        context.dispatch.pool.mates[name].load.slots = 1
    context.enter("a")
    context.enter("b")
    context.dispatch.decide()
    context.dispatch.progress("v", JobProgress("b", 1, 3, 4))
    context.said.clear()
    context.enter("c", template="hat")
    context.enter("d", template="unheard of")
    context.dispatch.decide()
    assert context.said == [("v", Prefetch("hat"))]
    assert context.dispatch.pool.mates["v"].load.warm["hat"] is TemplateTier.HOST
    context.dispatch.decide()
    assert len(context.said) == 1, "read once"


def test_a_request_is_started_and_answered(context: Desk) -> None:
    ticket = context.enter("a")
    context.now[0] += 2
    context.dispatch.decide()
    assert context.jobs() == [("w", "a", 1)]
    context.now[0] += 3
    context.done("w", "a")
    finished = only(ticket)
    assert isinstance(finished, Finished)
    assert (finished.seconds, finished.queued, finished.tries) == (5, 2, 1)
    assert finished.dense_seconds == 4
    assert np.array_equal(finished.pixels, PICTURE)
    assert len(context.dispatch) == 0


def test_a_late_duplicate_is_dropped(context: Desk) -> None:
    ticket = context.enter("a")
    context.dispatch.decide()
    context.dispatch.joined("v", 8)
    context.dispatch.lost("w")
    context.dispatch.decide()
    assert context.jobs() == [("w", "a", 1), ("v", "a", 2)]
    context.done("w", "a", attempt=1)
    context.done("v", "a", attempt=1)
    assert not answers(ticket)
    context.done("v", "a", attempt=2)
    context.done("v", "a", attempt=2)
    assert isinstance(only(ticket), Finished)


def test_the_requeued_come_first_in_their_order(context: Desk) -> None:
    context.dispatch.pool.mates["w"].load.slots = 2
    for id in "abc":
        context.enter(id)
        context.now[0] += 1
    context.dispatch.decide()
    context.dispatch.lost("w")
    assert list(context.dispatch.waiting) == ["a", "b", "c"]


def test_three_deaths_are_the_end_and_the_third_time_it_was_alone(context: Desk) -> None:
    poison, mate = context.enter("p"), context.enter("m")
    for attempt, name in enumerate(("w", "x", "y", "z"), 1):
        if name != "w":
            context.dispatch.joined(name, 8)
        context.dispatch.decide()
        started = context.jobs()
        if attempt < 3:
            assert started == [(name, "p", attempt), (name, "m", attempt)]
        elif attempt == 3:
            assert started == [(name, "p", 3)]
        else:
            assert started == [(name, "m", 3)]
            break
        context.dispatch.lost(name)
    assert code(poison) == "worker_lost"
    context.done("z", "m", 3)
    assert isinstance(only(mate), Finished)


def test_others_go_on_elsewhere_while_one_runs_alone(context: Desk) -> None:
    unlucky = context.enter("u")
    unlucky.deaths = 2
    context.enter("a")
    context.dispatch.decide()
    assert context.jobs() == [("w", "u", 1)]
    context.dispatch.joined("v", 8)
    context.dispatch.decide()
    assert context.jobs() == [("v", "a", 1)]


def test_a_worker_is_kept_free_for_who_must_be_alone(context: Desk) -> None:
    context.enter("a")
    context.dispatch.decide()
    context.enter("u").deaths = 2
    context.enter("b")
    context.dispatch.decide()
    assert context.jobs() == [("w", "a", 1)]  # b would keep the worker from becoming free
    context.done("w", "a")
    context.dispatch.decide()
    assert context.jobs() == [("w", "u", 1)]
    context.done("w", "u")
    context.dispatch.decide()
    assert context.jobs() == [("w", "b", 1)]


def test_one_failure_is_one_requests(context: Desk) -> None:
    bad, good = context.enter("bad"), context.enter("good")
    context.dispatch.decide()
    context.failed("w", "bad", "generation_failed")
    context.done("w", "good")
    assert code(bad) == "generation_failed"
    assert isinstance(only(good), Finished)


def test_codes_that_nobody_knows_become_one_that_is(context: Desk) -> None:
    bad = context.enter("bad")
    context.dispatch.decide()
    context.failed("w", "bad", "no_such_code")
    assert code(bad) == "generation_failed"


def test_a_shortage_of_memory_means_fewer_at_once_and_at_last_alone(context: Desk) -> None:
    tickets = [context.enter(str(k)) for k in range(8)]
    batches = []
    for _ in range(20):
        context.dispatch.decide()
        jobs = context.jobs()
        if not jobs:
            break
        batches.append(len(jobs))
        for _, id, attempt in jobs:
            context.failed("w", id, "out_of_memory", attempt)
        context.dispatch.stepped("w", Stepped(0.1, edits(*[1] * len(jobs))))
    assert batches[:2] == [8, 4]
    assert batches[-1] == 1
    assert {code(ticket) for ticket in tickets} == {"out_of_memory"}


def test_who_has_no_memory_before_its_first_step_is_told_at_last(context: Desk) -> None:
    tickets = [context.enter(str(k)) for k in range(3)]
    for _ in range(20):
        context.dispatch.decide()
        for _, id, attempt in context.jobs():
            context.failed("w", id, "out_of_memory", attempt)
    assert {code(ticket) for ticket in tickets} == {"out_of_memory"}


def test_only_recordings_that_have_a_clients_name_are_remembered(context: Desk) -> None:
    for id, template in (("a", None), ("b", "t")):
        context.enter(id, template=template)
        context.dispatch.decide()
        (_, _, attempt) = context.jobs()[0]
        sent = Done(
            id=id,
            attempt=attempt,
            pixels=DRAWN,
            steps=4,
            template=template or "0123abcd",
            template_bytes={"host": 9},
        )
        context.dispatch.done("w", sent, [PICTURE.tobytes()])
    assert list(context.dispatch.pool.mates["w"].held) == ["t"]
    assert list(context.dispatch.pool.mates["w"].load.warm) == ["t"]


def test_where_waiting_may_help_a_workers_refusal_says_when(context: Desk) -> None:
    for id, name in (("a", "queue_full"), ("b", "invalid_value")):
        ticket = context.enter(id)
        context.dispatch.decide()
        context.failed("w", id, name)
        error = only(ticket)
        assert isinstance(error, ApiError)
        assert (error.retry_after is not None) == (name == "queue_full")


def test_who_leaves_frees_its_slot_and_is_cancelled(context: Desk) -> None:
    running = context.enter("r")
    context.dispatch.decide()
    waiting = context.enter("w")
    for ticket in (running, waiting, running):
        context.dispatch.leave(ticket)
    assert [m for _, m in context.said if isinstance(m, Cancel)] == [Cancel("r")]
    assert len(context.dispatch) == 0
    assert context.dispatch.pool.mates["w"].load.free == 8
    context.done("w", "r")
    assert not answers(running)


def test_the_scheduler_drops_what_cant_be_in_time(context: Desk) -> None:
    ticket = context.enter("a", seconds=3.0)  # 4 steps of 1 s
    context.dispatch.decide()
    assert code(ticket) == "deadline_exceeded"
    assert not context.jobs()


def test_time_ends_who_waits_and_who_runs(context: Desk) -> None:
    context.dispatch.pool.mates["w"].load.slots = 1
    running, waiting = context.enter("r", seconds=5.0), context.enter("w", seconds=5.0)
    context.dispatch.decide()
    context.now[0] += 6
    context.said.clear()
    context.dispatch.decide(tick=True)
    assert code(running) == code(waiting) == "deadline_exceeded"
    assert context.said == [("w", Cancel("r"))]


def test_a_worker_that_cant_be_told_loses_no_request(context: Desk) -> None:
    ticket = context.enter("a")
    context.there = False
    context.dispatch.decide()
    assert list(context.dispatch.waiting) == ["a"]
    context.there = True
    context.said.clear()
    context.dispatch.decide()
    assert context.jobs() == [("w", "a", 1)]
    context.done("w", "a")
    assert isinstance(only(ticket), Finished)


def test_a_preview_is_shown_once_however_often_it_is_made(context: Desk) -> None:
    ticket = context.enter("a", previews=2)
    context.dispatch.decide()
    context.dispatch.preview("w", PreviewSent("a", 1, 0, DRAWN), [PICTURE.tobytes()])
    context.dispatch.joined("v", 8)
    context.dispatch.lost("w")
    context.dispatch.decide()
    for index in (0, 1):
        context.dispatch.preview("v", PreviewSent("a", 2, index, DRAWN), [PICTURE.tobytes()])
    shown = answers(ticket)
    assert [one.index for one in shown if isinstance(one, Preview)] == [0, 1]


def test_a_worker_without_a_step_is_stuck(context: Desk) -> None:
    context.now[0] += 1000
    assert not context.dispatch.stuck(10)  # it has nothing to do
    context.enter("a")
    context.dispatch.decide()
    context.now[0] += 9
    assert not context.dispatch.stuck(10)
    context.dispatch.stepped("w", Stepped(9.0, edits(1)))
    context.now[0] += 9
    assert not context.dispatch.stuck(10)
    context.now[0] += 2
    assert context.dispatch.stuck(10) == ["w"]


def edits(*sites: int) -> list[StepMember]:
    return [StepMember(StepKind.EDIT, count, 48) for count in sites]


def test_costs_learn_from_steps_and_of_loads_where_the_batch_is_known(context: Desk) -> None:
    costs = context.dispatch._costs
    assert isinstance(costs, PlainCosts)
    ticket = context.enter("a")
    work = replace(ticket.demand.work, bytes=70)
    ticket.demand = replace(ticket.demand, work=work)
    context.dispatch.decide()
    context.dispatch.stepped("w", Stepped(0.5, edits(6)))
    context.dispatch.stepped("w", Stepped(0.5, edits(6, 6)))  # of a batch that has changed since
    context.dispatch.stepped("w", Stepped(4.0, edits(48)))  # the whole picture is recorded first
    context.dispatch.stepped("w", Stepped(0.5, edits(8)))  # a margin more
    assert [loaded for _, loaded in costs.observed] == [70, 0, 0, 70]
    (running,) = context.dispatch.pool.mates["w"].load.running
    own = running.demand
    for tier, loaded in (("disk", 0), ("host", 70)):  # where the template's rows are
        running.demand = replace(own, work=replace(work, template="hat"))
        context.dispatch.pool.warmed("w", "hat", {tier: 70})
        context.dispatch.stepped("w", Stepped(0.5, edits(6)))
        assert costs.observed[-1][1] == loaded
    context.now[0] += 8.0
    context.done("w", "a")
    assert costs.around_observed == [(work, 1.5)], "6.5 s of 8 were steps"


def test_it_counts_what_happens(context: Desk) -> None:
    for id in "abc":
        context.enter(id)
    context.dispatch.decide()
    gauge = "maskfx_num_requests_running"
    assert context.metrics.registry.get_sample_value(gauge) == 3
    context.done("w", "a")
    context.failed("w", "b", "generation_failed")
    context.dispatch.leave(context.dispatch.running["c"])
    context.dispatch.decide()
    assert context.metrics.registry.get_sample_value(gauge) == 0
    for reason in ("stop", "generation_failed", "cancelled"):
        labels = {"finished_reason": reason}
        name = "maskfx_request_success_total"
        assert context.metrics.registry.get_sample_value(name, labels) == 1


def test_requests_that_wait_aside_keep_no_other_from_starting(context: Desk) -> None:
    """They take no part in steps; but a worker gets no more than twice its slots."""
    dispatch = context.dispatch
    for number in range(20):
        context.enter(f"stuck-{number}")
    dispatch.decide()
    stuck = [id for _, id, _ in context.jobs()]
    assert len(stuck) == 8
    dispatch.aside("w", stuck)
    dispatch.aside("gone", stuck)
    dispatch.decide()
    more = [id for _, id, _ in context.jobs()]
    assert len(more) == 8
    dispatch.aside("w", [*stuck, *more])
    dispatch.decide()
    assert context.jobs() == []
    for id in stuck:  # the files are there
        context.done("w", id)
    dispatch.aside("w", [])
    dispatch.decide()
    assert context.jobs() == [], "those that go on take the slots again"


def test_the_scheduler_doesnt_see_requests_that_wait_aside(context: Desk) -> None:
    """By the scheduler's costs, a request may gain nothing from a batch with others."""
    scheduler = SlackScheduler(LearnedCosts(START), make_router("cost"), gain=9.0)
    context.dispatch._scheduler = scheduler
    context.enter("stuck")
    context.dispatch.decide()
    assert [id for _, id, _ in context.jobs()] == ["stuck"]
    context.enter("good")
    context.dispatch.decide()
    assert context.jobs() == []
    context.dispatch.aside("w", ["stuck"])
    context.dispatch.decide()
    assert [id for _, id, _ in context.jobs()] == ["good"]
