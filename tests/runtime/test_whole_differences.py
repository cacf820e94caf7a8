"""Members with full differences: each has the result of the module with changed weights."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

import maskfx
from maskfx import DenseStep, EditStep, InputError, RecordStep
from maskfx.runtime.lora.adapter import Difference, Layers, WeightedLayers
from maskfx.runtime.lora.patch import patched
from tests.factories.lora import (
    difference_of,
    differences_of,
    layers_of,
    low_rank,
    merged,
    update_of,
)
from tests.factories.zoo import ZOO
from tests.passes.tools import error
from tests.runtime.backends.test_inductor import Stack, inputs
from tests.runtime.test_adapters import Odd, check_members, mask_of, odd_inputs

LAYERS = (nn.Linear, nn.Conv2d)
Sets = list[tuple[WeightedLayers, ...]]
Kinds = tuple[type[nn.Module], ...]


def mixed_sets(module: nn.Module, kinds: Kinds = (nn.Module,)) -> Sets:
    """A full difference, none, a LoRA with another difference, a LoRA."""
    low_rank, half = update_of(module, 4, 1), update_of(module, 16, 3, share=0.5, weight=-1.5)
    first = difference_of(module, 5, weight=0.8, kinds=kinds)
    second = difference_of(module, 6, share=0.5, kinds=kinds)
    return [(first,), (), (low_rank, second), (half,)]


def test_layers_have_weights_and_biases_of_their_own() -> None:
    module = Stack(2).eval()
    denoiser = maskfx.compile(module)
    check_members(denoiser, module, mixed_sets(module, kinds=LAYERS))
    [found] = denoiser._executor.twins._twins.values()
    assert any(not twin.whole and twin.own for twin in found.values())  # they share a batch


def test_parameters_of_any_layer() -> None:
    """Of normalisations too, and of layers that a batch has one result of."""
    for module, make in ((Stack(2).eval(), inputs), (Odd().eval(), odd_inputs)):
        check_members(maskfx.compile(module), module, mixed_sets(module), make)


def test_a_low_rank_update_with_a_difference_of_the_bias() -> None:
    module = Stack(1).eval()

    def with_bias(layers: Layers) -> Layers:
        found = {}
        for path, own in layers.items():
            bias = module.get_submodule(path).bias
            change = 0.3 * torch.ones_like(bias) if isinstance(bias, torch.Tensor) else None
            found[path] = replace(low_rank(own), bias=change)
        return found

    own = WeightedLayers(with_bias(layers_of(module, 4, 1)), 0.7, "with bias")
    plain = merged(module, (replace(own, layers=layers_of(module, 4, 1)),))(**inputs(1, 8, 8))
    assert error(merged(module, (own,))(**inputs(1, 8, 8)), plain) > 0.01
    check_members(maskfx.compile(module), module, [(own,), (), (update_of(module, 4, 2),)])


@pytest.mark.parametrize(
    "name",
    [
        "AuraFlowTransformer2DModel",
        pytest.param("UNet2DConditionModel-sdxl", marks=pytest.mark.slow),
        pytest.param("SD3Transformer2DModel-sd35", marks=pytest.mark.slow),
        pytest.param("ControlNetModel", marks=pytest.mark.slow),
        pytest.param("QwenImageTransformer2DModel", marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("kinds", [LAYERS, (nn.Module,)], ids=["layers", "all"])
def test_families(name: str, kinds: Kinds) -> None:
    case = ZOO[name]
    module = case.build()
    denoiser, sets = maskfx.compile(module), mixed_sets(module, kinds=kinds)
    sizes = [case.sizes[i % len(case.sizes)] for i in range(len(sets))]
    with torch.no_grad():
        calls = [case.inputs(size, i) for i, size in enumerate(sizes)]
        wanted = [merged(module, own)(**c) for own, c in zip(sets, calls, strict=True)]
    recorded = denoiser.step([RecordStep(c, own) for c, own in zip(calls, sets, strict=True)])
    masks = [mask_of(case.mask_shape(size), i) for i, size in enumerate(sizes)]
    edits = [
        EditStep(c, m, r[1], adapters=own)
        for c, m, r, own in zip(calls, masks, recorded, sets, strict=True)
    ]
    results = denoiser.step([*edits, *map(DenseStep, calls, sets)])
    for i, expected in enumerate(wanted):
        assert error(recorded[i][0], expected) < 1e-4
        assert error(results[i], expected) < 1e-4
        assert error(results[len(sets) + i], expected) < 1e-4


def test_one_call_of_the_module_for_members_with_different_differences() -> None:
    module = Stack(1).eval()
    denoiser, sets = maskfx.compile(module), mixed_sets(module)
    calls = [inputs(2, 8, 8, seed) for seed in range(4)]
    [group] = denoiser.alike(calls, sets)
    assert group.numbers == [0, 1, 2, 3]
    found = denoiser.plain_together(group)
    for i, own in enumerate(sets):
        assert error(found[i], merged(module, own)(**calls[i])) < 1e-5


def test_patches_with_differences_leave_no_trace() -> None:
    module = Stack(1).eval()
    before = [value.clone() for value in module.parameters()]
    updates = (difference_of(module, 1), update_of(module, 4, 2))
    wanted = merged(module, updates)
    for _ in range(20):
        with patched(module, updates):
            for value, other in zip(module.parameters(), wanted.parameters(), strict=True):
                assert error(value, other) < 1e-6
    assert all(map(torch.equal, module.parameters(), before))


WRONG: dict[str, tuple[Difference, str]] = {
    "channels": (
        Difference(torch.ones(8, 9, 3, 3)),
        "it is for a layer with 9 input channels, and the pipeline's denoiser gives 4",
    ),
    "outputs": (Difference(torch.ones(7, 4, 3, 3)), "was made for another model"),
    "bias": (Difference(bias=torch.ones(9)), "has a bias of (8,), and the update's difference is"),
}


@pytest.mark.parametrize("kind", WRONG)
def test_differences_that_dont_fit(kind: str) -> None:
    change, message = WRONG[kind]
    denoiser = maskfx.compile(Stack(1).eval())
    with pytest.raises(InputError) as raised:
        denoiser.step([DenseStep(inputs(1, 8, 8), [WeightedLayers({"into": change}, 1.0, "a")])])
    assert message in str(raised.value)


def test_a_layer_without_a_bias() -> None:
    module = Odd().eval()
    change = {"turned": Difference(bias=torch.ones(8))}
    with pytest.raises(InputError, match="is a Linear without a bias"):
        maskfx.compile(module).adapters.check([WeightedLayers(change, 1.0, "a")])
    assert differences_of(module, 1)["turned"].bias is None
