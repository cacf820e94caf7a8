"""Which pipelines change their modules' settings in a call is read from their code."""

from __future__ import annotations

import inspect
from types import ModuleType
from typing import Any

import diffusers
import pytest
import torch

from maskfx.pipelines.parts.alterations import call_alters


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
        ("Flux2KleinKVPipeline", False),  # when it is constructed
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


class BySuper(ByFunction):
    def __call__(self) -> None:
        super().__call__()


class ByMethodOfSuper(BySuper):
    def __call__(self) -> None:
        self.change()

    def change(self) -> None:
        super().__call__()


class ByClassMethod:
    def __call__(self) -> None:
        self.change(self)

    @classmethod
    def change(cls, module: Any) -> None:
        helper(module)


helpers: Any = ModuleType("helpers")
helpers.register = helper


class ByModule:
    def __call__(self) -> None:
        helpers.register(self)


class Control:
    def __init__(self, module: Any) -> None:
        self.change(module)

    def change(self, module: Any) -> None:
        helper(module)


class Controls(Control):
    """Inherits its constructor."""


class Caller:
    def __call__(self, module: Any) -> None:
        helper(module)


class ByConstructor:
    def __call__(self) -> None:
        Controls(self)


class ByCall:
    def __call__(self) -> None:
        Caller()(self)


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        helper(self)


class Constructs:
    def __call__(self) -> Any:
        return Net()


class Constructed:
    """Its call only mentions its constructor and its class."""

    def __init__(self) -> None:
        helper(self)

    def __call__(self) -> Any:
        return inspect.signature(self.__init__), Constructed.__name__  # type: ignore[misc]


ALTERING = [ByFunction, ByInnerFunction, BySuper, ByMethodOfSuper, ByClassMethod]
ALTERING += [ByModule, ByConstructor, ByCall]


@pytest.mark.parametrize("kind", ALTERING)
def test_what_a_call_calls_is_followed(kind: type) -> None:
    assert call_alters(kind)


@pytest.mark.parametrize("kind", [Reads, Constructs, Constructed])
def test_what_sets_no_processors_in_a_call_is_no_alteration(kind: type) -> None:
    assert not call_alters(kind)
