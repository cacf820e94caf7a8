"""Templates that an engine records while it runs no request."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import maskfx
from maskfx.engine.admission.admission import Admission
from maskfx.engine.idle_recordings import IdleRecording, IdleRecordings
from maskfx.engine.step_runner import Step
from maskfx.engine.ticket import Ticket
from maskfx.errors import Cancelled
from maskfx.pipelines.compile import pipeline_state_of
from maskfx.scheduling.rounds.elastic import ElasticRounds
from tests.factories.served import build, picture, square

STEPS = 4
IDLE = maskfx.Quality(reuse="idle")


@cache
def pipeline() -> Any:
    made = build("StableDiffusionInpaintPipeline")
    made.set_progress_bar_config(disable=True)
    maskfx.compile(made, quality="all-steps")
    made(**edit(1_000))  # captured
    return made


def edit(seed: int, **more: Any) -> dict[str, Any]:
    """The arguments of an edit of a picture of its own."""
    return {
        "prompt": "a cat",
        "image": Image.fromarray(picture(seed)),
        "mask_image": Image.fromarray((square() * 255).astype(np.uint8)),
        "num_inference_steps": STEPS,
        "strength": 1.0,
        "generator": torch.Generator().manual_seed(seed),
        "output_type": "np",
        **more,
    }


def pictured(seed: int) -> dict[str, Any]:
    """The arguments that record the template of a picture."""
    return {k: v for k, v in edit(seed).items() if k not in ("mask_image", "generator", "prompt")}


@pytest.fixture
def engine() -> Iterator[maskfx.Engine]:
    with maskfx.Engine(recordings=4) as made:
        yield made


def image(ticket: Ticket) -> Any:
    return ticket.result(timeout=120).images[0]


def until(condition: Callable[[], bool]) -> None:
    """Wait for a condition."""
    for _ in range(2_000):
        if condition():
            return
        threading.Event().wait(0.02)
    raise AssertionError("it didn't come")


class Held:
    """A request that stays in its first step until it is let go: the engine has no idle time."""

    def __init__(self, engine: maskfx.Engine, seed: int) -> None:
        self.begun, self.go = threading.Event(), threading.Event()

        def wait(pipe: Any, step: int, time: Any, tensors: dict[str, Any]) -> dict[str, Any]:
            self.begun.set()
            assert self.go.wait(60)
            return {}

        given = edit(seed, quality=replace(IDLE, reuse="steps"), callback_on_step_end=wait)
        self.ticket = engine.submit(pipeline(), **given)
        assert self.begun.wait(60)

    def end(self) -> None:
        self.go.set()
        self.ticket.result(timeout=60)


def kinds(engine: maskfx.Engine) -> str:
    """One letter per step: r for one of an idle recording, . for one of requests."""
    return "".join("r" if step.idle else "." for step in engine.steps)


def test_the_first_edit_goes_by_its_own_steps_and_the_second_reads_a_template(
    engine: maskfx.Engine,
) -> None:
    first = engine.submit(pipeline(), **edit(1, quality=IDLE))
    image(first)
    until(lambda: engine.idle.finished == 1)
    assert kinds(engine) == "." * STEPS + "r" * STEPS
    second = engine.submit(pipeline(), **edit(1, quality=IDLE))
    got = image(second)
    assert kinds(engine)[2 * STEPS :] == "." * STEPS
    assert second.sites < first.sites
    wanted = pipeline()(**edit(1, quality=maskfx.Quality())).images[0]  # of the same template
    assert np.abs(got - wanted).max() < 1e-4
    assert engine.idle.dropped == 0
    assert len(engine.idle) == 0


def test_a_request_waits_for_one_step_of_a_recording_at_most() -> None:
    sent: list[Ticket] = []

    def told(step: Step) -> None:
        if step.idle and not sent:  # in the engine's thread, before it chooses the next step
            sent.append(made.submit(pipeline(), **edit(2, quality=IDLE)))

    with maskfx.Engine(told=told) as made:
        recording = made.record_idle(pipeline(), **pictured(3))
        until(lambda: bool(sent))
        image(sent[0])
        recording.result(timeout=60)
        until(lambda: len(made.idle) == 0)
        whole = kinds(made)
    assert whole == "r" + "." * STEPS + "r" * (STEPS - 1) + "r" * STEPS, "the edit's own comes last"


def test_of_many_recordings_the_newest_are_made_and_users_share_the_places(
    engine: maskfx.Engine,
) -> None:
    held = Held(engine, 4)
    mine = engine.record_idle(pipeline(), user="other", **pictured(10))
    tickets = [engine.record_idle(pipeline(), user="one", **pictured(11 + i)) for i in range(50)]
    assert len(engine.idle) == 4
    assert engine.idle.dropped == 47
    assert "r" not in kinds(engine), "no request waits for any of them"
    held.end()
    names = [ticket.result(timeout=60).name for ticket in (mine, *tickets[-3:])]
    library = pipeline_state_of(pipeline()).library
    assert all(map(library.whole, names))
    assert len(set(names)) == 4
    for ticket in tickets[:-3]:
        with pytest.raises(Cancelled, match="more than 4"):
            ticket.result(timeout=1)
    until(lambda: engine.idle.finished == 4)


def test_a_closed_engine_ends_recordings_and_leaves_nothing_of_them() -> None:
    begun = threading.Event()
    tiers = pipeline_state_of(pipeline()).library.tiers
    made = maskfx.Engine(told=lambda step: begun.set())
    before = tiers.counters().nbytes
    tickets = [made.record_idle(pipeline(), **pictured(70 + i)) for i in range(3)]
    assert begun.wait(60)
    made.close()
    for ticket in tickets:
        with pytest.raises(Cancelled):
            ticket.result(timeout=10)
    assert len(made.steps) < STEPS
    assert tiers.counters().nbytes == before
    with pytest.raises(Cancelled):
        made.record_idle(pipeline(), **pictured(73)).result(timeout=1)


def test_a_request_that_needs_the_template_takes_its_recording_over() -> None:
    sent: list[Ticket] = []

    def told(step: Step) -> None:
        if step.idle and not sent:
            given = edit(80, quality=maskfx.Quality(reuse="template"))
            sent.append(made.submit(pipeline(), **given))

    with maskfx.Engine(told=told) as made:
        recording = made.record_idle(pipeline(), **pictured(80))
        until(lambda: bool(sent))
        image(sent[0])
        assert recording.result(timeout=60).name
        kept = list(made.steps)
    recorded = [step for step in kept if step.members[0].kind.value == "record"]
    assert len(recorded) == STEPS, "it is recorded once"
    assert len(kept) == 2 * STEPS
    until(lambda: made.idle.finished == 1)


def test_a_recording_that_fails_is_dropped_and_tried_less_and_less_often(
    engine: maskfx.Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = pipeline_state_of(pipeline()).library

    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("no")

    monkeypatch.setattr(type(library), "put_latents", fail)
    for number in range(1, 4):
        image(engine.submit(pipeline(), **edit(90, quality=IDLE)))
        until(lambda: len(engine.idle) == 0)
        assert engine.idle.dropped == min(number, 2), "the third request doesn't try again"
    assert engine.idle.finished == 0


def test_no_template_in_use_is_evicted_for_a_recording() -> None:
    pipe = build("StableDiffusionInpaintPipeline")
    pipe.set_progress_bar_config(disable=True)
    one = pipeline_state_of(pipeline()).library
    size = one.nbytes(pipeline()(**edit(100)).template.name)["host"]
    tiers = maskfx.Tiers(host_bytes=int(1.3 * size))
    maskfx.compile(pipe, quality="all-steps", tiers=tiers)
    with maskfx.Engine() as made:
        kept = image(made.submit(pipe, **edit(101)))
        again = made.record_idle(pipe, **pictured(102))
        with pytest.raises(maskfx.MaskfxError, match="no room"):
            again.result(timeout=60)
        until(lambda: made.idle.dropped == 1)
        before = len(made.steps)
        assert np.array_equal(image(made.submit(pipe, **edit(101))), kept)
        assert len(made.steps) == before + STEPS, "its template is still there"


@pytest.mark.slow  # starts processes
def test_with_rounds_on_several_ranks_recordings_step_between_them() -> None:
    with maskfx.Engine(ranks=2, rounds=ElasticRounds()) as made:
        made.record_idle(pipeline(), **pictured(105)).result(timeout=200)
        image(made.submit(pipeline(), **edit(105, quality=IDLE)))
        image(made.submit(pipeline(), **edit(106, quality=IDLE)))
        until(lambda: made.idle.finished == 2)
        assert kinds(made) == "r" * STEPS + "." * 2 * STEPS + "r" * STEPS


def test_without_an_engine_the_second_edit_records() -> None:
    pipe = pipeline()
    names = [getattr(pipe(**edit(110, quality=IDLE)), "template", None) for _ in range(2)]
    assert names[0] is None
    assert names[1] is not None


# When an edit waits for its template.


def recordings(recorded: float, whole: float, masked: float, count: int) -> IdleRecordings:
    """Recordings of four steps, with the seconds of steps that were measured."""
    changed = threading.Condition()
    made = IdleRecordings(4, Admission(1, 1, changed), changed)
    made._steps = 4
    made.seconds._recorded.append(recorded)
    made.seconds._whole.append(whole)
    made.seconds._masked.append(masked)
    made.seconds._counts.append(count)
    return made


def test_an_edit_waits_if_less_is_left_than_the_template_saves() -> None:
    made = recordings(recorded=1.0, whole=1.0, masked=0.5, count=3)  # saves 1.5 steps
    waits = {left: made.pays(IdleRecording(Ticket(lambda: None), "t", left), 1) for left in (1, 2)}
    assert waits == {1: True, 2: False}
    assert not made.pays(None, 1)
    assert not made.pays(None, 2)
    costly = recordings(recorded=0.1, whole=1.0, masked=0.5, count=3)
    assert not costly.pays(None, 1), "a first edit waits for none that has not begun"
    assert costly.pays(None, 2)


def test_without_idle_time_a_later_edit_records() -> None:
    made = recordings(recorded=1.0, whole=1.0, masked=0.5, count=3)
    assert [made.pays(None, requests) for requests in range(1, 6)] == [False] * 3 + [True] * 2


def test_an_edit_that_finds_progress_waits_no_longer_than_the_template_saves() -> None:
    made = recordings(recorded=1.0, whole=1.0, masked=0.5, count=3)
    found = IdleRecording(Ticket(lambda: None), "t", 4)
    assert [made.pays(found, requests) for requests in (2, 3, 4)] == [False] * 3
    found.left = 3
    assert [made.pays(found, requests) for requests in (5, 6, 7)] == [False, False, True]


def test_without_measured_seconds_no_edit_waits() -> None:
    changed = threading.Condition()
    made = IdleRecordings(4, Admission(1, 1, changed), changed)
    assert not made.pays(IdleRecording(Ticket(lambda: None), "t", 1), 100)
