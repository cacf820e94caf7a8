"""`record_at="second-edit"`: the first edit of a picture goes by its own steps."""

from __future__ import annotations

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
