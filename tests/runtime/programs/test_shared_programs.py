"""Equal modules of one process are captured once; each verifies with its own weights."""

from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

import maskfx
from maskfx.compiler.capture.capture import capture
from maskfx.runtime.programs import program_cache
from maskfx.runtime.programs.shared_programs import SharedPrograms, shared_programs


@pytest.fixture(autouse=True)
def kept(monkeypatch: pytest.MonkeyPatch) -> SharedPrograms:
    """Compilations of this test's modules only."""
    own = SharedPrograms()
    monkeypatch.setattr(program_cache, "shared_programs", lambda: own)
    return own


class Mixer(nn.Module):
    """A denoiser of four channels that is captured within a second."""

    def __init__(self, seed: int, order: int = 0, power: float = 1.0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.power = power
        self.enter = nn.Conv2d(4, 8, 3, padding=1)
        self.leave = nn.Conv2d(8, 4, 1)
        self.order = torch.arange(8).roll(order)  # no buffer: a constant of the graph

    def forward(self, sample: Tensor, timestep: Tensor, options: dict[str, Any]) -> Tensor:
        hidden = nn.functional.silu(self.enter(sample))[:, self.order] * self.power
        return self.leave(hidden * torch.cos(timestep)[:, None, None, None])


def inputs(height: int = 8, width: int = 12) -> dict[str, Any]:
    draw = torch.Generator().manual_seed(0)
    sample = torch.randn(1, 4, height, width, generator=draw)
    return {"sample": sample, "timestep": torch.tensor([3.0]), "options": {}}


def edit(denoiser: maskfx.CompiledDenoiser, height: int = 8) -> int:
    """Record and edit, compare with the module, and return the number of captures."""
    given = inputs(height)
    mask = torch.zeros(height, 12, dtype=torch.bool)
    mask[2:5, 3:7] = True
    with mock.patch.object(program_cache, "capture", side_effect=capture) as captured:
        _, cache = denoiser.record(**given)
        got = denoiser.edit([maskfx.EditStep(given, mask, cache)])[0]
    torch.testing.assert_close(got, denoiser.module(**given), rtol=1e-4, atol=1e-5)
    assert denoiser.programs, denoiser.explain()
    return captured.call_count


def test_other_weights_of_an_equal_module_need_no_capture():
    assert edit(maskfx.compile(Mixer(1).eval())) == 1
    second = maskfx.compile(Mixer(2).eval())
    assert edit(second) == 0
    assert edit(second, height=16) == 0
    assert edit(maskfx.compile(Mixer(1).eval())) == 0


@pytest.mark.parametrize("changed", ["power", "settings", "dtype"])
def test_what_changes_the_program_is_captured(changed: str):
    edit(maskfx.compile(Mixer(1).eval()))
    module = Mixer(2, power=2.0 if changed == "power" else 1.0).eval()
    if changed == "dtype":
        module.register_buffer("unused", torch.zeros(3, dtype=torch.float64))
    assert edit(maskfx.compile(module, stretches=changed == "settings")) == 1


def test_a_module_that_computes_something_else_is_captured():
    """Its table isn't among what modules are compared by."""
    edit(maskfx.compile(Mixer(1).eval()))
    assert edit(maskfx.compile(Mixer(2, order=3).eval())) == 1
    assert edit(maskfx.compile(Mixer(3, order=3).eval())) == 0


def test_what_zero_weights_hid_is_compared_again():
    edit(maskfx.compile(Mixer(1).eval()))
    module = Mixer(2, order=3).eval()
    full = {name: value.clone() for name, value in module.state_dict().items()}
    nn.init.zeros_(module.leave.weight)
    denoiser = maskfx.compile(module)
    assert edit(denoiser) == 0, "a module without an output shows no difference"
    module.load_state_dict(full)
    assert edit(denoiser) == 1


def test_no_module_is_kept_and_the_oldest_leave(kept: SharedPrograms):
    edit(maskfx.compile(Mixer(1).eval()))
    (one,) = kept._kept
    assert set(one.packed.constants) == {"0"}, "weights are stored"
    small = SharedPrograms(limit=int(1.5 * one.packed.nbytes))
    small.put("a", one.spec, one.packed)
    small.put("b", one.spec, one.packed)
    assert not small.of("a", one.spec)
    assert len(small.of("b", one.spec)) == 1


def test_all_denoisers_share():
    assert shared_programs() is shared_programs()
