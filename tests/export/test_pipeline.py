"""A pipeline whose denoisers are exported graphs makes the compiled one's picture."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import maskfx
from maskfx.export.denoiser import ExportedDenoiser
from maskfx.export.exporter import export
from maskfx.pipelines.compile import pipeline_state_of
from maskfx.serve.models.model_source import load_pipeline
from tests.factories.pipelines import picture, square
from tests.factories.served import build

pytestmark = pytest.mark.slow


def edited(pipe: Any) -> np.ndarray[Any, Any]:
    """One edit, from whatever template it records."""
    given = {"control_image": picture(3)} if hasattr(pipe, "controlnet") else {}
    generator = torch.Generator().manual_seed(0)
    result = pipe(
        prompt="red",
        image=picture(),
        mask_image=square(),
        num_inference_steps=3,
        generator=generator,
        height=32,
        width=32,
        output_type="np",
        quality="all-steps",
        **given,
    )
    found: np.ndarray[Any, Any] = result.images[0]
    return found


@pytest.mark.parametrize(
    "name", ["FluxInpaintPipeline", "StableDiffusionControlNetInpaintPipeline"]
)
def test_the_picture_is_the_compiled_ones(name: str, tmp_path: Path) -> None:
    pipe = maskfx.compile(build(name))
    wanted = edited(pipe)
    export(pipe, tmp_path / "exported", format="pt2", verify=False)
    other = maskfx.compile(load_pipeline(str(tmp_path / "exported"), "float32", "cpu"))
    found = edited(other)
    assert np.abs(found - wanted).max() < 1e-3
    state = pipeline_state_of(other)
    assert all(isinstance(one, ExportedDenoiser) for one in state.denoisers.values())
    assert all(one.programs for one in state.denoisers.values())
    weights = [w for one in state.denoisers.values() for w in one.module.parameters()]
    assert sum(memory(weight) for weight in weights) <= 8 * len(weights)


def test_the_pipeline_computes_in_the_dtype_of_its_graphs(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    pipe = maskfx.compile(build("FluxInpaintPipeline").to(torch.bfloat16))
    edited(pipe)
    export(pipe, tmp_path / "exported", format="pt2", verify=False)
    caplog.clear()
    other = maskfx.compile(load_pipeline(str(tmp_path / "exported"), "float32", "cpu"))
    assert other.vae.dtype == torch.bfloat16
    assert "compute in bfloat16" in caplog.text
    assert np.isfinite(edited(other)).all()
    assert load_pipeline(str(tmp_path / "exported"), "bfloat16", "cpu").vae.dtype == torch.bfloat16
    assert caplog.text.count("compute in bfloat16") == 1


def memory(weight: nn.Parameter) -> int:
    """Bytes that a weight really holds."""
    return weight.untyped_storage().nbytes()


def test_a_pipeline_that_is_not_compiled_is_refused(tmp_path: Path) -> None:
    with pytest.raises(maskfx.InputError, match="isn't compiled; call maskfx.compile"):
        export(build("FluxInpaintPipeline"), tmp_path / "x")
