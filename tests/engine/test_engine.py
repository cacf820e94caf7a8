"""The engine: requests of different sizes, steps, masks and schedulers in one ragged batch."""

import copy
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import (
    AutoencoderKL,
    DDIMScheduler,
    StableDiffusionInpaintPipeline,
    StableDiffusionPipeline,
    UNet2DConditionModel,
)
from PIL import Image

import maskfx
from maskfx.engine.processes import helper_processes
from maskfx.engine.processes.placement import InEngineLoop, InRequestThreads, Placement
from maskfx.engine.step_runner import Step
from maskfx.engine.ticket import AnsweredStep, Ticket, TicketState
from maskfx.errors import Busy, Cancelled, Closed, DeadlineMissed, InputError, NumberError
from maskfx.ir.geometry.level_shares import LevelShare
from maskfx.pipelines.compile import pipeline_state_of, share_denoisers
from maskfx.pipelines.templates.template_library import TemplateLibrary
from maskfx.runtime.execution import graph_runs
from maskfx.runtime.hardware import cpu_threads

Call = Callable[..., dict[str, Any]]


def parts() -> dict[str, Any]:
    torch.manual_seed(0)
    unet: Any = UNet2DConditionModel(
        sample_size=16,
        block_out_channels=(16, 32),
        layers_per_block=1,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        attention_head_dim=8,
        cross_attention_dim=16,
        norm_num_groups=8,
    )
    vae: Any = AutoencoderKL(
        down_block_types=("DownEncoderBlock2D",) * 4,
        up_block_types=("UpDecoderBlock2D",) * 4,
        block_out_channels=(8, 8, 16, 16),
        latent_channels=4,
        norm_num_groups=4,
    )
    return {
        "vae": vae.eval(),
        "text_encoder": None,
        "tokenizer": None,
        "unet": unet.eval(),
        "scheduler": DDIMScheduler(clip_sample=False, steps_offset=1),
        "safety_checker": None,
        "feature_extractor": None,
        "requires_safety_checker": False,
    }


def compiled(kind: Any, components: dict[str, Any]) -> Any:
    pipe = kind(**components)
    pipe.set_progress_bar_config(disable=True)
    return maskfx.compile(pipe, quality="all-steps")


@cache
def pipeline() -> Any:
    return compiled(StableDiffusionInpaintPipeline, parts())


def call(seed: int, steps: int = 4, height: int = 64, width: int = 96, **more: Any) -> Any:
    """One edit: its own picture, mask, prompt and noise."""
    draw = np.random.default_rng(seed)
    noise = torch.Generator().manual_seed(seed)
    mask = np.zeros((height, width), np.uint8)
    mask[8 + seed : 30 + seed, 16:50] = 255
    given = {
        "prompt_embeds": torch.randn(1, 7, 16, generator=noise),
        "negative_prompt_embeds": torch.zeros(1, 7, 16),
        "image": Image.fromarray(draw.integers(0, 255, (height, width, 3), dtype=np.uint8)),
        "mask_image": Image.fromarray(mask),
        "height": height,
        "width": width,
        "num_inference_steps": steps,
        "strength": 1.0,
        "generator": noise,
        "output_type": "pt",
    }
    return {**given, **more}


MIXED: list[dict[str, Any]] = [
    dict(seed=1),
    dict(seed=2, steps=6, height=96, width=64),
    dict(seed=3, steps=3),
]
MIXED.append(dict(seed=4, steps=5, guidance_scale=1.0))


@pytest.fixture
def engine() -> Iterator[maskfx.Engine]:
    with maskfx.Engine() as made:
        yield made


def meeting(*calls: dict[str, Any]) -> list[dict[str, Any]]:
    """The same calls; after their first steps they wait for each other, on slow machines too."""
    barrier = threading.Barrier(len(calls))

    def wait(pipe: Any, step: int, *_: Any) -> dict[str, Any]:
        if step == 0:
            barrier.wait(60)
        return {}

    return [{**given, "callback_on_step_end": wait} for given in calls]


def pictures(engine: maskfx.Engine, calls: list[dict[str, Any]]) -> list[torch.Tensor]:
    tickets = [engine.submit(pipeline(), **given) for given in calls]
    return [ticket.result(120).images for ticket in tickets]


@pytest.mark.parametrize("outside", [None, "loop", "processes"])
def test_a_batch_gives_the_pictures_of_single_runs(outside: str | None) -> None:
    alone = [pipeline()(**call(**given)).images for given in MIXED]
    places: dict[str | None, Placement] = {
        "loop": InEngineLoop(),
        "processes": maskfx.HelperProcesses(1),
    }
    where = places.get(outside)
    with maskfx.Engine(maskfx.BatchPolicy(patience=1.0), outside=where) as engine:
        together = pictures(engine, meeting(*(call(**given) for given in MIXED)))
        assert max(step.requests for step in engine.steps) > 1, "no two requests shared a step"
    for one, other in zip(alone, together, strict=True):
        assert (one - other).abs().max() < 1e-4


def test_it_is_known_whether_requests_are_among_their_steps(engine: maskfx.Engine) -> None:
    """Helpers take the cores by it."""
    seen: list[bool] = []

    def note(pipe: Any, step: int, *_: Any) -> dict[str, Any]:
        seen.append(engine.stepping())
        return {}

    assert not engine.stepping()
    engine.submit(pipeline(), **call(1, steps=3, callback_on_step_end=note)).result(120)
    assert seen == [True, True, False], "after the last step there is none to come"


def test_requests_with_templates_that_nobody_recorded(
    engine: maskfx.Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All record at once, and each template is recorded once."""
    denoiser = pipeline_state_of(pipeline()).denoisers["unet"]
    original = denoiser.step
    recorded: list[Any] = []

    def counted(steps: Any) -> Any:
        recorded.extend(step for step in steps if isinstance(step, maskfx.RecordStep))
        return original(steps)

    monkeypatch.setattr(denoiser, "step", counted)
    calls = [call(20, steps=2), call(20, steps=2), call(21, steps=2)]
    found = pictures(engine, calls)
    assert len(recorded) == 2 * 2, "two templates of two steps each"
    assert (found[0] - found[1]).abs().max() < 1e-4
    alone = pipeline()(**call(21, steps=2)).images
    assert (alone - found[2]).abs().max() < 1e-4


def test_a_request_joins_within_one_step() -> None:
    started = threading.Event()

    def slow(pipe: Any, step: int, *_: Any) -> dict[str, Any]:
        started.set()
        time.sleep(0.05)
        return {}

    pipeline()(**call(1, steps=3))
    with maskfx.Engine(maskfx.BatchPolicy(patience=0.5)) as engine:
        first = engine.submit(pipeline(), **call(1, steps=30, callback_on_step_end=slow))
        started.wait(60)
        second = engine.submit(pipeline(), **call(1, steps=3))
        second.result(60)
        assert not first.done()
        joint = next(s for s in engine.steps if s.requests == 2)
        between = [s for s in engine.steps if second.first_step < s.began < joint.began]
        assert len(between) <= 1
        first.cancel()


def test_who_has_begun_keeps_its_place_in_steps_that_are_full() -> None:
    heard: dict[str, list[AnsweredStep]] = {"first": [], "second": []}
    pipeline()(**call(1, steps=5))
    with maskfx.Engine(maskfx.BatchPolicy(patience=10, batch=1)) as engine:
        tickets = [
            engine.submit(pipeline(), told=own.append, **call(1, steps=5)) for own in heard.values()
        ]
        for ticket in tickets:
            ticket.result(60)
    first, second = sorted(heard.values(), key=lambda steps: steps[-1].ended)
    assert second[0].asked < first[-1].began, "they were never there at the same time"
    assert len(first) == len(second) == 5
    assert not [s for s in second if first[1].began < s.began < first[-1].began]


def test_cancel_at_any_step(engine: maskfx.Engine) -> None:
    reached, go_on = threading.Event(), threading.Event()

    def wait(pipe: Any, step: int, *_: Any) -> dict[str, Any]:
        if step == 1:
            reached.set()
            go_on.wait(30)
        return {}

    ticket = engine.submit(pipeline(), **call(1, callback_on_step_end=wait))
    other = engine.submit(pipeline(), **call(2))
    assert reached.wait(60)
    ticket.cancel()
    go_on.set()
    with pytest.raises(Cancelled, match="after"):
        ticket.result(60)
    other.result(60)
    assert ticket.steps < other.steps


def test_a_queued_request_is_cancelled_before_it_runs() -> None:
    with maskfx.Engine(running=1) as engine:
        first = engine.submit(pipeline(), **call(1))
        second = engine.submit(pipeline(), **call(2))
        second.cancel()
        with pytest.raises(Cancelled, match="0 steps"):
            second.result(60)
        first.result(60)


def test_cancelling_a_recording_says_nothing_against_the_template(
    engine: maskfx.Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    shared = pipeline_state_of(pipeline())
    denoiser = shared.denoisers["unet"]
    original, tickets = denoiser.step, list[Any]()

    def step(steps: Any) -> Any:
        if tickets and isinstance(steps[0], maskfx.RecordStep):
            tickets.pop().cancel()
        return original(steps)

    monkeypatch.setattr(denoiser, "step", step)
    first = engine.submit(pipeline(), **call(25))
    tickets.append(first)
    with pytest.raises(Cancelled):
        first.result(60)
    assert not tickets, "the template was there, so nothing was recorded"
    assert not shared.library.attempts.failed
    found = engine.submit(pipeline(), **call(25)).result(60).images
    assert (found - pipeline()(**call(25)).images).abs().max() < 1e-4


@pytest.fixture
def recording(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Recordings stop after their first step until this is set."""
    go_on, original = threading.Event(), TemplateLibrary.put_latents

    def put(library: TemplateLibrary, template: str, step: int, latents: torch.Tensor) -> None:
        assert go_on.wait(60)
        original(library, template, step, latents)

    monkeypatch.setattr(TemplateLibrary, "put_latents", put)
    yield go_on
    go_on.set()


def until(true: Callable[[], bool]) -> None:
    end = time.monotonic() + 30
    while not true():
        assert time.monotonic() < end, "it never came"
        time.sleep(0.01)


def test_who_waits_for_anothers_recording_can_be_stopped(recording: threading.Event) -> None:
    with maskfx.Engine() as engine:
        first = engine.submit(pipeline(), **call(26))
        until(lambda: first.steps > 0)
        late = engine.submit(pipeline(), deadline=0.2, **call(26))
        given_up = engine.submit(pipeline(), **call(26))
        until(lambda: given_up.state is TicketState.WAITING)
        given_up.cancel()
        with pytest.raises(Cancelled):
            given_up.result(10)
        with pytest.raises(DeadlineMissed):
            late.result(10)
        assert not first.done()
        recording.set()
        first.result(60)


def test_who_waits_for_anothers_recording_has_no_place(recording: threading.Event) -> None:
    pipeline()(**call(27, quality=maskfx.Quality(reuse="steps")))  # captured
    go_on, placed = threading.Event(), list[int]()

    def hold(*_: Any) -> dict[str, Any]:
        go_on.wait(60)
        return {}

    def count(_: Step) -> None:
        placed.append(len(own._requests.active) - len(own._requests.aside))

    alone = maskfx.Quality(reuse="steps")  # records nothing
    with maskfx.Engine(running=2, queue=2, told=count) as own:
        first = own.submit(pipeline(), **call(27))
        until(lambda: first.steps > 0)
        second = own.submit(pipeline(), **call(27))
        until(lambda: second.state is TicketState.WAITING)
        other = own.submit(pipeline(), **call(28, quality=alone, callback_on_step_end=hold))
        until(lambda: other.steps > 0)
        own.submit(pipeline(), **call(29, quality=alone))
        with pytest.raises(Busy, match="2 requests wait"):
            own.submit(pipeline(), **call(29))
        recording.set()
        found = [ticket.result(60).images for ticket in (first, second)]
        assert not other.done()
        go_on.set()
    assert (found[0] - found[1]).abs().max() < 1e-4
    assert max(placed) == 2


def test_each_request_has_schedulers_of_its_own(engine: maskfx.Engine) -> None:
    pipe = copy.copy(pipeline())
    pipe.__dict__["inverse"] = copy.deepcopy(pipe.scheduler)
    pipe.__dict__["alias"] = pipe.scheduler
    own = engine._pipelines.own(pipe, Ticket(lambda: None))
    assert own.scheduler is not pipe.scheduler
    assert own.__dict__["inverse"] is not pipe.__dict__["inverse"]
    assert own.__dict__["alias"] is own.scheduler
    assert own.unet is pipe.unet


class Tokenizer:
    """Notices calls that overlap."""

    model_max_length = 16

    def __init__(self) -> None:
        self.inside = self.overlaps = 0

    def __call__(self, text: str) -> str:
        self.inside += 1
        self.overlaps += self.inside > 1
        time.sleep(0.01)
        self.inside -= 1
        return text

    encode = __call__


def test_requests_tokenize_one_after_another(engine: maskfx.Engine) -> None:
    pipe, tokenizer = copy.copy(pipeline()), Tokenizer()
    pipe.__dict__["tokenizer"] = tokenizer
    found: list[str] = []

    def use(own: Any) -> None:
        assert isinstance(own.tokenizer, Tokenizer)
        assert own.tokenizer.model_max_length == 16
        found.extend([own.tokenizer("a"), own.tokenizer.encode("b")])

    owns = [engine._pipelines.own(pipe, Ticket(lambda: None)) for _ in range(4)]
    threads = [threading.Thread(target=use, args=(own,)) for own in owns]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(found) == ["a"] * 4 + ["b"] * 4
    assert not tokenizer.overlaps


def test_deadlines(engine: maskfx.Engine) -> None:
    late = engine.submit(pipeline(), deadline=0.0, **call(1))
    with pytest.raises(DeadlineMissed, match="deadline passed"):
        late.result(60)
    engine.submit(pipeline(), deadline=600.0, **call(1)).result(60)


def test_one_request_that_fails_fails_alone(engine: maskfx.Engine) -> None:
    def broken(*_: Any) -> dict[str, Any]:
        raise RuntimeError("my callback")

    def poison(pipe: Any, step: int, time: Any, tensors: dict[str, Any]) -> dict[str, Any]:
        return {"latents": tensors["latents"] * float("nan")}

    good = engine.submit(pipeline(), **call(1))
    bad = engine.submit(pipeline(), **call(2, callback_on_step_end=broken))
    odd = engine.submit(pipeline(), **call(3, callback_on_step_end=poison))
    wrong = engine.submit(pipeline(), **call(4, prompt_embeds=torch.zeros(1, 7, 9)))
    with pytest.raises(RuntimeError, match="my callback"):
        bad.result(60)
    with pytest.raises(NumberError, match="finite"):
        odd.result(60)
    with pytest.raises(Exception, match=r".+"):
        wrong.result(60)
    alone = pipeline()(**call(1)).images
    assert (good.result(60).images - alone).abs().max() < 1e-4


def test_out_of_memory_splits_the_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    alone = [pipeline()(**call(**given)).images for given in MIXED]
    denoiser = pipeline_state_of(pipeline()).denoisers["unet"]
    original, sizes = denoiser.step, []
    computed: list[weakref.ref[torch.Tensor]] = []

    def small(steps: Any) -> Any:
        assert not [one for one in computed if one() is not None], "a failed step's tensors stay"
        some = torch.empty(1)
        computed.append(weakref.ref(some))
        sizes.append(len(steps))
        if len(steps) > 1:
            raise torch.OutOfMemoryError("no room for two")
        return original(steps)

    monkeypatch.setattr(denoiser, "step", small)
    with maskfx.Engine(maskfx.BatchPolicy(patience=1.0)) as engine:
        together = pictures(engine, meeting(*(call(**given) for given in MIXED)))
    assert max(sizes) > 1
    for one, other in zip(alone, together, strict=True):
        assert (one - other).abs().max() < 1e-4


def test_a_full_queue_says_so() -> None:
    with maskfx.Engine(running=1, queue=1) as engine:
        go_on = threading.Event()
        held = engine.submit(
            pipeline(), **call(1, callback_on_step_end=lambda *_: go_on.wait(30) and {} or {})
        )
        while held.state.value == "queued":
            time.sleep(0.01)
        engine.submit(pipeline(), **call(2))
        with pytest.raises(Busy, match="submit again"):
            engine.submit(pipeline(), **call(3))
        go_on.set()


def test_one_user_with_many_requests_doesnt_hold_up_another() -> None:
    with maskfx.Engine(running=1) as engine:
        many = [engine.submit(pipeline(), user="a", **call(1)) for _ in range(4)]
        other = engine.submit(pipeline(), user="b", **call(2))
        other.result(60)
        assert sum(ticket.started < other.started for ticket in many) <= 2


def test_a_closed_engine_takes_nothing() -> None:
    engine = maskfx.Engine()
    ticket = engine.submit(pipeline(), **call(1))
    engine.close()
    ticket.result(1)
    with pytest.raises(Closed):
        engine.submit(pipeline(), **call(1))


@pytest.mark.parametrize("held", ["callback", "step", "helper"])
def test_what_isnt_finished_when_an_engine_closes_ends_with_an_error(
    held: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    reached, go_on = threading.Event(), threading.Event()

    def hold(*_: Any) -> dict[str, Any]:
        reached.set()
        go_on.wait(60)
        return {}

    given = call(1, callback_on_step_end=hold) if held == "callback" else call(1)
    if held == "step":
        denoiser = pipeline_state_of(pipeline()).denoisers["unet"]
        original = denoiser.step
        monkeypatch.setattr(denoiser, "step", lambda steps: (hold(), original(steps))[1])
    outside = maskfx.HelperProcesses(1) if held == "helper" else None
    if outside is not None:
        monkeypatch.setattr(helper_processes, "spared", lambda _: (hold(), 1)[1])
    engine = maskfx.Engine(running=1, outside=outside)
    tickets = [engine.submit(pipeline(), **given), engine.submit(pipeline(), **call(2))]
    assert reached.wait(60)
    engine.close(timeout=0.1)
    for ticket in tickets:
        with pytest.raises(Closed, match="another"):
            ticket.result(10)
    with pytest.raises(Closed, match="another"):
        engine.submit(pipeline(), **call(1))
    threads = [t for t in threading.enumerate() if t.name in ("maskfx-engine", "maskfx-request")]
    assert "maskfx-request" in [t.name for t in threads], "it is held"  # the loop may have ended
    go_on.set()
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive(), "its thread waits for ever"
    engine.close()


def test_a_loop_that_breaks_leaves_nobody_waiting() -> None:
    class Broken(maskfx.BatchPolicy):
        def seconds(self, seats: Any, *_: Any) -> float:
            return 1 / 0 if seats else 60.0

    engine = maskfx.Engine(Broken())
    with pytest.raises(Closed, match="ZeroDivisionError"):
        engine.submit(pipeline(), **call(1)).result(30)
    with pytest.raises(Closed):
        engine.submit(pipeline(), **call(1))
    engine.close()


def test_each_step_is_told_with_its_sites() -> None:
    told: list[Step] = []
    pipeline()(**call(30))  # its template is there
    with maskfx.Engine(told=told.append) as engine:
        edit = engine.submit(pipeline(), **call(30))
        edit.result(60)
        assert told == list(engine.steps)
    height, width = 64 // 8, 96 // 8
    # of the pixels that are masked, and one site around them
    rows = {y // 8 + by for y in range(38, 60) for by in (-1, 0, 1) if y // 8 + by < height}
    columns = {x // 8 + by for x in range(16, 50) for by in (-1, 0, 1)}
    both = 2  # branches of guidance in one call
    assert {step.sites for step in told} == {both * len(rows) * len(columns)}
    assert all(0 < step.bubble < step.seconds for step in told), "rows are picked in every step"
    assert edit.sites == sum(step.sites for step in told)
    assert edit.whole == both * height * width * len(told)
    assert [member.first for step in told for member in step.members] == [True, False, False, False]
    assert all(step.cpu > 0 for step in told)
    assert {member.work for step in told for member in step.members} == {None}


def test_members_have_their_work_at_all_levels_where_its_shares_are_known() -> None:
    told: list[Step] = []
    pipe = pipeline()
    pipe(**call(30))  # captured, and its template is there
    [denoiser] = pipeline_state_of(pipe).denoisers.values()
    denoiser.level_shares = (
        LevelShare(per_site=1.0, per_pair=0.0),
        LevelShare(parent=0, divide=(2, 2), per_site=100.0, per_pair=1.0),
    )
    try:
        with maskfx.Engine(told=told.append) as engine:
            engine.submit(pipe, **call(30)).result(60)
    finally:
        denoiser.level_shares = ()
    rows, columns = range(3, 8), range(1, 8)  # the mask's sites
    coarse = len({y // 2 for y in rows}) * len({x // 2 for x in columns})
    both, work = 2, told[0].members[0].work
    assert told[0].sites == both * len(rows) * len(columns)
    assert work is not None
    assert work.sites == both * (len(rows) * len(columns) + 100 * coarse)
    assert work.pairs == both * coarse * (4 * 6)


def test_a_template_is_recorded_in_the_engines_steps(engine: maskfx.Engine) -> None:
    given = {name: value for name, value in call(31).items() if name != "mask_image"}
    ticket = engine.record(pipeline(), **given)
    made = ticket.result(60)
    assert ticket.steps == 4
    assert ticket.sites == 0, "a recording is no part of anybody's picture"
    assert {step.sites for step in engine.steps} == {2 * 8 * 12}
    edited = engine.submit(pipeline(), return_dict=True, **call(31)).result(60)
    assert edited.template.name == made.name


def test_a_request_hears_of_the_steps_that_it_was_in(engine: maskfx.Engine) -> None:
    heard: list[AnsweredStep] = []
    pipeline()(**call(30))  # captured
    other = engine.submit(pipeline(), **call(32, steps=9))
    engine.submit(pipeline(), told=heard.append, **call(33)).result(60)
    other.result(60)
    run = [(recording, number) for recording in (True, False) for number in range(4)]
    assert [(step.recording, step.number) for step in heard] == run
    assert all(step.asked <= step.began < step.ended for step in heard)
    own = {(step.began, step.ended) for step in heard}
    assert own < {(step.began, step.ended) for step in engine.steps}


def test_who_hears_of_steps_cant_end_the_loop() -> None:
    def broken(_: object) -> None:
        raise RuntimeError("my listener")

    with maskfx.Engine(told=broken) as engine:
        engine.submit(pipeline(), told=broken, **call(1)).result(60)


def test_a_request_that_gets_no_thread_fails_and_the_loop_goes_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def start(_: object) -> None:
        raise RuntimeError("can't start new thread")

    with maskfx.Engine() as engine:
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", start)
            ticket = engine.submit(pipeline(), **call(1))
            with pytest.raises(RuntimeError, match="new thread"):
                ticket.result(10)
        assert len(engine.submit(pipeline(), **call(1)).result(60).images) == 1


def test_a_forgotten_template_takes_nothing() -> None:
    library = pipeline_state_of(pipeline()).library
    before = library.tiers.counters().nbytes
    given = {name: value for name, value in call(32).items() if name != "mask_image"}
    made = maskfx.template(pipeline(), **given)
    maskfx.template(pipeline(), **given)  # a second pin is the same pin
    held = library.nbytes(made.name)
    assert held["host"] == sum((library.tiers.counters().nbytes - before).values())
    library.forget(made.name)
    assert not library.nbytes(made.name)
    assert library.tiers.counters().nbytes == before
    assert not library.whole(made.name)
    assert pipeline_state_of(pipeline()).library.tiers._pins == library.tiers._pins


def test_pipelines_over_the_same_modules_share_captures_and_steps() -> None:
    components = parts()
    one = compiled(StableDiffusionInpaintPipeline, components)
    other = compiled(StableDiffusionPipeline, components)
    share_denoisers(one, other)
    assert pipeline_state_of(other).denoisers["unet"] is pipeline_state_of(one).denoisers["unet"]
    assert pipeline_state_of(other).library is pipeline_state_of(one).library
    edited, given = call(33), call(34)
    drawn = {n: v for n, v in given.items() if n not in ("image", "mask_image", "strength")}
    wanted = [one(**edited).images, other(**{**drawn, "generator": noise(34)}).images]
    with maskfx.Engine(maskfx.BatchPolicy(patience=1.0)) as engine:
        first, second = meeting(edited, drawn)
        tickets = [
            engine.submit(one, **{**first, "generator": noise(33)}),
            engine.submit(other, **{**second, "generator": noise(34)}),
        ]
        found = [ticket.result(60).images for ticket in tickets]
        assert max(step.requests for step in engine.steps) == 2
    for a, b in zip(found, wanted, strict=True):
        assert (a - b).abs().max() < 1e-3


def noise(seed: int) -> torch.Generator:
    """As `call` leaves it for the pipeline."""
    made = torch.Generator().manual_seed(seed)
    torch.randn(1, 7, 16, generator=made)
    return made


def test_a_plain_pipeline_is_refused(engine: maskfx.Engine) -> None:
    with pytest.raises(InputError, match=r"maskfx\.compile"):
        engine.submit(object())  # type: ignore[arg-type]


@pytest.mark.parametrize("wrong", [{"running": 0}, {"queue": 1.5}])
def test_settings_are_checked(wrong: dict[str, Any]) -> None:
    with pytest.raises(InputError, match=next(iter(wrong))):
        maskfx.Engine(**wrong)


@pytest.mark.skipif(not cpu_threads.runtimes(), reason="PyTorch's workers aren't GNU's here")
def test_a_step_takes_fewer_cores_as_soon_as_others_compute(
    three: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[int] = []

    def settle() -> None:
        if len(seen) == 5:  # in the midst of a step
            cpu_threads.taken.add(1)
        cpu_threads.settle()
        seen.append(torch.get_num_threads())

    monkeypatch.setattr(graph_runs, "settle", settle)
    monkeypatch.setattr(cpu_threads, "taken", cpu_threads.Taken())
    with maskfx.Engine() as engine:
        engine.submit(pipeline(), **call(1)).result(60)
    assert seen[:6] == [3] * 5 + [2]
    assert set(seen[5:]) == {2}


class Around(torch.nn.Module):
    """A part that reports what it computes with, and how many cores are taken meanwhile."""

    def forward(self) -> tuple[int, int]:
        return torch.get_num_threads(), cpu_threads.taken.cores


class Adapted(Around):
    """One that no helper takes."""

    peft_config = {"default": 1}


class Stepping:
    """As much of an engine as `InRequestThreads` asks."""

    def __init__(self, stepping: bool) -> None:
        self._stepping = stepping

    def stepping(self) -> bool:
        return self._stepping

    def errand(self, work: Callable[[], None]) -> None:
        raise AssertionError("threads have no errands")


@pytest.mark.skipif(not cpu_threads.runtimes(), reason="PyTorch's workers aren't GNU's here")
@pytest.mark.parametrize(("stepping", "threads"), [(True, 1), (False, 3)])
def test_work_in_a_requests_thread_leaves_the_cores_to_steps(
    stepping: bool, threads: int, three: None
) -> None:
    pipe = pipeline()
    own = object.__new__(type(pipe))
    own.__dict__.update(pipe.__dict__, vae=Around())
    place = InRequestThreads()
    place.start(Stepping(stepping))
    place.adopt(own, pipeline_state_of(pipe).denoisers)
    assert own.vae() == (threads, threads)
    assert cpu_threads.taken.cores == 0
    assert own.unet is pipe.unet, "steps see to themselves"


class Decoding(torch.nn.Module):
    """A part on another device that counts its calls under way."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.empty(1, device="meta"))
        self.now, self.most = 0, dict[str, int]()

    def decode(self) -> None:
        self.work("decode")

    def encode(self) -> None:
        self.work("encode")

    def work(self, method: str) -> None:
        self.now += 1
        self.most[method] = max(self.now, self.most.get(method, 0))
        time.sleep(0.05)
        self.now -= 1


def test_a_device_decodes_one_picture_at_a_time() -> None:
    pipe, part = pipeline(), Decoding()
    copies = []
    for _ in range(2):  # of two engines
        own = object.__new__(type(pipe))
        own.__dict__.update(pipe.__dict__, vae=part)
        place = InRequestThreads()
        place.start(Stepping(True))
        place.adopt(own, pipeline_state_of(pipe).denoisers)
        copies.append(own)
    for method in ("decode", "encode"):
        calls = [threading.Thread(target=getattr(own.vae, method)) for own in copies * 2]
        for call in calls:
            call.start()
        for call in calls:
            call.join()
    assert part.most["decode"] == 1
    assert part.most["encode"] > 1


@pytest.mark.skipif(not cpu_threads.runtimes(), reason="PyTorch's workers aren't GNU's here")
def test_what_no_helper_can_run_leaves_the_cores_to_steps_too(three: None) -> None:
    pipe = pipeline()
    own = object.__new__(type(pipe))
    own.__dict__.update(pipe.__dict__, vae=Adapted())
    with maskfx.Engine(outside=maskfx.HelperProcesses(1)) as engine:
        engine._outside.adopt(own, pipeline_state_of(pipe).denoisers)
        assert own.vae() == (3, 3)
