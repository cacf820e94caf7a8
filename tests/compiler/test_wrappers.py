"""A wrapper whose forward takes any arguments is captured as the module in it."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

import maskfx
from maskfx.compiler.capture.export import named_parameters
from tests.export.tiny import arguments, tiny
from tests.passes.tools import error


class Wrapper(nn.Module):
    """Passes on what it is called with."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, *args: object, **named: object) -> object:
        return self.inner(*args, **named)


def with_adapter(module: nn.Module) -> nn.Module:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=2, target_modules=["query", "key"], init_lora_weights=False)
    found: nn.Module = peft.get_peft_model(module, config).eval()
    return found


def compiled_by_torch(module: nn.Module) -> nn.Module:
    found: Any = torch.compile(module, backend="eager")
    return found


def replicas(module: nn.Module) -> nn.Module:
    """Return replicas without devices, whichever other tests have registered."""
    place = "torch.nn.parallel.data_parallel._get_available_device_type"
    with mock.patch(place, return_value=None):
        return nn.DataParallel(module)


WRAPPERS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "own": Wrapper,
    "torch.compile": compiled_by_torch,
    "adapter": with_adapter,
    "compiled adapter": lambda module: compiled_by_torch(with_adapter(module)),
    "replicas": replicas,
    "averaged": AveragedModel,
}


@torch.no_grad()
def check(module: nn.Module, denoiser: maskfx.CompiledDenoiser, batch: int = 1) -> torch.Tensor:
    given = arguments(batch, 6, 10)
    wanted = module(**given)
    output, cache = denoiser.record(**given)
    mask = torch.arange(60).view(6, 10) % 7 == 0
    [edited] = denoiser.edit([maskfx.EditStep(given, mask, cache)])
    assert error(output, wanted) < 1e-4
    assert error(edited, wanted) < 1e-4
    assert [bool(one.program) for one in denoiser.compilations] == [True]
    found: torch.Tensor = wanted
    return found


@pytest.mark.parametrize("name", WRAPPERS)
def test_the_module_in_a_wrapper_is_narrowed(name: str) -> None:
    module = WRAPPERS[name](tiny())
    denoiser = maskfx.compile(module)
    for batch in (1, 2):
        check(module, denoiser, batch)


def test_adapters_of_a_wrapper_are_followed() -> None:
    module = with_adapter(tiny())
    denoiser = maskfx.compile(module)
    on = check(module, denoiser)
    with module.disable_adapter():  # type: ignore[operator]
        off = check(module, denoiser)
    assert error(off, on) > 1e-3
    assert torch.equal(check(module, denoiser), on)


def test_a_forward_is_itself_again() -> None:
    module, own = Wrapper(tiny()), tiny()
    with named_parameters(module, ["sample", "timestep"]):
        assert list(inspect.signature(module.forward).parameters) == ["sample", "timestep"]
        assert torch.equal(module(**arguments()), own(**arguments()))
    assert "forward" not in vars(module)
    with named_parameters(own, ["other"]):
        assert "forward" not in vars(own)
