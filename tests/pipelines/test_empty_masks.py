"""A mask that masks nothing: a pipeline that accepts masks runs as it is."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import maskfx
from tests.factories.pipelines import (
    PIPES,
    SIDE,
    Steps,
    anew,
    call_of,
    compiled,
    latents,
    picture,
    plain,
    square,
)

FLUX, TEXT = "FluxInpaintPipeline", "FluxPipeline"


def edit(name: str, **more: Any) -> Any:
    return call_of(PIPES[name], 0, square(0, 0), **more)


def test_a_pipeline_that_accepts_the_mask_has_its_own_bits(monkeypatch: pytest.MonkeyPatch):
    pipe, steps = anew(FLUX), Steps(monkeypatch)
    for kind in ("pil", "latent"):
        found = pipe(**edit(FLUX), output_type=kind).images[0]
        wanted = plain(FLUX)(**edit(FLUX), output_type=kind).images[0]
        assert np.array_equal(np.asarray(found), np.asarray(wanted))
    assert steps.kinds() == {"itself"}
    assert "its mask masks nothing: the pipeline runs as it is" in maskfx.explain(pipe)


def test_a_mask_beside_one_that_masks_nothing_is_an_edit():
    pipe, masks = anew(FLUX), [square(0, 0), square()]
    texts = {n: torch.cat([v, v]) for n, v in edit(FLUX).items() if "embeds" in n}
    given = edit(FLUX, **texts, image=[picture()] * 2)
    done = pipe(**{**given, "mask_image": masks}).images
    outside = np.asarray(square()) < 128
    assert np.array_equal(np.asarray(done[1])[outside], np.asarray(picture())[outside])
    assert hasattr(pipe(**{**given, "mask_image": masks}), "template")


def test_a_template_is_edited_even_so():
    pipe = anew(FLUX)
    made = maskfx.template(pipe, **{n: v for n, v in edit(FLUX).items() if n != "generator"})
    done = pipe(**edit(FLUX), template=made).images[0]
    assert np.array_equal(np.asarray(done), np.asarray(picture()))


def test_where_maskfx_adds_the_mask_the_result_is_the_picture():
    given = {**call_of(PIPES[TEXT]), "image": picture(size=SIDE), "mask_image": square(0, 0)}
    done = compiled(TEXT)(**given).images[0]
    assert np.array_equal(np.asarray(done), np.asarray(picture(size=SIDE)))
    assert latents(compiled(TEXT), **given).isfinite().all()
