"""The real model behind a worker, over tiny pipelines: pictures, templates, previews, refusals."""

from __future__ import annotations

import json
import shutil
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file

import maskfx
from maskfx.errors import InputError
from maskfx.pipelines.compile import pipeline_state_of
from maskfx.runtime.cache.loader import HostCopyStream
from maskfx.runtime.denoiser import CompiledDenoiser
from maskfx.runtime.programs import program_cache
from maskfx.runtime.programs.shared_programs import shared_programs
from maskfx.serve.config import ServeSettings
from maskfx.serve.models import model_parts
from maskfx.serve.models.canvas import Canvas
from maskfx.serve.models.model import Made
from maskfx.serve.models.model_parts import PROGRAMS, loader_of, plans_of, programs_of
from maskfx.serve.models.model_source import load_pipeline
from maskfx.serve.models.pipeline_model import PipelineModel
from maskfx.serve.request import Pictures
from tests.factories.served import SIDE, Served, build, edit, job, picture, square

NAME = "StableDiffusion3InpaintPipeline"
COMPUTED = 10 * 10  # sites of an edit of the square, with a margin of two


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    where = tmp_path_factory.mktemp("model")
    build(NAME).save_pretrained(where)
    return where


@pytest.fixture(scope="module")
def loras(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two adapters for the queries of the transformer."""
    where = tmp_path_factory.mktemp("loras")
    transformer = build(NAME).transformer
    for seed, name in enumerate(("one", "two")):
        draw = torch.Generator().manual_seed(seed)
        tensors = {}
        for layer, module in transformer.named_modules():
            if layer.endswith("attn.to_q"):
                down = torch.randn(2, module.in_features, generator=draw)
                tensors[f"transformer.{layer}.lora_A.weight"] = down
                up = torch.randn(module.out_features, 2, generator=draw)
                tensors[f"transformer.{layer}.lora_B.weight"] = up
        save_file(tensors, where / f"{name}.safetensors")
    return where


@pytest.fixture(scope="module")
def served(folder: Path, loras: Path) -> Iterator[Served]:
    made = Served(None, model=str(folder), max_num_seqs=4, lora_dir=loras)
    made.model.engine.waiting = maskfx.BatchPolicy(patience=0.2)
    yield made
    made.model.close()


@pytest.fixture(scope="module")
def direct() -> Any:
    """The same pipeline, compiled and called by hand."""
    pipe = build(NAME)
    pipe.set_progress_bar_config(disable=True)
    return maskfx.compile(pipe, quality="balanced")


def by_hand(direct: Any, seed: int, image: int, prompt: str = "a cat", **more: Any) -> Any:
    """What an edit gives without a server."""
    result = direct(
        prompt=prompt,
        image=Image.fromarray(picture(image)),
        mask_image=Image.fromarray(square().astype(np.uint8) * 255),
        num_inference_steps=3,
        height=SIDE,
        width=SIDE,
        generator=torch.Generator().manual_seed(seed),
        **more,
    )
    return np.asarray(result.images[0])


# What it is.


def test_ready_says_what_it_takes(served: Served) -> None:
    ready = served.model.ready()
    assert ready.family == NAME
    assert (ready.size, ready.multiple, ready.site) == ((SIDE, SIDE), 4, 2)
    assert (ready.steps, ready.guidance, ready.slots) == (50, 7.0, 4)
    wanted = {"guidance", "image", "lora", "mask", "negative_prompt", "previews", "prompt"}
    assert set(ready.takes) == wanted | {"ahead", "seed", "size", "steps", "strength", "template"}
    assert ready.generates
    assert served.model.adapters is not None
    assert served.model.adapters.names() == ["one", "two"]


# What a model's folder has for its calls.


def told(folder: Path, to: Path, **call: Any) -> Path:
    model = copied(folder, to)
    (model / "call.json").write_text(json.dumps(call))
    return model


@pytest.mark.slow
def test_calls_are_told_what_the_folder_says_unless_they_say_else(
    folder: Path, tmp_path: Path, direct: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    call = {"num_inference_steps": 3, "guidance_scale": 3.0, "strength": 1.0, "mu": 0.7}
    monkeypatch.setattr(pipeline_state_of(direct), "usual", call)
    served = Served(None, model=str(told(folder, tmp_path, **call)), max_num_seqs=2)
    try:
        ready = served.model.ready()
        assert (ready.steps, ready.guidance) == (3, 3.0)
        made = served.made(job(seed=4, steps=None), edit(2))
        wanted = by_hand(direct, 4, 2, guidance_scale=3.0, strength=1.0, mu=0.7).astype(int)
        assert made.steps == 3
        assert np.abs(made.pixels - wanted).max() <= 1
        other = served.made(job(seed=4, guidance=6.0, strength=0.7), edit(2))
        wanted = by_hand(direct, 4, 2, guidance_scale=6.0, strength=0.7, mu=0.7).astype(int)
        assert np.abs(other.pixels - wanted).max() <= 1
    finally:
        served.model.close()


@pytest.mark.parametrize(
    ("call", "match"),
    [
        ({"eta": 0.5}, f"{NAME} and StableDiffusion3Pipeline accepts no eta; leave it out"),
        ({"height": 64}, "the server sets height for each call; leave it out"),
        ({"padding_mask_crop": 8}, "the server sets padding_mask_crop"),
        ({"num_inference_steps": 25.0}, "num_inference_steps is 25.0; give a whole number"),
        ({"strength": 0}, "strength is 0; give a number above 0, up to 1"),
        ({"guidance_scale": "3"}, "guidance_scale is '3'; give a number"),
        ({"return_dict": 1}, "the server sets return_dict"),
        ({"sigmas": [1, 0]}, r"sigmas is \[1, 0\]; expected a number, a string, true or false"),
    ],
)
def test_what_a_folder_cant_tell_is_refused(
    folder: Path, tmp_path: Path, call: dict[str, Any], match: str
) -> None:
    with pytest.raises(InputError, match=match):
        PipelineModel(settings(told(folder, tmp_path, **call)), print)


@pytest.mark.slow
def test_a_folders_strength_may_leave_few_steps(tmp_path: Path) -> None:
    """Of the two of a first edit it would leave none; costs are fitted to what is left."""
    build("StableDiffusionInpaintPipeline-9").save_pretrained(tmp_path)
    (tmp_path / "call.json").write_text(json.dumps({"strength": 0.3}))
    served = Served(None, model=str(tmp_path))
    try:
        assert served.model.ready().strength == 0.3
        assert served.made(job(steps=10), edit(1)).steps == 3
    finally:
        served.model.close()


@pytest.mark.parametrize(
    ("text", "match"), [("{", "not valid JSON"), ("[3]", "expected an object")]
)
def test_a_call_file_that_cant_be_read_is_refused(
    folder: Path, tmp_path: Path, text: str, match: str
) -> None:
    model = copied(folder, tmp_path)
    (model / "call.json").write_text(text)
    with pytest.raises(InputError, match=f"call.json.*{match}"):
        PipelineModel(settings(model), print)


# Loads under compute.


def test_loads_and_a_device_tier_change_no_picture(direct: Any) -> None:
    """The CPU's twins of what a CUDA device gets."""
    served = Served(build(NAME), max_num_seqs=2, overlap="on", cache_device_bytes=1 << 28)
    try:
        for seed in (3, 4):  # records, then edits the recording
            made = served.made(job(seed=seed, strength=1.0), edit(1))
            assert made.pixels is not None
            wanted = by_hand(direct, seed, 1, strength=1.0)
            assert np.abs(made.pixels - wanted.astype(int)).max() <= 1
        assert served.model.loader is not None
        assert served.model.loader.loaded_bytes > 0
        assert served.model.cache()["bytes.device"] > 0
    finally:
        served.model.close()


def test_a_cuda_device_gets_a_loader_and_a_cpu_none(monkeypatch: pytest.MonkeyPatch) -> None:
    lanes: list[torch.device] = []

    class Lane(HostCopyStream):
        def __init__(self, device: torch.device) -> None:
            lanes.append(device)

    monkeypatch.setattr("maskfx.runtime.cache.loader.CudaCopyStream", Lane)
    assert loader_of(ServeSettings()) is None, "that of compile, where there is a link"
    assert loader_of(ServeSettings(device="cuda:1", overlap="off")) is None
    loader = loader_of(ServeSettings(device="cuda:1", overlap="on"))
    assert loader is not None
    for device in map(torch.device, ("cuda:1", "cpu", "cuda:0", "cuda:1")):
        loader.begin([], device)
    assert lanes == [torch.device("cuda:1"), torch.device("cuda:0")]
    loader.close()
    slow = loader_of(ServeSettings(link_bandwidth=1e6, overlap="off"))
    assert slow is not None
    assert (slow.bandwidth, slow.overlap) == (1e6, False)


def test_settings_say_whether_loads_are_planned() -> None:
    assert plans_of(ServeSettings()) is None
    assert plans_of(ServeSettings(overlap="off")) is False
    assert plans_of(ServeSettings(plans="on", overlap="off")) is True
    assert plans_of(ServeSettings(plans="off", link_bandwidth=1e6)) is False


def test_loads_over_a_link_are_planned_and_the_router_is_told(direct: Any, tmp_path: Path) -> None:
    served = Served(build(NAME), max_num_seqs=2, link_bandwidth=2e7, cache_dir=tmp_path)
    try:
        facts = served.model.ready().loads
        assert facts is not None
        assert 1e5 < facts.bandwidth <= 2.2e7
        assert 0 < facts.avoidable < 1
        assert list(tmp_path.glob("programs/costs/*.json"))
        for seed in (3, 4):
            made = served.made(job(seed=seed, strength=1.0), edit(1))
            assert made.pixels is not None
            wanted = by_hand(direct, seed, 1, strength=1.0)
            assert np.abs(made.pixels - wanted.astype(int)).max() <= 1
    finally:
        served.model.close()


def test_a_waiting_requests_template_is_read_into_memory(tmp_path: Path) -> None:
    served = Served(build(NAME), cache_dir=tmp_path)
    try:
        made = served.made(job(seed=3, strength=1.0, template="hat"), edit(1))
        assert made.template == "hat"
        keys, tiers = served.model.recordings.entries("hat"), served.model.tiers
        with tiers._lock:
            for key in keys:
                tiers._forget(key)
        assert not any(map(tiers.where, keys))
        served.model.prefetch("hat")
        served.model.prefetch("no such")
        until = time.monotonic() + 10
        while not all(tiers.where(key) is not None for key in keys):
            assert time.monotonic() < until
            time.sleep(0.01)
    finally:
        served.model.close()


# Pictures.


def test_an_edit_is_the_picture_of_the_compiled_pipeline(served: Served, direct: Any) -> None:
    made = served.made(job(seed=3, strength=1.0), edit(1))
    assert made.pixels is not None
    apart = np.abs(made.pixels - by_hand(direct, 3, 1, strength=1.0).astype(int))
    assert apart.max() <= 1  # rounding may fall to the other side
    assert (apart > 0).mean() < 0.01
    assert made.steps == 3
    assert made.mask_ratio == pytest.approx(COMPUTED / 256)


def test_several_at_once_are_the_pictures_of_each_alone(served: Served, direct: Any) -> None:
    seeds = [11, 12, 13, 14, 15, 16]
    jobs = [(job(f"j{s}", seed=s, prompt=f"a cat {s}"), edit(s % 3)) for s in seeds]
    before = len(served.model.engine.steps)
    answers = served.answers(*jobs)
    assert max(s.requests for s in list(served.model.engine.steps)[before:]) > 1
    for seed in seeds:
        wanted = by_hand(direct, seed, seed % 3, f"a cat {seed}").astype(int)
        assert np.abs(answers[f"j{seed}"].pixels - wanted).max() <= 1  # type: ignore[union-attr]


def test_wishes_reach_the_pipeline(served: Served, direct: Any) -> None:
    more: dict[str, Any] = {"negative_prompt": "a dog", "strength": 0.9}
    made = served.made(job(seed=4, guidance=3.0, **more), edit(2))
    wanted = by_hand(direct, 4, 2, guidance_scale=3.0, **more).astype(int)
    assert np.abs(made.pixels - wanted).max() <= 1
    plain = served.made(job(seed=4), edit(2))
    assert not np.array_equal(made.pixels, plain.pixels)  # type: ignore[arg-type]


@pytest.mark.parametrize("size", [(32, 32), (31, 29), (23, 18)])
def test_outside_the_mask_no_byte_changes(served: Served, size: tuple[int, int]) -> None:
    width, height = size
    given = picture(4, width, height)
    mask = square(width, height)
    mask[height - 1, width - 1] = True  # the corner that the canvas is made larger from
    made = served.made(job(), Pictures((given,), mask))
    assert made.pixels is not None
    assert made.pixels.shape == given.shape
    assert np.array_equal(made.pixels[~mask], given[~mask])
    assert (made.pixels[mask] != given[mask]).any()


def test_another_size_than_the_pictures(served: Served) -> None:
    made = served.made(job(size=(28, 24)), edit(1))
    assert made.pixels is not None
    assert made.pixels.shape == (24, 28, 3)
    canvas = Canvas.of(picture(1), square(), (28, 24), 4)
    assert np.array_equal(made.pixels[~canvas.mask], canvas.picture[~canvas.mask])
    assert canvas.mask.mean() >= square().mean(), "what is masked stays masked"


def test_without_a_mask_everything_is_edited(served: Served) -> None:
    before = served.model.cache()["bytes.host"]
    made = served.made(job(strength=1.0), Pictures((picture(7),)))
    assert made.mask_ratio == 1
    assert made.template is None
    assert made.pixels is not None
    assert np.mean(made.pixels != picture(7)) > 0.5
    assert served.model.cache()["bytes.host"] == before, "a recording that nothing would read"


def test_a_picture_from_nothing(served: Served) -> None:
    jobs = [
        (job(n, "generate", seed=s, size=(30, 26)), Pictures()) for n, s in (("a", 1), ("b", 2))
    ]
    made = served.answers(*jobs, (job("c", "generate", seed=1, size=(30, 26)), Pictures()))
    assert all(isinstance(one, Made) for one in made.values()), made
    shapes = {one.pixels.shape for one in made.values()}  # type: ignore[union-attr]
    assert shapes == {(26, 30, 3)}
    a, b, c = (made[n].pixels.astype(int) for n in "abc")  # type: ignore[union-attr]
    assert np.abs(a - c).max() <= 1
    assert np.abs(a - b).max() > 1


# What is reported meanwhile.


def test_progress_previews_and_steps_are_told(served: Served) -> None:
    told = served.told
    for heard in (told.progress, told.previews, told.steps):
        heard.clear()
    made = served.made(job("p", steps=6, strength=1.0, previews=2), edit(5))
    assert [(p.id, p.step, p.steps) for p in told.progress] == [("p", n, 6) for n in range(1, 7)]
    assert [(s.id, s.attempt, s.index) for s in told.previews] == [("p", 1, 0), ("p", 1, 1)]
    for preview in told.previews:
        assert np.array_equal(preview.pixels[~square()], picture(5)[~square()])
    recorded, edited = 2 * 256, 2 * COMPUTED  # both branches of guidance
    # so short a run forecasts none
    assert [s.sites for s in told.steps] == [recorded] * 6 + [edited] * 6
    assert all(len(s.members) == 1 and s.seconds > 0 for s in told.steps)
    assert made.steps == 6


def test_a_job_that_wants_no_previews_gets_none(served: Served) -> None:
    served.told.previews.clear()
    served.made(job(steps=4), edit(5))
    assert not served.told.previews


def test_a_traced_job_tells_what_its_time_went_to(served: Served) -> None:
    """A picture that was not recorded: its recording comes first."""
    spells = served.told.spells
    spells.clear()
    began = time.monotonic()
    served.made(job("t", traced=True, strength=1.0), edit(31))
    ended = time.monotonic()
    record, step = [("record", n) for n in range(3)], [("step", n) for n in range(3)]
    run = [("encode", None), *record, ("encode", None), *step, ("decode", None)]
    assert [(s.name, s.number) for s in spells] == run
    assert all((s.id, s.attempt) == ("t", 1) and s.began < s.ended for s in spells)
    times = [began, *(t for s in spells for t in (s.began, s.ended)), ended]
    assert times == sorted(times), "they don't overlap, and lie between call and answer"
    spells.clear()
    served.made(job("r", "record", traced=True, strength=1.0), Pictures((picture(32),)))
    assert [(s.name, s.number) for s in spells] == [("encode", None), *record]
    spells.clear()
    served.made(job("u"), edit(31))
    assert not spells


# Cancelling, deadlines, what goes wrong.


def test_a_cancelled_job_stops_before_its_next_step(served: Served) -> None:
    served.told.progress.clear()
    served.told.moved.clear()
    served.model.start(job("gone", steps=150, strength=1.0), edit(6))
    assert served.told.moved.wait(60)
    served.model.cancel("gone")
    seen = len(served.told.progress)
    deadline = time.monotonic() + 10
    while served.model._sittings and time.monotonic() < deadline:
        time.sleep(0.005)
    assert not served.model._sittings
    assert len(served.told.progress) <= seen + 2
    served.model.cancel("never")
    assert served.made(job("next"), edit(6)).id == "next"
    assert served.told.answers.empty(), "a cancelled job is answered by nobody"


def test_a_job_cancelled_before_it_runs(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    original = Canvas.of

    def slow(*given: Any) -> Canvas:
        time.sleep(0.2)
        return original(*given)

    monkeypatch.setattr(Canvas, "of", slow)
    served.told.progress.clear()
    served.model.start(job("early"), edit(1))
    served.model.cancel("early")
    while served.model._sittings:
        time.sleep(0.005)
    assert not served.told.progress
    assert served.told.answers.empty()


def test_a_deadline_that_passed(served: Served) -> None:
    assert served.failed(job(left=0.0), edit(1)).code == "deadline_exceeded"


def test_one_job_whose_numbers_arent_finite_fails_alone(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    denoiser = served.model.runner.family.main.pipe._maskfx.denoisers["transformer"]
    original = denoiser.step

    def poisoned(steps: Any) -> Any:
        results = original(steps)
        for step, result in zip(steps, results, strict=True):
            if isinstance(step, maskfx.EditStep) and int(step.mask.sum()) < COMPUTED:
                result[0].fill_(float("nan"))
        return results

    monkeypatch.setattr(denoiser, "step", poisoned)
    small = Pictures((picture(1),), square(last=12))
    answers = served.answers((job("good"), edit(1)), (job("bad"), small))
    assert answers["bad"].code == "generation_failed"  # type: ignore[union-attr]
    assert "/" not in answers["bad"].message  # type: ignore[union-attr]
    assert answers["good"].pixels is not None  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (torch.OutOfMemoryError("CUDA out of memory on host gpu7"), "out_of_memory"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory"), "out_of_memory"),
        (RuntimeError("in /home/me/model.py"), "generation_failed"),
        (InputError("template='x' isn't there in /data/cache/x.maskfx"), "invalid_value"),
    ],
)
def test_errors_are_told_without_paths_and_hosts(
    served: Served, monkeypatch: pytest.MonkeyPatch, error: Exception, code: str
) -> None:
    def broken(*_: Any, **__: Any) -> Any:
        raise error

    monkeypatch.setattr(CompiledDenoiser, "step", broken)
    monkeypatch.setattr(CompiledDenoiser, "plain_step", broken)
    failed = served.failed(job("x", "generate"), Pictures())
    assert failed.code == code
    assert not any(word in failed.message for word in ("/", "gpu7", "model.py"))


@pytest.mark.parametrize(
    ("asked", "pictures", "code", "param"),
    [
        (job(lora="../one"), edit(), "lora_not_found", "lora"),
        (job(), Pictures((picture(), picture(1)), square()), "invalid_value", "image"),
        (job(), edit(controls=(picture(),)), "unsupported_parameter", "control_image"),
        (job(kind="generate"), edit(), "unsupported_parameter", "image"),
        (job(kind="generate", strength=0.5), Pictures(), "unsupported_parameter", "strength"),
    ],
)
def test_what_nothing_would_hear_is_refused(
    served: Served, asked: Any, pictures: Pictures, code: str, param: str
) -> None:
    failed = served.failed(asked, pictures)
    assert (failed.code, failed.param) == (code, param)


# Templates.


def test_a_template_is_recorded_used_and_forgotten(served: Served) -> None:
    before = served.model.cache().get("bytes.host", 0)
    recorded = served.made(job("r", "record", template="mine"), Pictures((picture(9),)))
    assert recorded.pixels is None
    assert recorded.template == "mine"
    assert recorded.template_bytes is not None
    held = recorded.template_bytes["host"]
    assert served.model.cache()["bytes.host"] == before + held
    served.told.steps.clear()
    made = served.made(job("e", template="mine", steps=3), edit(9))
    assert (made.template, made.template_bytes) == ("mine", {"host": held})
    assert {s.sites for s in served.told.steps} == {2 * COMPUTED}, "nothing was recorded again"
    served.model.forget("mine")
    assert served.model.cache()["bytes.host"] == before
    again = served.made(job("e2", template="mine"), edit(9))
    assert np.array_equal(again.pixels, made.pixels)  # type: ignore[arg-type]
    served.model.forget("mine")
    served.model.forget("never")
    assert served.model.cache()["bytes.host"] == before


def test_a_recording_that_two_names_stand_for_is_kept_for_the_other(served: Served) -> None:
    for name in ("one", "two"):
        served.made(job(name, "record", template=name), Pictures((picture(12),)))
    held = served.model.cache()["bytes.host"]
    served.model.forget("one")
    assert served.model.cache()["bytes.host"] == held
    served.model.forget("two")
    assert served.model.cache()["bytes.host"] < held


def test_a_recording_that_nobody_waits_for_any_more_isnt_kept(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, pins = served.model.cache()["bytes.host"], dict(served.model.tiers._pins)
    named = served.model._named

    def late(template: str | None, made: Made) -> Made:
        served.model.cancel("r")
        return named(template, made)

    monkeypatch.setattr(served.model, "_named", late)
    served.model.start(job("r", "record", template="lost"), Pictures((picture(13),)))
    deadline = time.monotonic() + 60
    while served.model._sittings and time.monotonic() < deadline:
        time.sleep(0.005)
    assert served.told.answers.empty()
    assert (served.model.cache()["bytes.host"], dict(served.model.tiers._pins)) == (before, pins)
    assert "lost" not in served.model.recordings


def test_a_job_that_gets_no_thread_leaves_nothing(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    def start(_: object) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr("threading.Thread.start", start)
        with pytest.raises(RuntimeError):
            served.model.start(job("x"), edit(1))
    assert not served.model._sittings
    assert not served.model._threads


def test_a_template_without_a_name_has_its_own(served: Served) -> None:
    one = served.made(job("r", "record"), Pictures((picture(8),)))
    made = served.made(job("e", seed=5), edit(8))
    assert made.template == one.template
    assert one.template is not None
    before = served.model.cache()["bytes.host"]
    served.model.forget(one.template)
    assert served.model.cache()["bytes.host"] < before


@pytest.mark.slow
def test_templates_survive_on_disk(folder: Path, tmp_path: Path) -> None:
    first = Served(None, model=str(folder), cache_dir=tmp_path)
    wanted = first.made(job(), edit(3))
    assert wanted.template_bytes is not None
    assert wanted.template_bytes["disk"] > 0
    assert first.model.cache()["bytes.disk"] >= wanted.template_bytes["disk"]
    first.model.close()
    second = Served(None, model=str(folder), cache_dir=tmp_path)
    found = second.made(job(), edit(3))
    assert np.array_equal(found.pixels, wanted.pixels)  # type: ignore[arg-type]
    assert found.template == wanted.template
    assert {s.sites for s in second.told.steps} == {2 * COMPUTED}, "it was recorded again"
    assert second.model.cache()["hits.disk"] > 0
    second.model.close()


@pytest.mark.slow
@pytest.mark.parametrize("after", ["restart", "adapter"])
def test_a_template_of_an_earlier_life_is_known_and_can_be_deleted(
    after: str, folder: Path, loras: Path, tmp_path: Path
) -> None:
    settings = {"model": str(folder), "cache_dir": tmp_path, "lora_dir": loras}
    adapter = "one" if after == "adapter" else None
    first = Served(None, **settings)
    before = first.model.cache()["bytes.disk"]
    recorded = first.made(job("r", "record", template="hat", lora=adapter), Pictures((picture(3),)))
    first.model.close()
    second = Served(None, **settings)
    assert recorded.template_bytes is not None
    assert second.model.ready().on_disk == {"hat": recorded.template_bytes["disk"]}
    assert second.model.tiers._pins
    second.model.forget("hat")
    assert not second.model.tiers._pins
    assert second.model.ready().on_disk == {}
    assert second.model.cache()["bytes.disk"] == before
    second.model.close()


# Adapters.


@pytest.mark.slow
def test_jobs_with_different_adapters_dont_mix(served: Served, loras: Path) -> None:
    wanted = {}
    for name in (None, "one", "two"):
        pipe = build(NAME)
        if name is not None:
            merge_by_hand(pipe.transformer, loras / f"{name}.safetensors")
        wanted[name] = by_hand(maskfx.compile(pipe, quality="balanced"), 3, 1).astype(int)
    jobs = [(job(f"{n}{i}", seed=3, lora=n), edit(1)) for i in range(2) for n in wanted]
    answers = served.answers(*jobs)
    for name, pixels in wanted.items():
        for i in range(2):
            found = answers[f"{name}{i}"].pixels  # type: ignore[union-attr]
            assert np.abs(found - pixels).max() <= 1
    assert np.abs(wanted["one"] - wanted["two"]).max() > 1
    assert np.abs(wanted["one"] - wanted[None]).max() > 1


def merge_by_hand(module: Any, path: Path) -> None:
    from safetensors.torch import load_file

    tensors = load_file(path)
    for key, down in tensors.items():
        if key.endswith("lora_A.weight"):
            layer = key.removeprefix("transformer.").removesuffix(".lora_A.weight")
            up = tensors[key.replace("lora_A", "lora_B")]
            module.get_submodule(layer).weight.data += up @ down


def test_an_adapter_of_another_model_fails_its_request(served: Served, loras: Path) -> None:
    save_file({"transformer.no.lora_A.weight": torch.zeros(2, 4)}, loras / "other.safetensors")
    served.model.register_adapter("other")
    failed = served.failed(job(lora="other"), edit())
    assert (failed.code, failed.param) == ("invalid_value", "lora")
    assert "other.safetensors: transformer.no: the pipeline has no such" in failed.message
    served.model.remove_adapter("other")
    assert served.failed(job(lora="other"), edit()).code == "lora_not_found"
    assert served.made(job(), edit()).pixels is not None


def test_adapters_add_up_with_weights_and_are_counted(served: Served) -> None:
    both = served.made(job(seed=3, lora="one:0.5,two:-1"), edit(1)).pixels
    assert both is not None
    other = served.made(job(seed=3, lora="two:-1,one:0.5"), edit(1)).pixels
    assert np.abs(both.astype(int) - other).max() <= 1
    counts = served.model.cache()
    assert counts["adapters.loads"] <= 2, "each file is loaded once"
    assert counts["adapters.hits"] > 0
    assert counts["adapters.bytes"] > 0


def test_a_pickled_adapter_is_refused_at_load(folder: Path, tmp_path: Path) -> None:
    torch.save({}, tmp_path / "x.pt")
    with pytest.raises(InputError, match=r"x\.pt: a pickle can run code"):
        PipelineModel(settings(folder, lora_dir=tmp_path), print)


# Wrong models.


def settings(model: Path | str, **more: Any) -> ServeSettings:
    return ServeSettings(model=str(model), **more)


def copied(folder: Path, to: Path) -> Path:
    return Path(shutil.copytree(folder, to / "copy"))


def test_a_second_start_captures_nothing(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a cache directory, programs are in the user's."""
    pictures = []
    for fails in (False, True):
        shared_programs().clear()
        if fails:
            monkeypatch.setattr(program_cache, "capture", None)
        served = Served(None, model=str(folder), max_num_seqs=2)
        try:
            pictures.append(np.asarray(served.made(job(), edit()).pixels))
        finally:
            served.model.close()
    first, second = pictures
    assert np.array_equal(first, second)


def test_programs_are_kept_nowhere_without_a_home(monkeypatch: pytest.MonkeyPatch) -> None:
    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    assert programs_of(settings("a", cache_dir=Path("b"))) == Path("b") / PROGRAMS
    monkeypatch.setattr(model_parts, "kept_folder", homeless)
    assert programs_of(settings("a")) is None


def test_a_folder_of_pickles_is_refused(folder: Path, tmp_path: Path) -> None:
    model = copied(folder, tmp_path)
    weights = next((model / "transformer").glob("*.safetensors"))
    weights.rename(weights.with_suffix(".bin"))
    with pytest.raises(InputError, match="transformer has its weights as pickles.*save_pretrained"):
        PipelineModel(settings(model), print)


def test_code_of_a_folder_is_refused(folder: Path, tmp_path: Path) -> None:
    model = copied(folder, tmp_path)
    (model / "pipeline.py").write_text("raise SystemExit")
    with pytest.raises(InputError, match=r"code of its own \(pipeline\.py\)"):
        PipelineModel(settings(model), print)


@pytest.mark.parametrize("name", ["model.ckpt", "model.pt", "model.bin", "model.safetensors"])
def test_a_single_file_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b"\x80\x04N.")
    with pytest.raises(InputError, match=r"serve a diffusers folder with safetensors"):
        PipelineModel(settings(tmp_path / name), print)


@pytest.mark.parametrize("index", [None, "[]", "{", '{"_class_name": ["my", "Pipe"]}'])
def test_what_is_no_pipeline_is_refused(tmp_path: Path, index: str | None) -> None:
    if index is not None:
        (tmp_path / "model_index.json").write_text(index)
    with pytest.raises(InputError, match="model_index|brings code"):
        PipelineModel(settings(tmp_path), print)


@pytest.mark.parametrize("name", ["no-such-thing", "../../etc/passwd/x", "a/b/c"])
def test_a_name_that_is_nothing_is_refused(name: str) -> None:
    with pytest.raises(InputError, match="neither a folder nor a hub id"):
        PipelineModel(settings(name), print)


@pytest.mark.parametrize(
    ("cause", "text"),
    [
        (socket.gaierror(-2, "Name or service not known"), "the hub can't be reached .*not known"),
        (FileNotFoundError(2, "no model_index.json"), "not cached; expected a diffusers pipeline"),
    ],
)
def test_a_hub_that_cant_be_reached_is_reported(
    monkeypatch: pytest.MonkeyPatch, cause: Exception, text: str
) -> None:
    def load(*_: object, **__: object) -> None:
        try:
            raise cause
        except OSError as error:
            raise OSError("not cached") from error

    monkeypatch.setattr(diffusers.DiffusionPipeline, "from_pretrained", load)
    with pytest.raises(InputError, match=text):
        load_pipeline("nobody/nothing", "float32", "cpu")


def test_a_hub_id_that_isnt_there_is_refused() -> None:
    with pytest.raises(InputError, match="can't be loaded"):
        PipelineModel(settings("nobody/nothing"), print)


def test_without_a_model_and_without_shipped_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(maskfx.serve.model_folder.shipped, "names", list)
    with pytest.raises(InputError, match="ships none"):
        PipelineModel(ServeSettings(), print)
