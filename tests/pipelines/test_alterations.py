"""Which pipelines change their modules' settings in a call is read from their code."""

from __future__ import annotations

from typing import Any

import diffusers
import pytest

from maskfx.pipelines.alterations import call_alters


@pytest.mark.parametrize(
    ("name", "alters"),
    [
        ("StableDiffusionInpaintPipeline", False),
        ("StableDiffusionPAGInpaintPipeline", True),  # in a method of a base class
        ("StableDiffusionControlNetInpaintPipeline", False),
        ("StableDiffusionXLPAGInpaintPipeline", True),
        ("StableDiffusionAttendAndExcitePipeline", True),  # in a method
        ("StableDiffusionGLIGENPipeline", True),
        ("FluxFillPipeline", False),
        ("QwenImageEditPipeline", False),  # calls its `processor`
    ],
)
def test_pipelines_of_diffusers(name: str, alters: bool) -> None:
    assert call_alters(getattr(diffusers, name)) is alters


def helper(module: Any) -> None:
    module.processor = None


class ByFunction:
    def __call__(self) -> None:
        helper(self)


class ByInnerFunction:
    def __call__(self) -> None:
        def change() -> None:
            self.unet.set_attn_processor({})  # type: ignore[attr-defined]

        change()


class Reads:
    processor = None

    def __call__(self) -> Any:
        return self.again() if self.processor else None

    def again(self) -> Any:
        return self()


@pytest.mark.parametrize(("kind", "alters"), [(ByFunction, 1), (ByInnerFunction, 1), (Reads, 0)])
def test_functions_are_followed(kind: type, alters: int) -> None:
    assert call_alters(kind) == bool(alters)
