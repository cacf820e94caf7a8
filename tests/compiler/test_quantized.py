"""Quantized weights: a denoiser with such linear layers edits on rows, and is saved."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

import maskfx
from bench.packing import pack_bitsandbytes, pack_gguf, pack_quanto
from maskfx.ir.values import PLAIN_TENSORS, parts_of
from maskfx.passes.context import get_attribute
from maskfx.runtime.lora.patch import WeightPatch
from maskfx.runtime.programs import program_cache
from maskfx.runtime.weights import Weights, checksum, state_of
from tests.factories.lora import merged, update_of
from tests.factories.quantized import EightBits, quantize, unpacked
from tests.factories.zoo import ZOO, slow_unet
from tests.passes.tools import error

FAMILIES = ["FluxTransformer2DModel", "UNet2DConditionModel-sd15"]
PACKED = {
    "gguf": ("gguf", pack_gguf),
    "bitsandbytes": ("bitsandbytes", pack_bitsandbytes),
    "quanto": ("optimum.quanto", pack_quanto),
}


def check_edit(module: nn.Module, name: str, **how: Any) -> maskfx.CompiledDenoiser:
    case = ZOO[name]
    inputs, denoiser = case.inputs(case.sizes[0], 0), maskfx.compile(module, **how)
    wanted = module(**inputs)
    _, cache = denoiser.record(**inputs)
    mask = torch.zeros(denoiser.mask_shape(inputs), dtype=torch.bool)
    mask.view(-1)[3:9] = True
    assert error(denoiser.edit([maskfx.EditStep(inputs, mask, cache)])[0], wanted) < 1e-4
    return denoiser


def quantized(name: str) -> nn.Module:
    module = ZOO[name].build()
    assert quantize(module) > 10
    return module


@pytest.mark.parametrize("name", slow_unet(FAMILIES))
def test_quantized_denoisers_edit_on_rows(name: str) -> None:
    denoiser = check_edit(quantized(name), name)
    [found] = denoiser.compilations
    assert found.program is not None
    assert not found.reasons
    graph = found.program.module
    names = [str(node.target) for node in graph.graph.find_nodes(op="get_attr")]
    held = [name for name in names if isinstance(get_attribute(graph, name), EightBits)]
    assert len(held) > 10, "they are widened in the step, and not kept wide"


def test_another_start_captures_no_quantized_denoiser_again(tmp_path: Path) -> None:
    check_edit(quantized(FAMILIES[0]), FAMILIES[0], programs=tmp_path)
    refuse = mock.Mock(side_effect=AssertionError("captured again"))
    with mock.patch.object(program_cache, "capture", refuse):
        check_edit(quantized(FAMILIES[0]), FAMILIES[0], programs=tmp_path)


def test_quantized_weights_have_fingerprints() -> None:
    one, other = nn.Linear(8, 4), nn.Linear(8, 4)
    for module in (one, other):
        quantize(module)
    weight: Any = one.weight
    assert list(parts_of(weight)) == [".integers", ".scales"]
    assert Weights(one).fingerprint() != Weights(other).fingerprint()
    before, known = checksum(weight), state_of(weight)
    assert isinstance(weight, EightBits)
    weight.integers.add_(1)
    assert checksum(weight) != before
    assert state_of(weight) != known


def packed(name: str, kind: str) -> tuple[nn.Module, nn.Module]:
    """A denoiser with packed weights, and one with the same numbers unpacked."""
    package, pack = PACKED[kind]
    pytest.importorskip(package, reason=f"{package} isn't installed")
    module = ZOO[name].build()
    names = pack(module)
    assert len(names) > 10
    return module, unpacked(module, ZOO[name].build(), names)


@pytest.mark.parametrize("name", [FAMILIES[0], pytest.param(FAMILIES[1], marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", PACKED)
def test_layers_that_unpack_their_weights_run_on_rows(name: str, kind: str) -> None:
    module, _ = packed(name, kind)
    [found] = check_edit(module, name).compilations
    assert found.program is not None
    assert not found.reasons


@pytest.mark.parametrize("kind", PACKED)
def test_another_start_captures_no_packed_denoiser_again(kind: str, tmp_path: Path) -> None:
    check_edit(packed(FAMILIES[0], kind)[0], FAMILIES[0], programs=tmp_path)
    refuse = mock.Mock(side_effect=AssertionError("captured again"))
    with mock.patch.object(program_cache, "capture", refuse):
        check_edit(packed(FAMILIES[0], kind)[0], FAMILIES[0], programs=tmp_path)


@pytest.mark.parametrize("compiles", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", PACKED)
@torch.no_grad()
def test_packed_layers_have_the_adapters_of_each_request(kind: str, compiles: bool) -> None:
    name = FAMILIES[0]
    module, plain = packed(name, kind)
    inputs = ZOO[name].inputs(ZOO[name].sizes[0], 0)
    denoiser = maskfx.compile(module, inductor=compiles)
    sets = [(update_of(plain, 4, 1, 0.7),), (update_of(plain, 2, 2, 0.5),), ()]
    wanted = [merged(plain, own)(**inputs) for own in sets]
    assert error(wanted[0], wanted[2]) > 0.01
    recorded = denoiser.step([maskfx.RecordStep(inputs, own) for own in sets])
    mask = torch.zeros(denoiser.mask_shape(inputs), dtype=torch.bool)
    mask.view(-1)[3:9] = True
    edits = [
        maskfx.EditStep(inputs, mask, cache, adapters=own)
        for (_, cache), own in zip(recorded, sets, strict=True)
    ]
    found = denoiser.step([*edits, *(maskfx.DenseStep(inputs, own) for own in sets)])
    for one, other in zip([*(r for r, _ in recorded), *found], wanted * 3, strict=True):
        assert error(one, other) < 1e-5
    with pytest.raises(maskfx.InputError, match="its weights are packed"):
        WeightPatch(module).apply(sets[0])


@pytest.mark.parametrize("kind", PACKED)
def test_packed_weights_have_fingerprints(kind: str) -> None:
    module, _ = packed(FAMILIES[0], kind)
    weight: Any = next(p for p in module.parameters() if type(p) not in PLAIN_TENSORS)
    before = Weights(module).fingerprint()
    known = checksum(weight), state_of(weight)
    for part in parts_of(weight).values():
        part.view(-1).view(torch.uint8)[0] ^= 1
        assert checksum(weight) != known[0]
        assert state_of(weight) != known[1]
        known = checksum(weight), state_of(weight)
    assert Weights(module).fingerprint() != before


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize(
    ("config", "rows"),
    [
        ("Int8WeightOnlyConfig", "all"),
        ("Float8WeightOnlyConfig", "most"),  # not the layers of a request's vectors
        pytest.param(
            "Int8DynamicActivationInt8WeightConfig",
            "few",
            marks=pytest.mark.wrong_program,  # rounding of rows takes steps of 1 / 127
        ),
    ],
)
def test_denoisers_quantized_by_torchao_edit(name: str, config: str, rows: str) -> None:
    package = pytest.importorskip("torchao.quantization", reason="torchao isn't installed")
    module = ZOO[name].build()
    package.quantize_(
        module,
        getattr(package, config)(),
        filter_fn=lambda part, _: isinstance(part, nn.Linear) and part.in_features % 8 == 0,
    )
    [found] = check_edit(module, name).compilations
    assert (rows == "all") == (found.program is not None and not found.reasons)
    if rows == "most":
        assert found.program is not None
        assert all("[batch, " in reason for reason in found.reasons.values()), found.reasons
