"""Parts that are replaced, and weights that are overwritten, between the calls of a pipeline."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import maskfx
from tests.factories.pipelines import PIPES, call_of, distance, latents, square

NAME = "StableDiffusionInpaintPipeline"
KIND = PIPES[NAME]


def edit(pipe: Any) -> Tensor:
    return latents(pipe, **call_of(KIND, 0, square()))


def changed(part: str, factor: float = 1.1) -> Callable[[Any], None]:
    @torch.no_grad()
    def change(pipe: Any) -> None:
        for parameter in getattr(pipe, part).parameters():
            parameter.data.mul_(factor)

    return change


def fresh(change: Callable[[Any], None] | None = None, quality: str = "all-steps") -> Any:
    pipe = KIND.build()
    if change is not None:
        change(pipe)
    return maskfx.compile(pipe, quality=quality)


@pytest.mark.parametrize("quality", [pytest.param("all-steps", marks=pytest.mark.slow), "balanced"])
@pytest.mark.parametrize("part", ["unet", pytest.param("vae", marks=pytest.mark.slow)])
def test_a_part_that_is_replaced_is_compiled_too(part: str, quality: str) -> None:
    pipe, other = fresh(quality=quality), KIND.build()
    first = edit(pipe)
    changed(part)(other)
    setattr(pipe, part, getattr(other, part))
    wanted = edit(fresh(changed(part), quality))
    assert distance(wanted, first) > 1e-3
    assert distance(edit(pipe), wanted) < 1e-5
    state = pipe._maskfx
    modules = [own.module for own in state.denoisers.values()]
    coders = [own.module.autoencoder for own in state.autoencoders.values()]
    assert modules == [pipe.unet]
    assert coders == [pipe.vae] * (2 if quality == "balanced" else 0)
    pipe.unet = pipe.unet  # nothing is replaced
    assert pipe._maskfx is state


def test_weights_overwritten_through_data_are_used() -> None:
    pipe = fresh()
    edit(pipe)
    changed("unet")(pipe)
    assert distance(edit(pipe), edit(fresh(changed("unet")))) < 1e-5


@pytest.mark.slow
@torch.no_grad()
def test_a_template_of_weights_of_which_one_number_differs_does_not_serve() -> None:
    def change(pipe: Any) -> None:
        largest = max(pipe.unet.parameters(), key=Tensor.numel)
        largest.view(-1)[largest.numel() // 3] += 50

    pipe = fresh()
    first = edit(pipe)
    change(pipe)
    wanted = edit(fresh(change))
    assert distance(wanted, first) > 1e-3
    assert distance(edit(pipe), wanted) < 1e-5
