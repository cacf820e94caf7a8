"""`record_at`: the first edit of a picture goes by its own steps, and when it is recorded."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import numpy as np
import pytest

from maskfx.serve.config import ServeSettings
from maskfx.serve.models.model_parts import quality_of
from maskfx.serve.request import Pictures, Pixels
from tests.factories.served import Served, build, job, picture, square

STEPS = 12


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    pipe = build("StableDiffusionInpaintPipeline")
    made = Served(pipe, max_num_seqs=2, record_at="second-edit")
    yield made
    made.model.close()


def edited(served: Served, seed: int) -> tuple[str | None, int, Pixels]:
    """The template that the edit recorded or read, its number of steps, its pixels."""
    served.told.steps.clear()
    given = Pictures((picture(5),), square())
    made = served.made(job("e", seed=seed, steps=STEPS, strength=1.0), given)
    assert made.pixels is not None
    return made.template, len(served.told.steps), made.pixels


def test_the_second_edit_of_a_picture_records_its_template(served: Served) -> None:
    computed = quality_of(ServeSettings(record_at="second-edit")).selection.left(0, STEPS)
    counts = []
    for seed in (1, 2, 3):
        template, steps, pixels = edited(served, seed)
        counts.append((template is not None, steps))
        assert np.array_equal(pixels[~square()], picture(5)[~square()])
    assert counts == [(False, computed), (True, 2 * computed), (True, computed)]


# In idle time.


@pytest.fixture(scope="module")
def idle() -> Iterator[Served]:
    pipe = build("StableDiffusionInpaintPipeline")
    made = Served(pipe, max_num_seqs=2, record_at="idle")
    yield made
    made.model.close()


def recordings(served: Served) -> dict[str, int]:
    """The counts of recordings, once none is left."""
    for _ in range(2_000):
        counts = {k: v for k, v in served.model.cache().items() if k.startswith("recordings.")}
        if not counts.get("recordings.waiting"):
            return {name.partition(".")[2]: count for name, count in counts.items()}
        threading.Event().wait(0.02)
    raise AssertionError("a recording doesn't end")


def test_no_edit_waits_for_a_recording(idle: Served) -> None:
    computed = quality_of(ServeSettings(record_at="idle")).selection.left(0, STEPS)
    found = []
    for number in (1, 2):
        template, steps, _ = edited(idle, number)
        found.append((template is not None, steps))
        assert recordings(idle) == {"waiting": 0, "finished": 1, "dropped": 0}
    assert found == [(False, computed), (True, computed)], "steps of recordings aren't reported"


def test_a_picture_that_is_recorded_ahead_has_its_template_at_the_first_edit(idle: Served) -> None:
    before = recordings(idle).get("finished", 0)
    given = Pictures((picture(6),))
    made = idle.made(job("r", kind="ahead", steps=STEPS, strength=1.0), given)
    assert made.pixels is None
    assert made.template is not None
    assert recordings(idle)["finished"] == before + 1
    assert made.template not in idle.model.family.library._pinned
    answer = idle.made(job("e", steps=STEPS, strength=1.0), Pictures((picture(6),), square()))
    assert answer.template == made.template


def test_a_model_that_closes_waits_for_no_recording() -> None:
    made = Served(build("StableDiffusionInpaintPipeline"), record_at="idle")
    for number in range(3):
        made.model.start(
            job(f"r{number}", kind="ahead", steps=200, strength=1.0), Pictures((picture(number),))
        )
    made.model.close()
    assert made.told.answers.empty(), "they were cancelled"
