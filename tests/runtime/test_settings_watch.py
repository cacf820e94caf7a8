"""Denoisers without a pipeline: changed attributes and hooks, deep copies and pickles."""

import copy
import logging
import pickle
from typing import Any

import pytest
import torch
from torch import nn

import maskfx
from maskfx.runtime.programs.buffer_states import LARGEST, BufferStates
from maskfx.runtime.settings_watch import OWN_CHANGES


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 3, 3, padding=1)
        self.scale, self.calls = 1.0, 0

    def forward(self, sample: torch.Tensor, timestep: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(sample) * self.scale) + timestep[:, None, None, None]


class Counting(Scaled):
    def forward(self, sample: torch.Tensor, timestep: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return super().forward(sample, timestep)


class Averaging(Scaled):
    """Each run writes into its buffers, except for the table, which the first run fills."""

    mean: torch.Tensor
    runs: torch.Tensor
    table: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(()))
        self.register_buffer("runs", torch.zeros((), dtype=torch.long))
        self.register_buffer("table", torch.zeros(3))
        self.filled = False

    def forward(self, sample: torch.Tensor, timestep: torch.Tensor) -> torch.Tensor:
        if not self.filled:
            self.table.fill_(2.0)
            self.filled = True
        self.mean.mul_(0.5).add_(timestep.mean())
        self.runs += 1
        return super().forward(sample, timestep) * self.mean + self.table[0]


INPUTS = {"sample": torch.randn(1, 3, 8, 8), "timestep": torch.tensor([0.5])}
SITES = torch.zeros(8, 8, dtype=torch.bool)
SITES[2:5, 3:6] = True


def error(denoiser: Any) -> float:
    """Of a recording and its edit, to the module."""
    output, cache = denoiser.record(**INPUTS)
    [edited] = denoiser.edit([maskfx.EditStep(INPUTS, SITES, cache)])
    assert denoiser.programs
    with torch.no_grad():
        dense = denoiser.module(**INPUTS)
    return float(max((output - dense).abs().max(), (edited - dense).abs().max()))


def test_changed_attributes_and_hooks_are_captured_again():
    module = Scaled().eval()
    denoiser = maskfx.compile(module)
    _, old = denoiser.record(**INPUTS)
    module.scale = 0.3
    with pytest.raises(maskfx.CacheError):
        denoiser.edit([maskfx.EditStep(INPUTS, SITES, old)])
    module.first.register_forward_pre_hook(lambda _, given: (given[0] * 2,))
    assert error(denoiser) < 1e-5


def test_what_the_module_changes_itself_is_no_change(caplog: pytest.LogCaptureFixture):
    module = Counting().eval()
    denoiser = maskfx.compile(module, example_inputs=INPUTS)
    program = dict(denoiser.programs)
    with caplog.at_level(logging.WARNING):
        for _ in range(OWN_CHANGES + 1):
            denoiser.plain(**INPUTS)
    assert denoiser.record(**INPUTS) is not None
    assert denoiser.programs == program
    [line] = [r.getMessage() for r in caplog.records if "own attributes" in r.getMessage()]
    assert line.startswith("Counting changes its own attributes in each step")


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda one: pickle.loads(pickle.dumps(one))])
def test_a_copy_has_its_own_module_and_the_same_settings(copied: Any):
    denoiser = maskfx.compile(Scaled().eval(), plans=True, loader=maskfx.Loader(staging_bytes=99))
    other = copied(denoiser)
    assert other.module is not denoiser.module
    assert other.settings == denoiser.settings
    assert other.loader.staging_bytes == 99
    other.module.scale = 2.0
    assert error(other) < 1e-5


def test_a_capture_leaves_buffers_that_each_run_changes_as_they_were():
    module = Averaging().eval()
    denoiser = maskfx.compile(module, example_inputs=INPUTS)
    assert int(module.runs) == 0
    assert float(module.mean) == 0
    assert module.table.tolist() == [2.0] * 3
    assert "each run writes into mean, runs" in denoiser.explain()
    output, cache = denoiser.record(**INPUTS)
    assert int(module.runs) == 1
    [edited] = denoiser.edit([maskfx.EditStep(INPUTS, SITES, cache)])
    assert torch.isfinite(edited).all()


def test_large_buffers_are_not_copied_for_a_capture() -> None:
    module = nn.BatchNorm2d(4)
    module.register_buffer("weights", torch.zeros(LARGEST + 1, dtype=torch.uint8))
    kept = [buffer for buffer, *_ in BufferStates(module)._kept]
    assert len(kept) == 3
    assert all(buffer is not module.weights for buffer in kept)
