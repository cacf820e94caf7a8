"""Graphs in ONNX compute what real classes of diffusers do, at two sizes each."""

from pathlib import Path

import pytest

from maskfx.export.exporter import export
from tests.factories.zoo import ZOO

pytestmark = pytest.mark.slow

NAMES = (
    *("UNet2DConditionModel-sd15", "UNet2DConditionModel-sdxl", "ControlNetModel"),
    *("FluxTransformer2DModel", "SD3Transformer2DModel", "QwenImageTransformer2DModel"),
    "PixArtTransformer2DModel",
)


@pytest.mark.parametrize("name", NAMES)
def test_onnxruntime_agrees_with_the_denoiser(name: str, tmp_path: Path) -> None:
    case = ZOO[name]
    inputs = case.inputs(case.sizes[0], 0)
    found = export(case.build(), tmp_path / "x", example_inputs=inputs)
    verdicts = found.verdicts["denoiser"]
    assert {v.graph for v in verdicts} == {"edit", "record", "dense"}
    assert len({str(v.sizes) for v in verdicts}) == 2
    assert max(v.error for v in verdicts) < 1e-4
