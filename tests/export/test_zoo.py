"""Graphs in ONNX compute what real classes of diffusers do, at two sizes each."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils import _pytree as pytree

import maskfx
from maskfx.errors import InputError
from maskfx.export.denoiser import ExportedDenoiser
from maskfx.export.exporter import export
from tests.export.hosted import check_export
from tests.factories.own_cases import OWN
from tests.factories.zoo import ZOO

pytestmark = pytest.mark.slow

NAMES = (
    *("UNet2DConditionModel-sd15", "UNet2DConditionModel-sdxl", "ControlNetModel"),
    *("FluxTransformer2DModel", "SD3Transformer2DModel", "QwenImageTransformer2DModel"),
    *("PixArtTransformer2DModel", "WanTransformer3DModel", "SanaVideoTransformer3DModel"),
    "CogVideoXTransformer3DModel",
)
HALF = (
    *("UNet2DConditionModel-sdxl", "SD3Transformer2DModel", "PixArtTransformer2DModel"),
    *("SanaTransformer2DModel", "QwenImageTransformer2DModel", "WanTransformer3DModel"),
)


@pytest.mark.parametrize("name", NAMES)
def test_onnxruntime_agrees_with_the_denoiser(name: str, tmp_path: Path) -> None:
    check_export(ZOO[name], tmp_path / "x")


@pytest.mark.parametrize("name", HALF)
def test_onnxruntime_agrees_with_denoisers_of_16_bits(name: str, tmp_path: Path) -> None:
    case = ZOO[name]
    given = in_16_bits(case.inputs(case.sizes[0], 0), torch.float16)
    found = export(case.build().half(), tmp_path / "x", example_inputs=given)
    assert {v.graph for v in found.verdicts["denoiser"]} == {"edit", "record", "dense"}
    assert max(v.error for v in found.verdicts["denoiser"]) < 5e-3


@pytest.mark.parametrize("name", ["SD3Transformer2DModel", "WanTransformer3DModel"])
def test_denoisers_of_bfloat16_are_written(name: str, tmp_path: Path) -> None:
    """The checker of ONNX finds all types right; onnxruntime's CPU can't run them."""
    case = ZOO[name]
    given = in_16_bits(case.inputs(case.sizes[0], 0), torch.bfloat16)
    found = export(case.build().bfloat16(), tmp_path / "x", example_inputs=given)
    assert "bfloat16" in found.not_compared["denoiser"]["graphs"]


def in_16_bits(inputs: dict[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    """The arguments with their floating-point values in a type of 16 bits."""

    def narrow(value: Any) -> Any:
        floating = isinstance(value, torch.Tensor) and value.is_floating_point()
        return value.to(dtype) if floating else value

    found: dict[str, Any] = pytree.tree_map(narrow, inputs)
    return found


@pytest.mark.parametrize("name", ["grid-of-padded-tokens", "grid-of-each-sample"])
@pytest.mark.parametrize("format", ["onnx", "pt2"])
def test_pictures_among_padded_tokens_are_exported_dense(
    name: str, format: str, tmp_path: Path
) -> None:
    """The hosts don't know the rows of a program, which a dense graph hasn't."""
    case = OWN[name]
    denoiser, given = maskfx.compile(case.build()), case.inputs(case.sizes[0], 0)
    denoiser.record(**given)
    with pytest.raises(InputError, match="a fixed number"):
        export(denoiser, tmp_path / "all", format=format)
    found = export(denoiser, tmp_path / "x", format=format, part="dense", example_inputs=given)
    assert max(v.error for v in found.verdicts["denoiser"]) < 1e-4
    exported = ExportedDenoiser(denoiser.module, tmp_path / "x")
    assert torch.allclose(exported.dense(given), denoiser.module(**given), atol=1e-4)


def test_padding_of_texts_is_cut_before_a_dense_graph(tmp_path: Path) -> None:
    """The graph is of a text without padding, as the capture is."""
    case = ZOO["Lumina2Transformer2DModel"]
    given = case.inputs(case.sizes[2], 0)  # two samples, of which each has padding of its own
    module = case.build()
    export(module, tmp_path / "x", format="pt2", part="dense", example_inputs=given, verify=False)
    [found], [wanted] = ExportedDenoiser(module, tmp_path / "x").dense(given), module(**given)
    assert float((found - wanted).norm() / wanted.norm()) < 1e-4


@pytest.mark.parametrize(
    "name", ["parts", "styled", "two-streams", "half-swin", "swin-kernel", "context"]
)
def test_onnxruntime_agrees_with_denoisers_as_users_write_them(name: str, tmp_path: Path) -> None:
    check_export(OWN[name], tmp_path / "x")


def test_a_capture_shared_with_an_equal_denoiser_is_exported_with_its_numbers(
    tmp_path: Path,
) -> None:
    """Its numbers have the values at capture, where a capture of its own has symbols."""
    case = ZOO["QwenImageTransformer2DModel"]
    inputs = case.inputs(case.sizes[0], 0)
    maskfx.compile(case.build()).record(**inputs)
    found = export(case.build(), tmp_path / "x", example_inputs=inputs)
    assert max(v.error for v in found.verdicts["denoiser"]) < 1e-4
