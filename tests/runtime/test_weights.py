"""Weights that change after compiling: every edit uses those that the module has now.

Compiled graphs hold weights in other layouts, and results that depend on weights and the text
alone are kept from step to step; both have to follow. The same input tensors come again each
time, as they do in a pipeline's loop.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import pytest
import torch
from torch import Tensor, nn

import maskfx
from tests.factories import masks
from tests.factories.zoo import ZOO
from tests.runtime.test_oracle import assert_kept_outside, assert_near, relative_error, tensors

pytestmark = pytest.mark.slow

NAMES = ["UNet2DConditionModel-sd15", "FluxTransformer2DModel", "SD3Transformer2DModel"]


def scale_convolutions(module: nn.Module) -> None:
    """In place, as a patched LoRA does it."""
    for part in module.modules():
        if isinstance(part, nn.Conv2d | nn.Conv1d):
            part.weight.mul_(1.5)


def scale_text(module: nn.Module) -> None:
    """What only the text goes through."""
    for key, parameter in module.named_parameters():
        if any(part in key for part in ("attn2.to_k", "attn2.to_v", "context_embedder", "add_k")):
            parameter.mul_(-2.0)


def scale_all(module: nn.Module) -> None:
    """Linear layers too, which keep their layout."""
    for parameter in module.parameters():
        parameter.mul_(1.2)


def load(module: nn.Module) -> None:
    """Copies into the same parameters."""
    state = {key: value * 1.2 for key, value in module.state_dict().items()}
    module.load_state_dict(state)


def through_data(module: nn.Module) -> None:
    """`.data` hides the change from autograd's version counter: refresh() reports it."""
    for parameter in module.parameters():
        parameter.data.mul_(1.2)


def assign(module: nn.Module) -> None:
    """Other parameters in the place of the old ones."""
    state = {key: value * 1.2 for key, value in module.state_dict().items()}
    module.load_state_dict(state, assign=True)


def replace(module: nn.Module) -> None:
    """The same by hand, in a few layers."""
    for part in list(module.modules())[::2]:
        if isinstance(part, nn.Linear | nn.Conv2d):
            part.weight = nn.Parameter(part.weight * 1.3, requires_grad=False)


@cache
def own(name: str) -> tuple[nn.Module, maskfx.CompiledDenoiser, dict[str, Tensor]]:
    """A module and its denoiser for these tests alone, and the weights to begin with."""
    module = ZOO[name].build()
    original = {key: value.clone() for key, value in module.state_dict().items()}
    return module, maskfx.compile(module), original


def check(
    name: str,
    module: nn.Module,
    denoiser: maskfx.CompiledDenoiser,
    change: Callable[[nn.Module], None],
    same_tensors: bool,
) -> None:
    """Record before a change; record, edit and batch after it."""
    case, size = ZOO[name], ZOO[name].sizes[0]
    inputs = case.inputs(size, 0)
    assert_near(denoiser.record(**inputs)[0], module(**inputs), "before")
    before = tensors(module(**inputs))[0]
    change(module)
    if change is through_data:
        denoiser.refresh()
    inputs = inputs if same_tensors else case.inputs(size, 0)
    expected = module(**inputs)
    assert relative_error(tensors(expected)[0], before) > 1e-3
    output, kept = denoiser.record(**inputs)
    assert_near(output, expected, "recording")
    mask = masks.stroke(case.mask_shape(size), 0)
    got = denoiser.edit([maskfx.EditStep(inputs, mask, kept)])[0]
    assert_near(got, expected, "edit")
    assert_kept_outside(mask, got, output)
    assert_near(denoiser.batch([inputs, inputs])[1], expected, "batch")


@pytest.mark.parametrize("same_tensors", [False, True])
@pytest.mark.parametrize("change", [scale_text, scale_all, load, through_data])
@pytest.mark.parametrize("name", NAMES)
def test_weights_changed_in_place_are_used(
    name: str, change: Callable[[nn.Module], None], same_tensors: bool
) -> None:
    module, denoiser, original = own(name)
    module.load_state_dict(original)
    check(name, module, denoiser, change, same_tensors)


@pytest.mark.parametrize("same_tensors", [False, True])
@pytest.mark.parametrize("name", [name for name in NAMES if "Flux" not in name])
def test_convolutions_changed_in_place_are_used(name: str, same_tensors: bool) -> None:
    module, denoiser, original = own(name)
    module.load_state_dict(original)
    check(name, module, denoiser, scale_convolutions, same_tensors)


@pytest.mark.parametrize("change", [assign, replace])
@pytest.mark.parametrize("name", ["UNet2DModel-noattn", "FluxTransformer2DModel"])
def test_weights_that_were_replaced_are_used(
    name: str, change: Callable[[nn.Module], None]
) -> None:
    module = ZOO[name].build()
    check(name, module, maskfx.compile(module), change, same_tensors=False)


def test_a_cast_module_is_compiled_anew() -> None:
    """`module.double()` after compiling: another dtype, not an error about dtypes."""
    case, size = ZOO["UNet2DModel-noattn"], ZOO["UNet2DModel-noattn"].sizes[0]
    module = case.build()
    denoiser = maskfx.compile(module)
    inputs = case.inputs(size, 0)
    denoiser.record(**inputs)
    module.double()
    inputs["sample"] = inputs["sample"].double()
    got = denoiser.record(**inputs)[0]
    assert tensors(got)[0].dtype == torch.float64
    assert_near(got, module(**inputs))


class Replaces(nn.Module):
    """Its forward puts a new buffer in the place of the old one, as some rotary tables do."""

    def __init__(self, ask: bool) -> None:
        super().__init__()
        self.mix, self.ask = nn.Linear(8, 8), ask
        self.register_buffer("table", torch.ones(8), persistent=False)

    def forward(self, hidden_states: Tensor) -> Tensor:
        self.table = torch.arange(8.0).cos()
        if self.ask and hidden_states.max() > 100:  # can't be captured
            return hidden_states
        return self.mix(hidden_states * self.table).tanh()


@pytest.mark.parametrize("ask", [False, True], ids=["rows", "dense"])
def test_a_buffer_that_forward_replaces_is_no_change(ask: bool) -> None:
    denoiser = maskfx.compile(Replaces(ask).eval())
    inputs = {"hidden_states": torch.randn(2, 12, 8)}
    output, kept = denoiser.record(**inputs)
    (first,) = denoiser.compilations
    assert (first.program is None) == ask
    for _ in range(2):
        again = denoiser.edit([maskfx.EditStep(inputs, torch.arange(12) < 5, kept)])[0]
        assert_near(again, output)
        assert denoiser.compilations == [first]
