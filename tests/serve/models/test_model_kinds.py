"""Other kinds of pipelines behind the same model: which twins serve, what clients are asked for."""

from __future__ import annotations

from itertools import combinations
from typing import Any

import numpy as np
import pytest
import torch

from maskfx.pipelines.compile import pipeline_state_of
from maskfx.pipelines.masks.masks import grown, pooled
from maskfx.serve.request import Mask, Pictures
from tests.factories.served import SIDE, Served, build, edit, job, picture, square

pytestmark = pytest.mark.slow

CONTROL = "StableDiffusionControlNetInpaintPipeline"
KLEIN = "Flux2KleinPipeline"

MORE: dict[str, Any] = {"steps": 6, "strength": 1.0}

# name: which edit, which make pictures from nothing, pixels along a site
KINDS: dict[str, tuple[str, str | None, int]] = {
    "StableDiffusionPipeline": ("StableDiffusionInpaintPipeline", "StableDiffusionPipeline", 2),
    "StableDiffusionInpaintPipeline-9": ("StableDiffusionInpaintPipeline", None, 2),
    CONTROL: (CONTROL, "StableDiffusionControlNetPipeline", 2),
    "FluxInpaintPipeline": ("FluxInpaintPipeline", "FluxPipeline", 4),
    "FluxKontextPipeline": ("FluxKontextPipeline", "FluxKontextPipeline", 4),
}


@pytest.mark.parametrize("name", list(KINDS))
def test_a_kind_is_served(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from diffusers.pipelines.flux import pipeline_flux_kontext as kontext

    # references are scaled to one of these, of a million pixels each
    monkeypatch.setattr(kontext, "PREFERRED_KONTEXT_RESOLUTIONS", [(SIDE, SIDE)])
    edits, generates, site = KINDS[name]
    served = Served(build(name))
    family, ready = served.model.family, served.model.ready()
    assert family.editor is not None
    assert type(family.editor.plain).__name__ == edits
    made_by = None if family.generator is None else type(family.generator.plain).__name__
    assert made_by == generates
    assert ready.generates
    assert ready.site == site
    control = (picture(5),) if name == CONTROL else ()
    assert ("control" in ready.takes) is bool(control)
    check_edits(served, control)
    drawn = served.made(job(kind="generate"), Pictures(controls=control))
    assert drawn.pixels is not None
    assert drawn.pixels.std() > 0
    served.model.close()


def check_edits(served: Served, control: Any) -> None:
    """Edits keep what isn't masked; templates are of the picture, whatever the mask."""
    first = served.made(job("a"), edit(1, controls=control))
    assert first.pixels is not None
    assert np.array_equal(first.pixels[~square()], picture(1)[~square()])
    assert not np.array_equal(first.pixels[square()], picture(1)[square()])
    again = served.made(job("b"), edit(1, controls=control))
    assert np.array_equal(first.pixels, again.pixels)  # type: ignore[arg-type]
    recording = job("r", "record", template="mine")
    recorded = served.made(recording, Pictures((picture(2),), controls=control))
    served.told.steps.clear()
    edited = served.made(job("e", template="mine"), edit(2, controls=control))
    assert edited.template_bytes == recorded.template_bytes
    assert edited.mask_ratio == pytest.approx(share_of(square(), served))
    assert len({step.sites for step in served.told.steps}) == 1, "nothing was recorded again"


def share_of(mask: Mask, served: Served) -> float:
    """Of the sites, with the margin that the model's quality has; a reference adds as many."""
    member = served.model.family.main
    margin = pipeline_state_of(member.pipe).quality.margin
    side = SIDE // served.model.ready().site
    share = grown(pooled(torch.from_numpy(mask), (side, side)), margin).float().mean()
    return float(share) / (1 if member.signature.has("mask_image") else 2)


def test_a_control_image_is_asked_for() -> None:
    served = Served(build(CONTROL))
    failed = served.failed(job(), edit())
    assert (failed.code, failed.param) == ("missing_parameter", "control_image")
    served.model.close()


def test_late_results_of_a_control_net_are_a_field() -> None:
    """In a request without the field they come in time."""
    served, given = Served(build(CONTROL)), edit(1, controls=(picture(5),))
    assert "late_control" in served.model.ready().takes
    made = [
        served.made(job(id, late_control=control, **MORE), given).pixels
        for id, control in (("r", None), ("a", None), ("b", "sync"), ("c", "late"), ("d", "late"))
    ]
    assert all(pixels is not None for pixels in made)
    _, first, timely, late, again = made
    assert np.array_equal(first, timely)  # type: ignore[arg-type]
    assert np.array_equal(late, again)  # type: ignore[arg-type]
    assert not np.array_equal(late, timely)  # type: ignore[arg-type]
    served.model.close()


def test_a_model_without_a_network_beside_its_denoiser_refuses_late_results() -> None:
    served = Served(build("FluxInpaintPipeline"))
    assert "late_control" not in served.model.ready().takes
    failed = served.failed(job(late_control="late"), edit())
    assert (failed.code, failed.param) == ("unsupported_parameter", "control")
    served.model.close()


def test_a_server_that_divides_no_steps_refuses_late_rows() -> None:
    served = Served(build("FluxInpaintPipeline"))
    assert "late_parallel" not in served.model.ready().takes
    failed = served.failed(job(late_parallel="late"), edit())
    assert (failed.code, failed.param) == ("unsupported_parameter", "parallel")
    served.model.close()


def test_a_model_that_looks_at_several_pictures_edits_the_first() -> None:
    served = Served(build(KLEIN))
    assert "images" in served.model.ready().takes
    mask = square(64, 64, 16, 40)
    first, second, third = picture(1, 64, 64), picture(2, 64, 64), picture(3, 64, 80)
    made = [
        served.made(job(prompt="a cat"), Pictures(images, mask)).pixels
        for images in ((first,), (first, second), (first, third))
    ]
    for pixels in made:
        assert pixels is not None
        assert np.array_equal(pixels[~mask], first[~mask])
    for one, other in combinations(made, 2):
        assert not np.array_equal(one, other), "all pictures are looked at"  # type: ignore[arg-type]
    served.model.close()


@pytest.mark.parametrize("name", ["StableDiffusionPipeline", "FluxKontextPipeline"])
def test_where_several_pictures_are_a_batch_one_is_taken(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from diffusers.pipelines.flux import pipeline_flux_kontext as kontext

    monkeypatch.setattr(kontext, "PREFERRED_KONTEXT_RESOLUTIONS", [(SIDE, SIDE)])
    served = Served(build(name))
    assert "images" not in served.model.ready().takes
    failed = served.failed(job(), Pictures((picture(1), picture(2)), square()))
    assert (failed.code, failed.param) == ("invalid_value", "image")
    served.model.close()
