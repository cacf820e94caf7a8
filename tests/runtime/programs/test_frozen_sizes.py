"""Modules that are captured at one size: the next size isn't tried with symbolic sizes again."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils import _pytree as pytree

import maskfx
from maskfx.runtime.programs import program_cache
from maskfx.runtime.programs.attempts import is_frozen_program
from maskfx.runtime.programs.shared_programs import shared_programs
from tests.export.tiny import arguments, tiny


@pytest.mark.parametrize(
    ("change", "alike"),
    [
        ({}, True),
        ({"program": None}, False),
        ({"frozen": None}, False),
        ({"single": True}, False),
        ({"names": "xy"}, False),
    ],
    ids=["alike", "dense", "symbolic", "of one sample", "other arguments"],
)
def test_programs_of_one_size_stand_for_calls_with_arguments_alike(
    change: dict[str, Any], alike: bool
) -> None:
    form = {"program": object(), "frozen": {"y": 8}, "single": False, "names": "x", **change}
    spec = pytree.tree_structure({name: 0 for name in form["names"]})
    capture = SimpleNamespace(frozen=form["frozen"], single=form["single"], in_spec=spec)
    found: Any = SimpleNamespace(program=form["program"], capture=capture)
    assert is_frozen_program(found, {"x": torch.zeros(1)}, single=False) == alike


@torch.no_grad()
def test_a_second_size_is_captured_at_that_size_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    shared_programs().clear()  # other tests capture the same module
    asked: list[bool] = []
    own = vars(program_cache)["capture"]

    def fixed(module: Any, inputs: Any, roles: Any, **how: Any) -> Any:
        asked.append(how["fixed"])
        return own(module, inputs, roles, **how | {"fixed": True})

    monkeypatch.setattr(program_cache, "capture", fixed)
    denoiser = maskfx.compile(tiny())
    for width in (8, 12):
        denoiser.record(**arguments(width=width))
    assert asked == [False, True]
    assert all(one.program is not None for one in denoiser.compilations)
