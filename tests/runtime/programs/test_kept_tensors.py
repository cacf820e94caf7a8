"""Modules that keep tensors of each call, which the graph of a program would not set."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import maskfx
from maskfx.runtime.programs.kept_tensors import KeptTensors
from tests.factories.masks import MASKS
from tests.runtime.test_oracle import assert_near


class Storing:
    """Attention processors store maps like this."""

    def __init__(self) -> None:
        self.last: Any = None
        self.all: dict[str, list[Tensor]] = {"": []}

    def __call__(self, value: Tensor) -> Tensor:
        self.last = value * 2
        return value


class Listing(Storing):
    def __call__(self, value: Tensor) -> Tensor:
        self.all[""] = [value * 2]
        return value


class Filling(Storing):
    """The first call fills a table, which stays."""

    def __call__(self, value: Tensor) -> Tensor:
        if self.last is None:
            self.last = torch.ones(16)
        return value * self.last


class Denoiser(nn.Module):
    def __init__(self, processor: Any) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 16), nn.Linear(16, 4)
        self.processor = processor

    def forward(self, hidden_states: Tensor, timestep: Tensor) -> Tensor:
        x = self.first(hidden_states) + timestep.float()[:, None, None] / 10
        found: Tensor = self.last(self.processor(x))
        return found


def call(seed: int, tokens: int = 24) -> dict[str, Any]:
    draw = torch.Generator().manual_seed(seed)
    states = torch.randn(1, tokens, 4, generator=draw)
    return {"hidden_states": states, "timestep": torch.tensor([seed])}


def denoiser_with(processor: Any) -> Any:
    torch.manual_seed(0)
    return maskfx.compile(Denoiser(processor).eval().requires_grad_(False))


@pytest.mark.parametrize("kind", [Storing, Listing])
def test_a_module_that_keeps_tensors_of_each_call_runs_itself(kind: Any) -> None:
    denoiser = denoiser_with(kind())
    module, processor = denoiser.module, denoiser.module.processor
    _, kept = denoiser.record(**call(0))
    mask = MASKS["random"]((24,), 1)
    got = denoiser.edit([maskfx.EditStep(call(0), mask, kept)])[0]
    (found,) = denoiser.compilations
    assert found.program is None
    assert "processor keeps tensors of the module's last call" in denoiser.explain()
    assert_near(got, module(**call(0)))
    denoiser.edit([maskfx.EditStep(call(2), mask, kept, any_step=True)])
    stored = processor.last if kind is Storing else processor.all[""][0]
    module(**call(2))
    wanted = processor.last if kind is Storing else processor.all[""][0]
    assert type(stored) is Tensor
    assert torch.equal(stored, wanted)


def test_a_table_that_the_first_call_fills_is_none() -> None:
    denoiser = denoiser_with(Filling())
    denoiser.record(**call(0))
    (found,) = denoiser.compilations
    assert found.program is not None


def test_hooks_that_list_features_are_found() -> None:
    module, features = Denoiser(nn.Identity()), list[Tensor]()
    module.last.register_forward_hook(lambda _, __, result: features.append(result))
    module(**call(0))
    before = KeptTensors(module)
    assert before.changed() == ""
    module(**call(0))
    assert before.changed() == "last._forward_hooks"
