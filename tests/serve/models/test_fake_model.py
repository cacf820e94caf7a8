"""The fake model keeps the same promises as a real one: its pictures, its batches, its failures."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

import numpy as np
import pytest

from maskfx.errors import InputError
from maskfx.scheduling.step_reports import Stepped
from maskfx.serve.config import ServeSettings
from maskfx.serve.messages import Failed, Job, JobProgress
from maskfx.serve.models.fake_model import FakeModel, parse
from maskfx.serve.models.model import Made, PreviewMade, Told
from maskfx.serve.request import Pictures, Request, RequestKind
from tests.serve.fronts import request

QUICK = "fake:seconds_per_step=0.001,steps=4"


def model_of(text: str = QUICK, **settings: Any) -> tuple[FakeModel, SimpleQueue[Told]]:
    told: SimpleQueue[Told] = SimpleQueue()
    return FakeModel(ServeSettings(model=text, **settings), told.put), told


def job(id: str = "a", **fields: Any) -> Job:
    of_job: dict[str, Any] = {"attempt": 1}
    of_job |= {name: fields.pop(name) for name in ("attempt", "left", "traced") if name in fields}
    plain: dict[str, Any] = {"kind": RequestKind.EDIT, "prompt": "a cat", "seed": 7}
    return Job(id=id, request=Request(id=id, **(plain | fields)), **of_job)


def pictures() -> Pictures:
    return request()[1]


def answer(told: SimpleQueue[Told], id: str = "a") -> Made | Failed:
    while True:
        one = told.get(timeout=5)
        if isinstance(one, Made | Failed) and one.id == id:
            return one


def run(text: str = QUICK, given: Pictures | None = None, **fields: Any) -> Made | Failed:
    model, told = model_of(text)
    model.start(job(**fields), pictures() if given is None else given)
    result = answer(told)
    model.close()
    return result


def test_the_same_request_is_the_same_picture_and_any_other_is_another() -> None:
    def pixels(given: Pictures | None = None, **fields: Any) -> bytes:
        made = run(given=given, **fields)
        assert isinstance(made, Made)
        assert made.pixels is not None
        return made.pixels.tobytes()

    plain = pixels()
    assert pixels() == plain
    assert pixels(previews=2, user="u", attempt=3) == plain
    others: list[dict[str, Any]] = [
        {"prompt": "a dog"},
        {"seed": 8},
        {"negative_prompt": "x"},
        {"guidance": 2.0},
        {"steps": 5},
        {"lora": "l"},
    ]
    for other in others:
        assert pixels(**other) != plain
    image = pictures().images[0].copy()
    image[0, 0] += 1
    assert pixels(Pictures((image,), pictures().mask)) != plain


def test_outside_the_mask_the_image_is_kept() -> None:
    made, given = run(), pictures()
    assert isinstance(made, Made)
    assert made.pixels is not None
    assert given.mask is not None
    assert np.array_equal(made.pixels[~given.mask], given.images[0][~given.mask])
    assert not np.array_equal(made.pixels[given.mask], given.images[0][given.mask])
    assert made.mask_ratio == pytest.approx(2 * 3 / (6 * 8))


def test_without_a_picture_one_of_the_size_is_made() -> None:
    made = run(given=Pictures(), size=(40, 24), kind=RequestKind.GENERATE)
    assert isinstance(made, Made)
    assert made.pixels is not None
    assert made.pixels.shape == (24, 40, 3)


def test_jobs_step_together_and_join_between_steps() -> None:
    model, told = model_of("fake:seconds_per_step=0.02,steps=6", max_num_seqs=4)
    model.start(job("a"), pictures())
    while not isinstance(told.get(timeout=5), Stepped):
        pass
    model.start(job("b"), pictures())
    sizes = []
    while not isinstance(one := told.get(timeout=5), Made) or one.id != "b":
        if isinstance(one, Stepped):
            sizes.append(len(one.members))
            assert one.sites == 6 * len(one.members)
    assert {1, 2} <= set(sizes)
    assert sizes[-1] == 1
    model.close()


def test_no_more_than_its_slots_run_at_once() -> None:
    model, told = model_of(max_num_seqs=2)
    for k in range(5):
        model.start(job(str(k)), pictures())
    model.close()
    sizes = [len(one.members) for one in drained(told) if isinstance(one, Stepped)]
    assert max(sizes) == 2


def test_previews_come_at_even_distances_and_progress_with_every_step() -> None:
    model, told = model_of("fake:seconds_per_step=0.001,steps=8")
    model.start(job(previews=3), pictures())
    model.close()
    seen = drained(told)
    assert [one.index for one in seen if isinstance(one, PreviewMade)] == [0, 1, 2]
    assert [one.step for one in seen if isinstance(one, JobProgress)] == list(range(1, 9))


def test_a_cancelled_job_isnt_answered() -> None:
    model, told = model_of("fake:seconds_per_step=0.05,steps=100")
    model.start(job(), pictures())
    told.get(timeout=5)
    model.cancel("a")
    model.cancel("unknown")
    model.close()
    assert not [one for one in drained(told) if isinstance(one, Made | Failed)]


def test_a_job_cancelled_in_its_last_step_isnt_answered_either() -> None:
    model, told = model_of("fake:seconds_per_step=0.2,steps=1")
    model.start(job(), pictures())
    time.sleep(0.05)
    model.cancel("a")
    model.close()
    assert {type(one) for one in drained(told)} == {Stepped}


@pytest.mark.parametrize(
    ("prompt", "code"),
    [
        ("fake:fail", "generation_failed"),
        ("fake:nan", "generation_failed"),
        ("fake:oom", "out_of_memory"),
    ],
)
def test_prompts_provoke_failures(prompt: str, code: str) -> None:
    failed = run(prompt=f"a cat {prompt} on a mat")
    assert isinstance(failed, Failed)
    assert failed.code == code
    # only in the first attempt; only in a batch of more than one
    assert isinstance(run(prompt=f"{prompt}:1", attempt=2), Made)


def test_memory_runs_out_by_the_size_of_the_batch() -> None:
    model, told = model_of("fake:seconds_per_step=0.01,steps=3")
    for k in range(3):
        model.start(job(str(k), prompt="fake:oom:2"), pictures())
    model.close()
    failed = [one for one in drained(told) if isinstance(one, Failed)]
    assert {one.code for one in failed} == {"out_of_memory"}
    assert len(failed) == 3


def test_a_template_is_recorded_once_and_forgotten() -> None:
    model, told = model_of()
    model.start(job(template="t", kind=RequestKind.RECORD), pictures())
    made = answer(told)
    assert isinstance(made, Made)
    assert made.pixels is None
    assert made.template == "t"
    assert made.template_bytes
    model.start(job("b", template="t"), pictures())
    answer(told, "b")
    assert model.cache() == {
        "hits.host": 1,
        "misses.host": 1,
        "bytes.host": made.template_bytes["host"],
    }
    model.forget("t")
    assert model.cache()["bytes.host"] == 0
    model.close()


def test_settings_that_arent_any_are_refused(tmp_path: Path) -> None:
    assert parse("fake:steps=3,width=64").steps == 3
    for text in ("fake:speed=3", "fake:steps=many", "fake:__class__=1"):
        with pytest.raises(InputError, match="model 'fake:"):
            parse(text)
    with pytest.raises(OSError, match="needs"):
        FakeModel(ServeSettings(model=f"fake:needs={tmp_path / 'x'}"), print)


def test_it_needs_no_torch() -> None:
    code = "import sys, maskfx.serve.models.fake_model, maskfx.serve.workers.process\n"
    code += "import maskfx.serve.frontend.frontend\n"
    code += "assert 'torch' not in sys.modules and 'fastapi' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=30)


def drained(told: SimpleQueue[Told]) -> list[Told]:
    seen = []
    while True:
        try:
            seen.append(told.get(timeout=0.2))
        except Empty:
            return seen
