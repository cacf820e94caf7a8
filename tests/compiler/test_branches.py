"""Decisions: Python asks a tensor yes or no, and the capture is for those answers only."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import maskfx
from maskfx.compiler.capture.arguments.infer_roles import infer
from maskfx.compiler.capture.arguments.roles import flatten, observed_sizes
from maskfx.compiler.capture.capture import capture
from maskfx.compiler.capture.tracing import branches
from maskfx.compiler.capture.tracing.branches import PlainRun, full_run, plain_run
from tests.passes.tools import TOLERANCE, error, numbers


class Scales(nn.Module):
    """Tokens scaled by one table or another, as the positions say."""

    def __init__(self, ask: str = "positions") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.ask, self.mix = ask, nn.Linear(8, 8)

    def forward(self, hidden_states: Tensor, img_ids: Tensor) -> Tensor:
        asked = img_ids if self.ask == "positions" else hidden_states
        scale = 0.5 if asked.max() + 1 > 40 else 2.0
        table = torch.cos(img_ids[:, :1] * torch.arange(8) * scale)
        return torch.tanh(self.mix(hidden_states * table))


def make(tokens: int = 20, seed: int = 0, first: int = 0) -> dict[str, Any]:
    ids = torch.stack([torch.arange(tokens) + first, torch.zeros(tokens).long()], 1)
    return {"hidden_states": numbers(2, tokens, 8, seed=seed), "img_ids": ids}


def test_a_capture_goes_by_its_answers() -> None:
    module = Scales().eval()
    found = capture(module, make())
    assert found.module is not None, found.notes
    assert found.decisions is not None
    assert found.decisions.answers == [False]
    assert [found.leaves[i].path for i in found.decisions.used] == ["img_ids"]
    assert "forward" not in vars(module)
    assert bool(torch.tensor(True))
    assert not bool(torch.tensor(0))

    def serves(inputs: dict[str, Any]) -> bool:
        _, values, spec = flatten(inputs)
        return found.serves(module, spec, values, observed_sizes(found.leaves, values))

    assert serves(make(seed=3))
    assert serves(make(26))
    assert not serves(make(first=30))
    assert not serves(make(44))


def test_an_argument_changed_in_place_is_asked_again() -> None:
    found = capture(Scales().eval(), make())
    assert found.decisions is not None
    values = list(make().values())
    assert found.decisions.hold(values)
    values[1] += 30
    assert not found.decisions.hold(values)
    values[1] -= 30
    assert found.decisions.hold(values)


def test_other_answers_get_a_capture_of_their_own() -> None:
    denoiser = maskfx.compile(Scales().eval())
    mask = torch.arange(20) % 3 == 0
    for first in (0, 30, 0):
        inputs = make(first=first)
        wanted = denoiser.module(**inputs)
        output, kept = denoiser.record(**inputs)
        again = denoiser.edit([maskfx.EditStep(inputs, mask, kept)])[0]
        assert error(output, wanted) < TOLERANCE
        assert error(again, wanted) < TOLERANCE
    assert len(denoiser.compilations) == 2
    assert all(c.program is not None for c in denoiser.compilations)


def test_a_question_to_the_picture_runs_dense() -> None:
    module = Scales("picture").eval()
    found = capture(module, make())
    assert found.module is None
    assert "Python branches on the values of inputs that change from step to step" in " ".join(
        found.notes
    )
    denoiser = maskfx.compile(module)
    output, kept = denoiser.record(**make())
    assert error(output, module(**make())) < TOLERANCE
    again = denoiser.edit([maskfx.EditStep(make(), torch.arange(20) < 5, kept)])[0]
    assert error(again, output) < TOLERANCE


def test_what_only_a_plain_run_asks_does_not_count() -> None:
    class Checks(Scales):
        def forward(self, hidden_states: Tensor, img_ids: Tensor) -> Tensor:
            if not torch.compiler.is_compiling() and hidden_states.isnan().any():
                raise ValueError("nan")
            return torch.tanh(self.mix(hidden_states))

    found = capture(Checks().eval(), make())
    assert found.module is not None, found.notes
    assert found.decisions is None


def test_a_plain_run_answers() -> None:
    for inputs, wanted in ((make(), False), (make(44), True)):
        leaves = infer(Scales(), inputs, None)
        assert plain_run(Scales(), inputs, leaves).answers == [wanted]


def test_an_export_that_asks_more_than_a_light_run_follows_a_full_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def misled(module: nn.Module, inputs: Any, leaves: Any) -> PlainRun:
        found = full_run(module, inputs, leaves)
        return replace(found, answers=[], counts=[], light=True)

    monkeypatch.setattr(branches, "light_run", misled)
    found = capture(Scales().eval(), make())
    assert found.module is not None, found.notes
    assert found.decisions is not None


def test_another_number_of_channels_is_another_capture() -> None:
    module = nn.Sequential(nn.Tanh())
    found = capture(module, {"input": numbers(2, 4, 8, 12, seed=0)})

    def serves(channels: int) -> bool:
        _, values, spec = flatten({"input": numbers(2, channels, 8, 12, seed=0)})
        return found.serves(module, spec, values, observed_sizes(found.leaves, values))

    assert serves(4)
    assert not serves(5)
