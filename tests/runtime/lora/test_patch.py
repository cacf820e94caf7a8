"""WeightPatch: weights with updates, and afterwards the same bits as before."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import maskfx
from maskfx import EditStep
from maskfx.errors import InputError
from maskfx.runtime.lora.patch import WeightPatch, patched
from tests.factories.lora import KINDS, merged, update_of
from tests.factories.zoo import ZOO
from tests.passes.tools import error
from tests.runtime.backends.test_inductor import MASKS, SIZES, Stack, inputs


def weights_of(module: nn.Module) -> list[Tensor]:
    return [value.detach().clone() for value in module.state_dict().values()]


def layers(dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(4, 8, 3), nn.Flatten(), nn.Linear(8, 6)).to(dtype).eval()


def cycles(module: nn.Module, count: int) -> None:
    before = weights_of(module)
    for seed in range(count):
        with patched(module, [update_of(module, 1 + seed % 4, seed, weight=0.5 + seed)]):
            assert not all(map(torch.equal, before, weights_of(module)))
    assert all(map(torch.equal, before, weights_of(module)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_thousand_patches_leave_no_trace(dtype: torch.dtype) -> None:
    cycles(layers(dtype), 1000)


def test_a_patch_that_fails_or_comes_twice_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    module = layers(torch.float32)
    before = weights_of(module)
    patch, update = WeightPatch(module), update_of(module, 2, 1)
    patch.apply([update])
    once = weights_of(module)
    with pytest.raises(InputError, match="patched already"):
        patch.apply([update])
    assert all(map(torch.equal, once, weights_of(module)))
    assert (patch.patched, patch.nbytes > 0) == (True, True)
    patch.remove()
    patch.remove()
    assert all(map(torch.equal, before, weights_of(module)))
    written = WeightPatch._write

    def failing(self: WeightPatch, weight: Tensor, value: Tensor, private: bool) -> None:
        written(self, weight, value, private)
        if weight.dim() == 2:
            raise MemoryError

    monkeypatch.setattr(WeightPatch, "_write", failing)
    with pytest.raises(MemoryError):
        patch.apply([update])
    assert all(map(torch.equal, before, weights_of(module)))


def test_a_compiled_denoiser_follows_its_weights() -> None:
    module = Stack(2)
    denoiser = maskfx.compile(module)
    size, mask = SIZES[0], MASKS["some"](SIZES[0])
    call = inputs(1, *size)
    (plain, _) = denoiser.record(**call)
    updates = [update_of(module, 2, 1), update_of(module, 3, 2, weight=-0.5)]
    wanted = merged(module, updates)(**call)
    with patched(module, updates):
        found, cache = denoiser.record(**call)
        assert error(found, wanted) < 1e-5
        assert error(found, plain) > 1e-3
        assert error(denoiser.edit([EditStep(call, mask, cache)])[0], wanted) < 1e-5
    assert torch.equal(denoiser.record(**call)[0], plain)


@pytest.mark.parametrize("name", ["UNet2DConditionModel-nomid", "FluxTransformer2DModel"])
def test_a_thousand_patches_of_all_layers_leave_no_trace(name: str) -> None:
    """Of a real denoiser: every weight of a linear layer or a convolution changes in each cycle."""
    module = ZOO[name].build()
    before, weights = weights_of(module), list(module.state_dict().values())
    layers = [one for one in module.modules() if isinstance(one, KINDS)]
    updates = [update_of(module, 1 + seed % 4, seed, weight=0.5 + seed) for seed in range(8)]
    originals = [layer.weight.detach().clone() for layer in layers]
    for number in range(1000):
        with patched(module, [updates[number % 8]]):
            if number < len(updates):
                pairs = zip(layers, originals, strict=True)
                assert not any(torch.equal(layer.weight, value) for layer, value in pairs)
        assert all(map(torch.equal, before, weights)), number
