"""Numbers of a module's settings that change: graphs read them from tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import maskfx
from maskfx.compiler.capture.capture import capture
from maskfx.compiler.capture.number_inputs import as_inputs
from maskfx.ir.modules.number_settings import numbers_of, spelled
from maskfx.runtime.programs import program_cache
from maskfx.runtime.programs.shared_programs import shared_programs


class Adding:
    """Adds a share of what a layer makes, as attention processors do."""

    def __init__(self) -> None:
        self.scale = 0.5

    def __call__(self, layer: nn.Module, x: Tensor) -> Tensor:
        return x + self.scale * layer(x)


class Scaled(nn.Module):
    """Numbers in an attribute, a list, a dictionary and an object; one is compared, one squared."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 3, 3, padding=1)
        self.third = nn.Conv2d(4, 4, 3, padding=1)
        self.gain, self.power, self.switch = 1.5, 2.5, False
        self.weights, self.scaling = [0.75, 1.25], {"style": 0.25}
        self.processor = Adding()

    def forward(self, sample: Tensor, timestep: Tensor) -> Tensor:
        x = self.first(sample) * self.gain
        assert isinstance(self.gain, (int, float))
        if self.scaling["style"] != 0:
            x = x + self.third(x) * self.scaling["style"]
        x = self.processor(self.third, x) if not self.switch else x
        x = x.div(self.weights[1]) - self.weights[0] * x.sin()
        return self.second(x * self.power**2) + timestep[:, None, None, None]


INPUTS = {"sample": torch.randn(1, 3, 8, 8), "timestep": torch.tensor([0.5])}
SITES = torch.zeros(8, 8, dtype=torch.bool)
SITES[2:5, 3:6] = True


class Watched:
    """A compiled module, and the number of its captures."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count = 0
        shared_programs().clear()

        def counted(*given: Any, **named: Any) -> Any:
            self.count += 1
            return capture(*given, **named)

        monkeypatch.setattr(program_cache, "capture", counted)
        self.module = Scaled().eval()
        self.denoiser = maskfx.compile(self.module)

    def captures(self) -> int:
        """Record and edit, compare with the module, and return how often that captured it."""
        self.count = 0
        output, cache = self.denoiser.record(**INPUTS)
        other = {**INPUTS, "sample": torch.where(SITES, 2.0, INPUTS["sample"])}
        [same] = self.denoiser.edit([maskfx.EditStep(INPUTS, SITES, cache)])
        [edited] = self.denoiser.edit([maskfx.EditStep(other, torch.ones_like(SITES), cache)])
        assert self.denoiser.programs
        with torch.no_grad():
            wanted, changed = self.module(**INPUTS), self.module(**other)
        for found, dense in ((output, wanted), (same, wanted), (edited, changed)):
            assert (found - dense).norm() < 1e-5 * dense.norm()
        return self.count


def put(module: Scaled, name: str, value: float) -> None:
    places: dict[str, Callable[[], None]] = {
        "gain": lambda: setattr(module, "gain", value),
        "list": lambda: module.weights.__setitem__(0, value),
        "divisor": lambda: module.weights.__setitem__(1, value),
        "dict": lambda: module.scaling.__setitem__("style", value),
        "object": lambda: setattr(module.processor, "scale", value),
    }
    places[name]()


@pytest.mark.parametrize("name", ["gain", "list", "divisor", "dict", "object"])
def test_a_number_that_changed_needs_no_further_capture(name: str, monkeypatch: pytest.MonkeyPatch):
    watched, counts = Watched(monkeypatch), []
    for value in (0.5, 0.8, 1.25, -0.125, 2):
        put(watched.module, name, value)
        counts.append(watched.captures() > 0)
    assert counts == [True, True, False, False, False]
    assert "for any numbers in " in watched.denoiser.explain()


def test_what_python_reads_of_a_number_has_a_capture_of_its_own(monkeypatch: pytest.MonkeyPatch):
    watched, counts = Watched(monkeypatch), []
    for value in (0.5, 0.8, 0.0, 0.8, 0.0, 0.25):
        put(watched.module, "dict", value)
        counts.append(watched.captures() > 0)
    assert counts == [True, True, True, False, False, False]
    for value, captured in ((1.5, True), (2.0, True), (2.5, True), (2.0, False), (1.75, True)):
        watched.module.power = value
        assert (watched.captures() > 0) == captured, value


def test_recordings_with_another_number_are_refused(monkeypatch: pytest.MonkeyPatch):
    watched = Watched(monkeypatch)
    for value in (0.5, 0.8, 1.25):
        watched.module.gain = value
        watched.captures()
    _, cache = watched.denoiser.record(**INPUTS)
    watched.module.gain = 0.3
    with pytest.raises(maskfx.CacheError):
        watched.denoiser.edit([maskfx.EditStep(INPUTS, SITES, cache)])
    watched.module.gain = 1.25
    assert watched.denoiser.edit([maskfx.EditStep(INPUTS, SITES, cache)])


def test_other_settings_that_change_too_are_captured(monkeypatch: pytest.MonkeyPatch):
    watched = Watched(monkeypatch)
    for value in (0.5, 0.8, 1.25):
        watched.module.gain = value
        watched.captures()
    watched.module.gain, watched.module.switch = 0.3, True
    assert watched.captures()
    watched.module.gain = 0.7
    assert not watched.captures()


def test_a_module_has_its_numbers_again_after_an_export() -> None:
    module = Scaled()
    before = numbers_of(module)
    tensors = {place: torch.tensor(value) for place, value in before.items()}
    with as_inputs(module, nn.Module(), tensors) as facts:
        assert type(module.gain) is not float
        module(**INPUTS)
    assert numbers_of(module) == before
    assert not dict(module.named_buffers())
    read = {spelled(fact.place): fact.compares for fact in facts}
    assert read == {"scaling.style": "__ne__", "power": "__eq__"}
