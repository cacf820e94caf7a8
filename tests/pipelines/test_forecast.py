"""Steps that aren't computed: which they are, and what answers them."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from PIL import Image
from torch import Tensor

import maskfx
from maskfx.errors import InputError
from maskfx.pipelines.compile import pipeline_state_of
from maskfx.pipelines.runs import execute
from maskfx.pipelines.schedules.forecasts import Forecasts
from maskfx.runtime.cache.tier_entry import Tier
from maskfx.runtime.reuse.forecast import Curve
from maskfx.runtime.reuse.step_selection import LEAST, WHOLE, StepSelection
from tests.factories.pipelines import (
    PIPES,
    Steps,
    anew,
    call_of,
    compiled,
    distance,
    latents,
    plain,
    square,
)

FLUX, TEXT = "FluxInpaintPipeline", "FluxPipeline"
SD = "StableDiffusionInpaintPipeline"
GUIDED = "FluxInpaintPipeline-truecfg"


def parabola(time: float) -> Tensor:
    return torch.tensor([[1.0, -2.0]]) * time**2 + torch.tensor([[0.5, 3.0]]) * time - 1


# Which steps.


def computed(selection: StepSelection, steps: int) -> list[int]:
    return list(selection.selected(steps))


def test_the_ends_are_computed_and_one_in_so_many_between_nearer_towards_the_last() -> None:
    assert computed(StepSelection(every=4), 25) == [0, 5, 10, 14, 18, 21, 24]
    assert computed(StepSelection(every=3), 25) == [0, 4, 8, 11, 14, 17, 20, 22, 24]
    assert computed(StepSelection(), 15) == list(range(15))


@pytest.mark.parametrize("every", range(1, 9))
def test_gaps_shrink_and_one_in_so_many_is_computed(every: int) -> None:
    for steps in range(1, 120):
        found = computed(StepSelection(every), steps)
        gaps = [b - a for a, b in zip(found, found[1:], strict=False)]
        assert found[0] == 0
        assert found[-1] == steps - 1
        assert gaps == sorted(gaps, reverse=True)
        assert len(found) == max(1 + -(-(steps - 1) // every), min(LEAST, steps))


def test_fewer_than_usual_are_computed_if_asked_and_the_last_is_none_of_them() -> None:
    """The gap after the last computed step is no longer than those before."""
    assert computed(StepSelection(every=5, least=2), 20) == [0, 5, 10, 14, 17]
    assert computed(StepSelection(every=7, least=2), 20) == [0, 6, 12, 16]
    assert computed(StepSelection(every=4, least=2), 20) == computed(StepSelection(4), 20)
    for steps in range(3, 120):
        for every in range(2, 30):
            found = computed(StepSelection(every, least=2), steps)
            assert len(found) == 1 + -(-(steps - 1) // every)
            ends = [*found, steps - 1 if len(found) >= LEAST else steps]
            gaps = [b - a for a, b in zip(ends, ends[1:], strict=False) if b > a]
            assert found[0] == 0
            assert gaps == sorted(gaps, reverse=True)


def test_steps_of_whole_pictures_are_evenly_spaced() -> None:
    """The shorter gaps come first, and the last step is computed unless gaps are long."""
    assert computed(StepSelection(every=4, even=True), 20) == [0, 3, 7, 11, 15, 19]
    assert computed(StepSelection(every=5, least=2, even=True), 20) == [0, 4, 9, 14, 19]
    assert computed(StepSelection(every=5, least=2, even=True), 12) == [0, 3, 7, 11]
    assert computed(StepSelection(every=7, least=2, even=True), 20) == [0, 6, 12, 16]
    assert computed(StepSelection(every=7, least=2, even=True), 12) == [0, 5, 9]
    for steps in range(3, 120):
        for every in range(2, 30):
            found = computed(StepSelection(every, least=2, even=True), steps)
            assert len(found) == 1 + -(-(steps - 1) // every)
            if len(found) > 4 or steps - 1 <= 5 * (len(found) - 1):
                gaps = [b - a for a, b in zip(found, found[1:], strict=False)]
                assert found[-1] == steps - 1
                assert gaps == sorted(gaps)
                assert gaps[-1] - gaps[0] <= 1


def test_steps_in_full_are_computed() -> None:
    found = computed(StepSelection(every=9, first=3, last=3), 30)
    assert found == [0, 1, 2, 7, 14, 20, 25, 27, 28, 29]


def test_of_a_run_of_unknown_length_every_so_many_are_computed() -> None:
    """And no fewer of the first than a short run has in all."""
    assert [s for s in range(14) if StepSelection(4).computes(s, None)] == [*range(LEAST), 8, 12]
    assert [s for s in range(14) if StepSelection(4, first=7).computes(s, None)] == [
        *range(7),
        8,
        12,
    ]


def test_a_run_that_its_pipeline_doesnt_count_is_as_long_as_its_scheduler_says(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pipe = anew(FLUX, quality=every(4))
    hidden = property(lambda self: None, lambda self, count: None)
    monkeypatch.setattr(type(pipe), "_num_timesteps", hidden, raising=False)
    for strength, steps in ((1.0, 9), (0.7, 11)):
        latents(pipe, **edit(num_inference_steps=steps, strength=strength))
        run = int(steps * strength) + (strength < 1)
        assert kept_steps(pipe)[-1] == computed(StepSelection(4), run)


def test_the_next_computed_step_is_known() -> None:
    selection = StepSelection(every=4)
    assert [selection.following(s, 25) for s in (0, 2, 5, 20, 24)] == [5, 5, 10, 21, None]
    assert selection.following(8, None) == 12


@pytest.mark.parametrize(
    ("done", "steps", "wanted"),
    [(0, 1, 1), (0, 4, 4), (0, 25, 9), (3, 25, 8), (23, 25, 1), (7, 7, 0)],
)
def test_those_left_are_those_still_to_be_computed(done: int, steps: int, wanted: int) -> None:
    assert StepSelection(every=3).left(done, steps) == wanted


# What answers them.


def learnt(*answers: tuple[int, Any]) -> Curve:
    """A curve that was asked at every step up to the last one, and knows some answers."""
    curve, known = Curve(), dict(answers)
    for step in range(max(known) + 1):
        if step in known:
            curve.learn((100.0 - step,), known[step])
        else:
            curve.at((100.0 - step,))
    return curve


def after(curve: Curve, steps: int) -> Any:
    """Return the forecast after this number of steps."""
    found = None
    for step in range(steps):
        found = curve.at((50.0 - step,))
    return found


def test_three_answers_go_on_halfway_between_line_and_parabola() -> None:
    curve = learnt(
        *((n, (parabola(n), "as it is", 3, parabola(n).sum())) for n in (0, 4, 6)),
    )
    found, word, number, total = after(curve, 2)
    line = parabola(6) + (parabola(6) - parabola(4))
    torch.testing.assert_close(found, (line + parabola(8)) / 2)
    torch.testing.assert_close(total, ((line + parabola(8)) / 2).sum())
    assert (word, number) == ("as it is", 3)


def test_two_answers_go_on_along_a_line_and_one_as_it_is() -> None:
    curve = learnt((0, torch.tensor([8.0])))
    torch.testing.assert_close(after(curve, 3), torch.tensor([8.0]))
    curve = learnt((0, torch.tensor([8.0])), (4, torch.tensor([4.0])))
    torch.testing.assert_close(after(curve, 2), torch.tensor([2.0]))
    assert Curve().at((9.0,)) is None


def test_steps_count_and_not_how_far_apart_their_times_are() -> None:
    curve = Curve()
    for time, value in ((1000.0, 8.0), (900.0, 6.0)):
        curve.learn((time,), torch.tensor([value]))
    torch.testing.assert_close(curve.at((1.0,)), torch.tensor([4.0]))


def test_parts_of_a_batch_may_have_times_of_their_own() -> None:
    curve = Curve()
    for times, value in (((9.0, 0.0), 8.0), ((7.0, 0.0), 6.0)):  # the second one stands still
        curve.learn(times, torch.full((2, 3), value))
    torch.testing.assert_close(curve.at((6.0, 0.0)), torch.full((2, 3), 4.0))


def test_of_two_answers_at_one_time_the_later_counts() -> None:
    curve = Curve()
    for time, value in ((4.0, 8.0), (2.0, 99.0), (2.0, 4.0)):
        curve.learn((time,), torch.tensor([value]))
    torch.testing.assert_close(curve.at((1.0,)), torch.tensor([0.0]))


def test_answers_of_another_shape_begin_a_new_curve() -> None:
    """Guidance may end halfway."""
    curve = Curve()
    for time in (9.0, 8.0):
        curve.learn((time,), torch.ones(2, 3))
    curve.learn((7.0,), torch.ones(1, 3))
    assert curve.at((6.0,)).shape == (1, 3)


def test_what_is_known_isnt_changed_with_the_answer() -> None:
    curve, answer = Curve(), torch.tensor([8.0])
    curve.learn((4.0,), answer)
    answer.zero_()
    curve.learn((2.0,), torch.tensor([4.0]))
    torch.testing.assert_close(curve.at((1.0,)), torch.tensor([0.0]))


def test_half_numbers_are_continued_in_single_ones() -> None:
    curve = Curve()
    for time in (1000.0, 990.0, 980.0):
        curve.learn((time,), torch.full((1, 2), time / 1000, dtype=torch.bfloat16))
    found = curve.at((970.0,))
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found.float(), torch.full((1, 2), 0.97), atol=0.02, rtol=0)


# In a pipeline.


def counted(monkeypatch: pytest.MonkeyPatch, pipe: Any, **call: Any) -> list[list[str]]:
    steps = Steps(monkeypatch)
    latents(pipe, **call)
    return steps.taken()


def edit(**more: Any) -> Any:
    return call_of(PIPES[FLUX], 0, square(), **more)


def test_only_some_steps_of_an_edit_are_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    pipe = compiled(FLUX)
    latents(pipe, **edit(num_inference_steps=12))
    taken = counted(monkeypatch, pipe, **edit(num_inference_steps=12, quality=every(4)))
    assert taken == [["EditStep"]] * 6  # 0, 3, 5, 7, 9 and 11


def every(count: int, **more: Any) -> maskfx.Quality:
    return maskfx.Quality(every=count, **more)


def test_steps_are_chosen_by_number_in_place_of_as_many() -> None:
    own = StepSelection(every=5, least=2, even=True, chosen=((20, (0, 3, 6, 11, 17)), (12, (0, 5))))
    assert computed(own, 20) == [0, 3, 6, 11, 17]
    assert own.following(6, 20) == 11
    assert own.left(4, 20) == 3
    assert computed(own, 12) == [0, 3, 7, 11]  # not as many
    assert computed(replace(own, first=2), 20) == [0, 1, 3, 6, 11, 17]
    assert not own.covers(replace(own, chosen=()))


@pytest.mark.parametrize("part", [False, True])
def test_pictures_from_nothing_compute_evenly_spaced_steps(
    part: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Edits of a part don't, even without a template."""
    pipe, times = compiled(FLUX), list[float]()
    learn = Forecasts.learn

    def learning(self: Forecasts, key: Any, at: Any, *more: Any) -> None:
        times.append(at[0])
        learn(self, key, at, *more)

    monkeypatch.setattr(Forecasts, "learn", learning)
    mask = square() if part else Image.new("L", square().size, 255)
    quality = every(4, reuse="steps", refresh=1)
    given = {"num_inference_steps": 20, "strength": 1.0, "quality": quality}
    latents(pipe, **call_of(PIPES[FLUX], 0, mask, **given))
    known = [float(one) / 1000 for one in pipe.scheduler.timesteps]
    found = [next(n for n, one in enumerate(known) if abs(one - t) < 1e-4) for t in times]
    assert found == ([0, 5, 9, 13, 16, 19] if part else [0, 3, 7, 11, 15, 19])


def test_a_short_edit_is_computed_as_without() -> None:
    pipe = compiled(FLUX)
    wanted = latents(pipe, **edit(num_inference_steps=LEAST))
    found = latents(pipe, **edit(num_inference_steps=LEAST, quality=every(5)))
    assert torch.equal(found, wanted)


def test_forecast_steps_come_near_to_the_computed_ones() -> None:
    pipe = compiled(FLUX)
    whole, near, far = (
        latents(pipe, **edit(num_inference_steps=40, quality=every(n))) for n in (1, 2, 8)
    )
    assert 0 < distance(near, whole) < 0.1 < distance(far, whole)


def test_calls_without_a_mask_forecast_if_they_are_asked_to(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pipe, steps = compiled(TEXT), Steps(monkeypatch)
    dense, near, far = (
        latents(pipe, **call_of(PIPES[TEXT], num_inference_steps=20), quality=quality)
        for quality in (every(5), every(2, unmasked=True), every(5, least=2, unmasked=True))
    )
    assert len(steps.taken()) == 20 + 11 + 5
    assert 0 < distance(near, dense) < distance(far, dense)
    with pytest.raises(InputError, match="unmasked=1: give True or False"):
        maskfx.Quality(unmasked=1)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "computed"),
    [("half-steps", 11), ("third-steps", 8), ("fifth-steps", 5), ("all-steps", 20), ("fast", 20)],
)
def test_names_that_apply_to_calls_without_a_mask(
    name: str, computed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The numbers are those of docs/how-to/quality.md; "fast" is for edits."""
    pipe, steps = compiled(TEXT), Steps(monkeypatch)
    latents(pipe, **call_of(PIPES[TEXT], num_inference_steps=20), quality=name)
    assert len(steps.taken()) == computed
    assert (name in WHOLE) == (name != "fast")


def test_edits_that_forecast_share_steps_with_others() -> None:
    pipe = compiled(FLUX)

    def call(count: int) -> Any:
        return edit(num_inference_steps=13, output_type="latent", quality=every(count))

    alone = [pipe(**call(n)).images for n in (1, 2, 4)]
    with maskfx.Engine() as engine:
        tickets = [engine.submit(pipe, **call(n)) for n in (1, 2, 4)]
        together = [ticket.result(120).images for ticket in tickets]
        assert [ticket.steps for ticket in tickets] == [13, 7, 6]
    for one, other in zip(together, alone, strict=True):
        assert distance(one, other) < 1e-4


def test_both_branches_of_guidance_are_forecast(monkeypatch: pytest.MonkeyPatch) -> None:
    pipe = compiled(GUIDED)

    def call(count: int) -> Any:
        own = PIPES[GUIDED]
        return call_of(own, 0, square(), num_inference_steps=8, quality=every(count))

    whole = latents(pipe, **call(1))
    steps = Steps(monkeypatch)
    assert 0 < distance(latents(pipe, **call(2)), whole) < 0.2
    assert steps.taken() == [["EditStep"] * 2] * 6  # 0, 2, 4, 5, 6 and 7


def ends_guidance(step: int) -> dict[str, Any]:
    """A callback after which there is one branch of guidance, and what it asks for."""

    def callback(pipe: Any, index: int, time: Any, tensors: dict[str, Any]) -> dict[str, Any]:
        if index != step:
            return {}
        pipe._guidance_scale = 0.0
        return {name: value.chunk(2)[-1] for name, value in tensors.items()}

    both = ["prompt_embeds", "mask"]
    return {"callback_on_step_end": callback, "callback_on_step_end_tensor_inputs": both}


@pytest.mark.slow
def test_a_forecast_has_the_shape_of_its_own_call() -> None:
    """Guidance ends before a step that is forecast."""
    pipe = compiled(SD)

    def call(count: int) -> Any:
        given = {"num_inference_steps": 12, "guidance_scale": 2.0, **ends_guidance(4)}
        return call_of(PIPES[SD], 0, square(), quality=every(count), **given)

    whole = latents(pipe, **call(1))
    found = latents(pipe, **call(2))
    assert found.shape == whole.shape
    assert 0 < distance(found, whole) < 0.2


@pytest.mark.slow
def test_fetched_rows_have_the_shape_of_their_own_call() -> None:
    """Guidance ends while the next step's rows are loaded."""
    loader = maskfx.Loader()
    pipe = maskfx.compile(PIPES[SD].build(), loader=loader, quality="all-steps")
    latents(pipe, **call_of(PIPES[SD], 0, square(), num_inference_steps=6, **ends_guidance(3)))
    loader.close()
    assert "computed in full" not in maskfx.explain(pipe)


def test_by_its_own_steps_too(monkeypatch: pytest.MonkeyPatch) -> None:
    quality = every(2, reuse="steps", refresh=4)
    taken = counted(monkeypatch, anew(FLUX), **edit(num_inference_steps=13, quality=quality))
    assert [kind for [kind] in taken] == [
        *("itself", "RecordStep", "EditStep"),  # 0, 3, 5
        *("RecordStep", "EditStep", "RecordStep", "EditStep"),  # 7, 9, 11, 12
    ]


def test_a_call_without_a_mask_computes_every_step() -> None:
    def call() -> Any:
        return call_of(PIPES[TEXT], num_inference_steps=8)

    wanted = latents(plain(TEXT), **call())
    assert torch.equal(latents(compiled(TEXT), **call(), quality=every(4)), wanted)


def test_what_is_computed_is_told() -> None:
    told = maskfx.explain(anew(FLUX, quality=maskfx.Quality.of("balanced")))
    assert "the masked sites and 2 around them, at one step in 4" in told
    assert "in 4; the others are extrapolated" in told
    assert "the masked sites, at every step" in maskfx.explain(
        anew(FLUX, quality=every(1, margin=0))
    )


# What a template keeps.


CONTROLLED = "FluxControlNetInpaintPipeline"


@pytest.mark.slow
def test_a_step_at_which_the_function_changes_is_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A ControlNet's range ends: the outputs before it don't continue."""
    pipe = anew(CONTROLLED, quality=every(4))
    given = {**call_of(PIPES[CONTROLLED], 0, square()), "num_inference_steps": 12}
    latents(pipe, **given)
    steps: dict[str, set[int]] = {}
    original = execute.run_group

    def counted(calls: Any, *rest: Any, **more: Any) -> None:
        for call in calls:
            steps.setdefault(call.name, set()).add(call.step)
        original(calls, *rest, **more)

    monkeypatch.setattr(execute, "run_group", counted)
    latents(pipe, **given)
    whole = steps["transformer"]
    assert whole == {0, 3, 5, 7, 9, 11}
    given["control_guidance_end"] = 0.5  # off from step 6 on
    steps.clear()
    latents(pipe, **given)  # records a template of its own
    steps.clear()
    latents(pipe, **given)
    assert steps["controlnet"] == {0, 3, 5}, "what it gives beyond its range is known to be zero"
    assert steps["transformer"] == whole | {6}
    assert any("settings change at step 6" in note for note in pipeline_state_of(pipe).notes)


def kept_steps(pipe: Any) -> list[list[int]]:
    """Of each template the steps whose rows are kept."""
    library = pipeline_state_of(pipe).library
    return [
        sorted(step for name, step, _ in slots if name == "transformer")
        for slots in library._recorded.values()
    ]


def test_a_template_keeps_what_its_pipeline_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    pipe = anew(FLUX, quality=every(3))
    computed = [0, 3, 5, 7, 9, 11]
    steps = Steps(monkeypatch)
    latents(pipe, **edit(num_inference_steps=12))
    assert steps.taken() == [[kind] for kind in ("RecordStep", "EditStep") for _ in computed]
    assert kept_steps(pipe) == [computed]
    library = pipeline_state_of(pipe).library
    [template] = library._recorded
    # and the latents after every step
    assert len(library.recorded_calls(template)) == len(computed) + 12


def test_a_call_that_computes_more_has_a_template_of_its_own() -> None:
    pipe = anew(FLUX, quality=every(4))
    latents(pipe, **edit(num_inference_steps=9))
    latents(pipe, **edit(num_inference_steps=9, quality=every(4, margin=0)))
    assert kept_steps(pipe) == [[0, 2, 4, 6, 7, 8]]
    latents(pipe, **edit(num_inference_steps=9, quality=every(2)))
    assert kept_steps(pipe) == [[0, 2, 4, 6, 7, 8], list(range(9))]
    assert "no recording" not in maskfx.explain(pipe)


def test_a_whole_template_serves_all(monkeypatch: pytest.MonkeyPatch) -> None:
    pipe = anew(FLUX, quality=every(4))
    latents(pipe, **edit(num_inference_steps=9, quality=every(1)))
    steps = Steps(monkeypatch)
    latents(pipe, **edit(num_inference_steps=9))
    assert steps.taken() == [["EditStep"]] * 6
    assert kept_steps(pipe) == [list(range(9))]


def test_templates_of_another_rule_have_another_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server's disk outlives how steps are chosen."""
    pipe = anew(FLUX, quality=every(4))
    one = maskfx.template(pipe, **edit(num_inference_steps=9)).name
    monkeypatch.setattr("maskfx.runtime.reuse.step_selection.BEND", 0.0)
    assert maskfx.template(pipe, **edit(num_inference_steps=9)).name != one


def test_a_forgotten_template_leaves_nothing() -> None:
    pipe = anew(FLUX, quality=every(4))
    maskfx.template(pipe, **edit(num_inference_steps=9))
    library = pipeline_state_of(pipe).library
    [template] = library._recorded
    assert library.tiers.counters().nbytes[Tier.HOST] == library.nbytes(template)["host"] > 0
    library.forget(template)
    assert library.tiers.counters().nbytes[Tier.HOST] == 0


@pytest.mark.parametrize(
    ("one", "other", "wanted"),
    [
        (StepSelection(3), StepSelection(3), True),
        (StepSelection(3), StepSelection(6), False),
        (StepSelection(6), StepSelection(3), False),
        (StepSelection(6), StepSelection(6, least=2), False),
        (StepSelection(3, first=3, last=2), StepSelection(3), True),
        (StepSelection(3), StepSelection(3, first=3), False),
        (StepSelection(3), StepSelection(3, last=3), False),
        (StepSelection(), StepSelection(7, first=4), True),
    ],
)
def test_one_rhythm_covers_another(one: StepSelection, other: StepSelection, wanted: bool) -> None:
    assert one.covers(other) == wanted
    sets = [(set(computed(one, n)), set(computed(other, n))) for n in range(1, 30)]
    assert all(b <= a for a, b in sets) == wanted


def test_none_is_an_error() -> None:
    with pytest.raises(InputError, match="every=0: give a whole number, 1 or more"):
        maskfx.Quality(every=0)
    with pytest.raises(InputError, match="least=1: give a whole number, 2 or more"):
        maskfx.Quality(least=1)


def test_a_pipeline_is_balanced_unless_it_is_compiled_otherwise() -> None:
    pipe = maskfx.compile(PIPES[FLUX].build())
    assert pipe._maskfx.quality == maskfx.Quality.of("balanced")
    assert 'quality="all-steps" computes every step' in maskfx.explain(pipe)
    maskfx.decompile(pipe)
    maskfx.compile(pipe, quality="all-steps")
    assert pipe._maskfx.quality == maskfx.Quality()
    assert not pipe._maskfx.quality.selection.skips
    assert "all-steps" not in maskfx.explain(pipe)
