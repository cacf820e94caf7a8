"""Pipeline classes that pass arguments on to the class that they extend."""

from __future__ import annotations

import inspect
from typing import Any

import diffusers

import maskfx
from maskfx.pipelines.call_signatures import call_of_class
from tests.factories.pipelines import (
    PIPES,
    call_of,
    compiled,
    distance,
    latents,
    plain,
    square,
    white,
)

FLUX = "FluxInpaintPipeline"


class Base:
    def __call__(self, prompt: str, image: Any = None, *, steps: int = 4) -> Any:
        return prompt, image, steps


class All(Base):
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return super().__call__(*args, **kwargs)


class Some(Base):
    def __call__(  # type: ignore[override]
        self, image: Any, scale: float = 1.0, **kwargs: Any
    ) -> Any:
        return super().__call__(**kwargs, image=image), scale


class Twice(All):
    def __call__(  # type: ignore[override]
        self, prompt: str, seed: int = 0, **kwargs: Any
    ) -> Any:
        return super().__call__(prompt, **kwargs), seed


class Own(Base):
    def __call__(self, prompt: str) -> Any:  # type: ignore[override]
        return super().__call__(prompt)


def names(pipeline: type) -> list[str]:
    parameters = inspect.signature(call_of_class(pipeline)).parameters.values()
    return [f"{p.name}*" if p.kind is p.KEYWORD_ONLY else p.name for p in parameters]


def test_the_extended_classes_arguments_are_named():
    assert names(Base) == names(All) == ["self", "prompt", "image", "steps*"]
    assert names(Some) == ["self", "image", "scale", "prompt*", "steps*"]
    assert names(Twice) == ["self", "prompt", "seed", "image*", "steps*"]
    assert names(Own) == ["self", "prompt"]
    assert call_of_class(Own) is Own.__call__
    assert call_of_class(Some)(Some(), 7, prompt="a") == (("a", 7, 4), 1.0)


class Derived(diffusers.FluxInpaintPipeline):
    def __call__(pipe, *args: Any, **kwargs: Any) -> Any:  # the object may have any name
        return super().__call__(*args, **kwargs)  # type: ignore[misc]


def test_a_class_that_passes_everything_on_is_edited_like_the_one_that_it_extends():
    parts = plain(FLUX).components
    pipe: Any = Derived(**parts)
    pipe.set_progress_bar_config(disable=True)
    maskfx.compile(pipe, quality="all-steps")
    try:
        for mask in (square(), white()):
            found = latents(pipe, **call_of(PIPES[FLUX], 0, mask))
            wanted = latents(compiled(FLUX), **call_of(PIPES[FLUX], 0, mask))
            assert distance(found, wanted) < 1e-6
    finally:
        maskfx.decompile(pipe)
