"""Whenever a program, a capture or a recording is given up, the picture stays the same."""

import random
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

import maskfx
import tests.factories.more_pipelines
import tests.factories.text_pipelines  # noqa: F401  (they enlist themselves)
from maskfx.compiler.capture.export import export_as_answered
from maskfx.errors import CacheError, InputError
from maskfx.pipelines.compile import pipeline_state_of
from maskfx.pipelines.quality import Quality
from maskfx.runtime.denoiser import CompiledDenoiser
from maskfx.runtime.execution.executor import BatchExecutor
from maskfx.runtime.programs.shared_programs import shared_programs
from maskfx.runtime.steps import EditStep
from tests.factories.pipelines import (
    PIPES,
    STEPS,
    anew,
    call_of,
    clip,
    clip_tokenizer,
    distance,
    latents,
    noise,
    picture,
    pipe_of,
    plain,
    square,
)

slow = pytest.mark.slow
QUICK = "FluxInpaintPipeline"
NAMES = [
    QUICK,
    pytest.param("StableDiffusionInpaintPipeline-9", marks=slow),
    pytest.param("StableDiffusionInpaintPipeline", marks=slow),
    pytest.param("StableDiffusionImg2ImgPipeline", marks=slow),
]
CLOSE = 1e-4
KANDINSKY = "KandinskyV22InpaintPipeline"


def drawn(seed: int) -> tuple[Image.Image, int]:
    """A mask and a step, drawn at random."""
    rng = random.Random(seed)
    first, step = rng.randrange(0, 16), rng.randrange(STEPS)
    return square(first, first + rng.randrange(6, 16)), step


def edit(pipe: Any, name: str, seed: int) -> Tensor:
    mask, _ = drawn(seed)
    return latents(pipe, **call_of(PIPES[name], seed, mask))


@cache
def wanted(name: str, seed: int) -> Tensor:
    """By rows."""
    pipe = anew(name)
    found = edit(pipe, name, seed)
    assert not pipe._maskfx.notes
    return found


@contextmanager
def verdict(pipe: Any, wrong: str) -> Iterator[None]:
    """What is known of the programs so far is changed."""
    known = [denoiser._known for denoiser in pipe._maskfx.denoisers.values()]
    before = [(dict(one._verdicts), dict(one._without)) for one in known]
    for one in known:
        one._verdicts.update(dict.fromkeys(one._verdicts, wrong))
    for denoiser in pipe._maskfx.denoisers.values():
        denoiser._validator.forget()
    try:
        yield
    finally:
        for one, (verdicts, without) in zip(known, before, strict=True):
            one._verdicts, one._without = verdicts, without
        for denoiser in pipe._maskfx.denoisers.values():
            denoiser._validator.forget()


def at_edit(monkeypatch: pytest.MonkeyPatch, number: int, act: Any) -> list[int]:
    """Do something right before the edit steps of a number; how many there were."""
    step, seen = CompiledDenoiser.step, [0]

    def stepping(denoiser: CompiledDenoiser, steps: Any) -> Any:
        if any(isinstance(one, EditStep) for one in steps):
            seen[0] += 1
            if seen[0] == number + 1:
                act()
        return step(denoiser, steps)

    monkeypatch.setattr(CompiledDenoiser, "step", stepping)
    return seen


# A program that is wrong.


@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("name", NAMES)
def test_a_wrong_program_changes_no_picture(name: str, seed: int):
    right = wanted(name, seed)
    pipe = anew(name)
    with verdict(pipe, "forced"):
        found = edit(pipe, name, seed)
        assert all(one.program is None for one in denoiser_of(pipe)._known._without.values())
        assert denoiser_of(pipe)._known._without
    assert distance(found, right) < CLOSE


@pytest.mark.parametrize("seed", [3, 4])
@pytest.mark.parametrize("name", NAMES)
def test_a_program_found_wrong_during_an_edit(name: str, seed: int, monkeypatch: Any):
    """Its template was recorded by rows: it is recorded again."""
    right = wanted(name, seed)
    pipe, (_, step) = anew(name), drawn(seed)
    with verdict(pipe, ""):
        known = denoiser_of(pipe)._known

        def fail() -> None:
            known._verdicts.update(dict.fromkeys(known._verdicts, "forced"))
            denoiser_of(pipe)._validator.forget()

        seen = at_edit(monkeypatch, step, fail)
        found = edit(pipe, name, seed)
        assert seen[0] == step + 1 + STEPS
        assert "a recorded step doesn't fit" in maskfx.explain(pipe)
        again = edit(pipe, name, seed)
    assert distance(found, right) < CLOSE
    assert distance(again, right) < CLOSE


def denoiser_of(pipe: Any) -> CompiledDenoiser:
    [found] = pipe._maskfx.denoisers.values()
    return found


@pytest.mark.wrong_program
@pytest.mark.parametrize("name", NAMES)
def test_rows_that_fail_change_no_picture(name: str, monkeypatch: pytest.MonkeyPatch):
    right = wanted(name, 1)

    def failing(*_: Any) -> Any:
        raise RuntimeError("forced")

    monkeypatch.setattr(BatchExecutor, "run", failing)
    pipe = anew(name)
    with verdict(pipe, ""):
        denoiser_of(pipe)._known._verdicts = {}  # proved again, by rows that fail
        found = edit(pipe, name, 1)
    assert distance(found, right) < CLOSE


def test_pixels_outside_the_mask_are_the_pictures_own_without_a_program():
    pipe, (mask, _) = anew(QUICK), drawn(5)
    outside = np.asarray(mask) <= 127
    with verdict(pipe, "forced"):
        done = np.asarray(pipe(**call_of(PIPES[QUICK], 5, mask)).images[0])
    assert np.array_equal(done[outside], np.asarray(picture())[outside])
    assert not np.array_equal(done, np.asarray(picture()))


# A recording that doesn't fit.


@pytest.mark.parametrize("seed", [6, 7])
@pytest.mark.parametrize("name", NAMES)
def test_a_recording_that_does_not_fit_once(name: str, seed: int, monkeypatch: Any):
    right = wanted(name, seed)
    pipe, (_, step) = anew(name), drawn(seed)

    def fail() -> None:
        raise CacheError("forced")

    at_edit(monkeypatch, step, fail)
    assert distance(edit(pipe, name, seed), right) < CLOSE
    assert "doesn't fit: forced; recorded again" in maskfx.explain(pipe)
    assert not pipe._maskfx.library.attempts.renewed


def test_a_recording_that_never_fits_is_made_again_once(monkeypatch: pytest.MonkeyPatch):
    pipe, failures, step = anew(QUICK), [0], CompiledDenoiser.step

    def stepping(denoiser: CompiledDenoiser, steps: Any) -> Any:
        if any(isinstance(one, EditStep) for one in steps):
            failures[0] += 1
            raise CacheError("forced")
        return step(denoiser, steps)

    monkeypatch.setattr(CompiledDenoiser, "step", stepping)
    edit(pipe, QUICK, 1)
    assert failures[0] == 1 + STEPS
    edit(pipe, QUICK, 1)
    assert failures[0] == 1 + 2 * STEPS
    assert "computed in full: forced" in maskfx.explain(pipe)


# A capture that fails.


@pytest.mark.parametrize("name", NAMES)
def test_a_capture_that_fails_with_symbolic_sizes(name: str, monkeypatch: pytest.MonkeyPatch):
    right = wanted(name, 1)
    shared_programs().clear()  # what was captured for it

    def failing(module: Any, inputs: Any, leaves: Any, symbolic: bool) -> Any:
        if symbolic:
            raise RuntimeError("forced")
        return export_as_answered(module, inputs, leaves, symbolic)

    monkeypatch.setattr("maskfx.compiler.capture.capture.export_as_answered", failing)
    pipe = maskfx.compile(PIPES[name].build(), quality="all-steps")
    assert distance(edit(pipe, name, 1), right) < CLOSE
    assert all(one.capture.frozen for one in denoiser_of(pipe).compilations)
    shared_programs().clear()


# The properties that diffusers' own tests ask of this pipeline.


def kandinsky(pipe: Any = None) -> Any:
    pipe = PIPES[KANDINSKY].build() if pipe is None else pipe
    pipe.unet.set_default_attn_processor()
    pipe.set_progress_bar_config(disable=True)
    return maskfx.compile(pipe, quality="all-steps")


def asked(**more: Any) -> dict[str, Any]:
    return {**call_of(PIPES[KANDINSKY], 0, square()), "output_type": "np", **more}


def furthest(one: Any, other: Any) -> float:
    return float(np.abs(one - other).max())


@slow
def test_attention_in_slices_gives_the_same_picture():
    pipe = kandinsky()
    usual = pipe(**asked()).images
    for size in (1, "max"):
        pipe.enable_attention_slicing(size)
        assert furthest(pipe(**asked()).images, usual) < 1e-3
        assert pipe._maskfx.denoisers["unet"].programs
    outside = np.asarray(square()) <= 127
    old = np.asarray(picture(), np.float32) / 255
    assert np.array_equal(usual[0][outside], old[outside])


@slow
def test_a_picture_in_a_batch_is_the_one_that_it_is_alone():
    pipe, given = kandinsky(), asked()
    single = pipe(**given).images[0]
    several: dict[str, Any] = {"generator": [noise(seed) for seed in range(3)]}
    for name in ("image_embeds", "negative_image_embeds"):
        several[name] = given[name].repeat(3, 1)
    several["image"] = [picture()] * 3
    several["mask_image"] = [np.asarray(square(), np.float32) / 255] * 3
    assert furthest(pipe(**asked(**several)).images[0], single) < 1e-3


@slow
def test_arguments_of_unequal_batches_run_in_the_module_that_joins_them():
    """The callback ends guidance and leaves the pooled text at its two elements."""
    name = "StableDiffusion3InpaintPipeline"

    def unguided(pipe: Any, step: int, _: Any, given: dict[str, Any]) -> dict[str, Any]:
        if step == 0:
            pipe._guidance_scale = 0.0
            given["prompt_embeds"] = given["prompt_embeds"][-1:]
        return given

    def arguments() -> dict[str, Any]:
        inputs = ["latents", "prompt_embeds"]
        more = {"callback_on_step_end_tensor_inputs": inputs, "callback_on_step_end": unguided}
        return {**call_of(PIPES[name], 0, square(0, 32)), **more}

    pipe = maskfx.compile(PIPES[name].build(), quality="all-steps")
    wanted = latents(PIPES[name].build(), **arguments())
    assert distance(latents(pipe, **arguments()), wanted) < CLOSE
    assert "pooled_projections: its batch is 2" in maskfx.explain(pipe)


def test_one_branch_of_unequal_batches_runs_in_the_module() -> None:
    """The pipeline repeats the texts of one branch alone for two pictures."""
    name = "CogView4Pipeline"
    given = {**PIPES[name].inputs(0), "num_images_per_prompt": 2, "generator": noise(0)}
    wanted = latents(PIPES[name].build(), **given)
    pipe = maskfx.compile(PIPES[name].build(), quality="all-steps")
    template = pipe(**{**given, "generator": noise(0)}, record=True).template
    given |= {"mask_image": square(), "generator": noise(0)}
    assert distance(latents(pipe, **given, template=template), wanted) < CLOSE


@pytest.mark.slow
def test_saved_and_loaded_it_gives_the_same_picture():
    pipe = kandinsky()
    pipe.unet.train()  # as it is when it was never loaded: its template has another name
    usual = pipe(**asked()).images
    with tempfile.TemporaryDirectory() as folder:
        pipe.save_pretrained(folder)
        loaded = kandinsky(type(PIPES[KANDINSKY].build()).from_pretrained(folder))
    assert furthest(loaded(**asked()).images, usual) < 5e-4


def test_templates_of_other_names_begin_with_the_same_noise():
    """What computes the same in another way has templates of its own."""
    starts = []
    for training in (False, True):
        pipe = anew(QUICK)
        pipe.transformer.train(training)
        edit(pipe, QUICK, 1)
        [one] = pipe.templates()
        starts.append((one.name, pipe._maskfx.library.start(one.name)))
    pipe.transformer.eval()
    pipe._maskfx.follow_settings()
    assert starts[0][0] != starts[1][0]
    assert torch.equal(starts[0][1][0], starts[1][1][0])


# Nothing to compile.


def encoders_only() -> dict[str, Any]:
    return {"text_encoder": clip(), "tokenizer": clip_tokenizer()}


def test_without_a_denoiser_a_pipeline_runs_as_it_is(caplog: pytest.LogCaptureFixture):
    pipe = pipe_of("StableDiffusionPipeline", encoders_only)
    before = pipe.encode_prompt("a cat", "cpu", 1, False)[0]
    with caplog.at_level("INFO", "maskfx"):
        assert maskfx.compile(pipe, quality="all-steps") is pipe
    assert "without unet there is nothing to compile" in caplog.text
    assert "without unet there is nothing to compile" in maskfx.explain(pipe)
    assert torch.equal(pipe.encode_prompt("a cat", "cpu", 1, False)[0], before)
    with pytest.raises(AttributeError):  # its own
        pipe("a cat")
    assert type(maskfx.decompile(pipe)).__name__ == "StableDiffusionPipeline"


def test_a_pipeline_that_takes_no_denoiser_is_an_error():
    class Upscaler:
        def __init__(self, vae: Any) -> None:
            self.vae = vae

        @property
        def components(self) -> dict[str, Any]:
            return {"vae": self.vae}

        def __call__(self) -> None: ...

    with pytest.raises(
        InputError, match=r"no denoiser found: .*timestep argument; pass the denoiser"
    ):
        maskfx.compile(Upscaler(None))


def test_a_run_that_computes_everything_captures_nothing() -> None:
    pipe = maskfx.compile(PIPES[QUICK].build(), quality=Quality(reuse="steps", refresh=1))
    found = latents(pipe, **call_of(PIPES[QUICK], 0, square()))
    assert all(not d.compilations for d in pipeline_state_of(pipe).denoisers.values())
    assert distance(found, latents(plain(QUICK), **call_of(PIPES[QUICK], 0, square()))) < 1e-6
