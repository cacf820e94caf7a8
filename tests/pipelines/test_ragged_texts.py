"""Prompts of unequal lengths in one call: each picture of a batch is edited as alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import tests.factories.more_pipelines  # noqa: F401  (they enlist themselves)
from tests.factories.pipelines import (
    PIPES,
    Arguments,
    Steps,
    anew,
    compiled,
    distance,
    latents,
    plain,
    square,
)
from tests.factories.zoo import CROSS, Draw

pytestmark = pytest.mark.slow

NAME = "Lumina2Pipeline"
LENGTHS = (7, 3)


def two(seed: int) -> Arguments:
    """A call of two prompts, with guidance."""
    draw, side = Draw(seed), PIPES[NAME].side // 2
    kept = torch.arange(8) < torch.tensor(LENGTHS)[:, None]
    return {
        "prompt_embeds": draw.normal(2, 8, CROSS),
        "prompt_attention_mask": kept.long(),
        "negative_prompt_embeds": draw.normal(2, 8, CROSS),
        "negative_prompt_attention_mask": kept.flip(0).long(),
        "latents": draw.normal(2, 4, side, side),
        "num_inference_steps": 3,
        "guidance_scale": 3.0,
        "height": PIPES[NAME].side,
        "width": PIPES[NAME].side,
    }


def one_of(given: Arguments, index: int) -> Arguments:
    """The same call of one of its prompts."""
    return {n: v[index : index + 1] if torch.is_tensor(v) else v for n, v in given.items()}


def edited(first: Arguments, then: Arguments) -> torch.Tensor:
    """Record a call and edit it with the arguments of another."""
    pipe = anew(NAME)
    made = pipe(**first, record=True).template
    return latents(pipe, **then, mask_image=square(), template=made)


def test_an_edit_with_the_recorded_prompts_is_the_dense_run(monkeypatch: Any) -> None:
    given = two(7)
    wanted = latents(plain(NAME), **given)
    steps = Steps(monkeypatch)
    assert distance(edited(given, given), wanted) < 1e-4
    assert {"EditStep"} <= steps.kinds() <= {"EditStep", "RecordStep"}
    (denoiser,) = compiled(NAME)._maskfx.denoisers.values()
    assert all(one.program is not None for one in denoiser.compilations), denoiser.explain()


def test_each_picture_is_edited_as_alone() -> None:
    first, then = two(7), two(8)
    together = edited(first, then)
    for index in range(2):
        alone = edited(one_of(first, index), one_of(then, index))
        assert distance(together[index], alone[0]) < 1e-4
    assert distance(together, latents(plain(NAME), **first)) > 1e-3
