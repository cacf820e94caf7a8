"""Results of pipelines in any form: their images are found, and changed in place of the others."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from diffusers.utils.outputs import BaseOutput
from PIL import Image
from torch import Tensor

from maskfx.pipelines.outputs import images_of, set_template, with_images

PIXELS = torch.zeros(1, 3, 4, 4)
SCORES = torch.ones(5)


@dataclass
class Output(BaseOutput):
    images: Any
    scores: Any = None


class Named(NamedTuple):
    found: Tensor
    scores: Tensor


@dataclass(frozen=True)
class Frozen:
    scores: Tensor
    picture: Any


class Held:
    """Holds values that aren't its attributes, as the state of a modular pipeline does."""

    def __init__(self) -> None:
        self.__dict__["values"] = {"images": PIXELS, "scores": SCORES}

    def __getattr__(self, name: str) -> Any:
        try:
            return self.__dict__["values"][name]
        except KeyError:
            raise AttributeError(name) from None

    def __setattr__(self, name: str, value: Any) -> None:
        self.__dict__["values"][name] = value


FORMS = {
    "bare": lambda: PIXELS,
    "one picture": lambda: Image.new("RGB", (4, 4)),
    "pictures": lambda: [Image.new("RGB", (4, 4))],
    "tuple": lambda: (PIXELS, SCORES),
    "named tuple": lambda: Named(PIXELS, SCORES),
    "dictionary": lambda: {"scores": SCORES, "images": PIXELS},
    "another key": lambda: {"scores": SCORES, "seed": 3, "pictures": [PIXELS[0]]},
    "output": lambda: Output(images=PIXELS, scores=SCORES),
    "object": lambda: SimpleNamespace(seed=3, scores=SCORES, picture=PIXELS),
    "frozen": lambda: Frozen(SCORES, PIXELS),
    "held": Held,
}


@pytest.mark.parametrize("form", FORMS)
def test_images_are_found_and_changed(form: str) -> None:
    result = FORMS[form]()
    assert images_of(result) is not None
    set_template(result, "a template")
    changed = with_images(result, lambda images: ["changed"])
    assert type(changed) is (list if form in ("bare", "one picture", "pictures") else type(result))
    if isinstance(changed, list):
        assert changed == ["changed"]
        return
    parts = changed if isinstance(changed, (tuple, dict)) else getattr(changed, "values", None)
    parts = parts if isinstance(parts, (tuple, dict)) else vars(changed)
    values = list(parts.values() if isinstance(parts, dict) else parts)
    assert ["changed"] in [v for v in values if isinstance(v, list)]
    assert any(v is SCORES for v in values)


@pytest.mark.parametrize("result", [None, (), {}, {"scores": SCORES}, SimpleNamespace(seed=3)])
def test_results_without_images_stay(result: object) -> None:
    assert images_of(result) is None
    assert with_images(result, lambda images: ["changed"]) is result
