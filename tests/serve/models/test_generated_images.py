"""A picture that the server generated is a template: its edits record nothing."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import maskfx
from maskfx.serve.models.generated_images import GeneratedPictures, edits_by_generator
from maskfx.serve.models.pipeline_set import PipelineSet
from maskfx.serve.request import Pictures, Pixels
from tests.factories.served import SIDE, Served, build, job, square

WHOLE = 2 * (SIDE // 2) ** 2  # sites of a step of a recording, both branches of guidance


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    made = Served(build("StableDiffusionPipeline"), max_num_seqs=2)
    yield made
    made.model.close()


@pytest.fixture(scope="module")
def generated(served: Served) -> Pixels:
    made = served.made(generation(), Pictures())
    assert made.template is not None
    assert made.template_bytes
    assert made.pixels is not None
    return made.pixels


def generation(**more: Any) -> Any:
    return job("g", "generate", seed=5, size=(SIDE, SIDE), **more)


def sites_of_edit(served: Served, given: Any, pixels: Pixels) -> tuple[list[int], Pixels]:
    """The sites of each step, and the result."""
    served.told.steps.clear()
    made = served.made(given, Pictures((pixels,), square()))
    assert made.pixels is not None
    return [step.sites for step in served.told.steps], made.pixels


def test_an_edit_of_a_generated_picture_records_nothing(served: Served, generated: Pixels) -> None:
    assert served.model.family.editor is not served.model.family.generator
    sites, edited = sites_of_edit(served, job("e", seed=6, prompt="a dog"), generated)
    assert len(sites) == 3
    assert max(sites) < WHOLE
    mask = square()
    assert np.array_equal(edited[~mask], generated[~mask])
    assert (edited[mask] != generated[mask]).any()


def test_a_picture_whose_steps_are_extrapolated_is_no_template(served: Served) -> None:
    for quality in ("half-steps", "all-steps"):
        made = served.made(job("h", "generate", seed=9, steps=12, quality=quality), Pictures())
        assert (made.template is None) == (quality == "half-steps")


def test_with_the_same_prompt_and_seed_it_is_the_same_picture(
    served: Served, generated: Pixels
) -> None:
    _, edited = sites_of_edit(served, job("e", seed=5), generated)
    assert np.abs(edited.astype(int) - generated).max() <= 1


@pytest.mark.parametrize("more", [{"steps": 4}, {"guidance": 1.0}, {"strength": 0.7}])
def test_what_was_recorded_otherwise_is_recorded_again(
    served: Served, generated: Pixels, more: dict[str, Any]
) -> None:
    sites, _ = sites_of_edit(served, job("e", **more), generated)
    steps = {"strength": 2}.get(next(iter(more)), more.get("steps", 3))
    assert len(sites) == 2 * steps, "a recording, then the edit"


def test_another_picture_is_recorded(served: Served, generated: Pixels) -> None:
    changed = generated.copy()
    changed[0, 0, 0] ^= 1
    assert len(sites_of_edit(served, job("e"), changed)[0]) == 6


def test_a_template_that_was_evicted_is_recorded(served: Served) -> None:
    made = served.made(generation(prompt="a bird"), Pictures())
    assert made.pixels is not None
    assert made.template is not None
    assert len(sites_of_edit(served, job("e"), made.pixels)[0]) == 3
    served.model.family.library.forget(made.template)
    assert len(sites_of_edit(served, job("e"), made.pixels)[0]) == 6


@pytest.mark.parametrize(
    ("name", "recorded"),
    [
        ("StableDiffusionPipeline", True),
        ("StableDiffusionInpaintPipeline", True),
        ("StableDiffusion3InpaintPipeline", False),  # edits begin from the picture by default
        ("StableDiffusionControlNetInpaintPipeline", True),
        ("FluxKontextPipeline", False),  # the same pipeline edits and generates
    ],
)
def test_generations_are_recorded_where_an_edit_would_read_them(name: str, recorded: bool) -> None:
    family = PipelineSet.of(build(name), maskfx.compile)
    assert edits_by_generator(family) is recorded
    assert bool(GeneratedPictures().recording(family)) is recorded
