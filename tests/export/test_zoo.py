"""Graphs in ONNX compute what real classes of diffusers do, at two sizes each."""

from pathlib import Path

import pytest

import maskfx
from maskfx.export.exporter import export
from tests.export.hosted import check_export
from tests.factories.own_cases import OWN
from tests.factories.zoo import ZOO

pytestmark = pytest.mark.slow

NAMES = (
    *("UNet2DConditionModel-sd15", "UNet2DConditionModel-sdxl", "ControlNetModel"),
    *("FluxTransformer2DModel", "SD3Transformer2DModel", "QwenImageTransformer2DModel"),
    *("PixArtTransformer2DModel", "WanTransformer3DModel", "SanaVideoTransformer3DModel"),
)


@pytest.mark.parametrize("name", NAMES)
def test_onnxruntime_agrees_with_the_denoiser(name: str, tmp_path: Path) -> None:
    check_export(ZOO[name], tmp_path / "x")


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
