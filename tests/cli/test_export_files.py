"""`maskfx export --no-compare`: denoisers of a folder, exported from its files."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import maskfx
from maskfx.cli import main as cli
from maskfx.cli.first_calls import first_calls
from maskfx.cli.try_model import call_arguments
from maskfx.export.manifest import read_manifest
from maskfx.serve.models.canvas import Canvas
from maskfx.serve.models.model_source import load_pipeline
from maskfx.serve.models.pipeline_set import PipelineSet
from tests.export.test_pipeline import edited
from tests.factories.served import build

CONTROLLED = "StableDiffusionControlNetInpaintPipeline"


def saved(name: str, folder: Path, dtype: torch.dtype = torch.float32) -> Path:
    pipe = build(name).to(dtype)
    pipe.save_pretrained(folder)
    return folder


def shapes_of(call: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    return {n: tuple(v.shape) for n, v in call.items() if isinstance(v, torch.Tensor)}


def test_first_calls_are_those_of_a_real_run(tmp_path: Path) -> None:
    folder = saved("FluxInpaintPipeline", tmp_path / "model", torch.bfloat16)
    found = first_calls(folder)
    assert set(found) == {"transformer"}
    real: dict[str, Any] = {}
    pipe = load_pipeline(str(folder), "bfloat16", "cpu")
    pipe.transformer.register_forward_pre_hook(
        lambda module, args, named: real.setdefault("call", dict(named)) and None, with_kwargs=True
    )
    family = PipelineSet.of(pipe, maskfx.compile)
    canvas = Canvas.blank(family.size(), family.multiple)
    with torch.no_grad():
        family.main.plain(**call_arguments(family.main, canvas, 2))
    assert shapes_of(found["transformer"]) == shapes_of(real["call"])
    kinds = {n: v.dtype for n, v in found["transformer"].items() if isinstance(v, torch.Tensor)}
    assert kinds["hidden_states"] == torch.bfloat16
    assert kinds == {n: v.dtype for n, v in real["call"].items() if isinstance(v, torch.Tensor)}


def test_each_denoiser_of_a_pipeline_is_called(tmp_path: Path) -> None:
    found = first_calls(saved(CONTROLLED, tmp_path / "model"))
    assert set(found) == {"unet", "controlnet"}
    assert "down_block_additional_residuals" in found["unet"]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["FluxInpaintPipeline", CONTROLLED])
def test_the_picture_is_the_models(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("onnxruntime")
    folder, out = saved(name, tmp_path / "model"), tmp_path / "out"
    assert cli.main(["export", str(folder), "--out", str(out), "--no-compare"]) == 0
    shown = capsys.readouterr().out
    assert "the captured graph and its program were not compared" in shown
    assert "the exported graphs were not compared with the denoiser: compare=False" in shown
    part = "transformer" if "Flux" in name else "unet"
    assert set(read_manifest(out / part)["not_compared"]) == {"capture", "graphs"}
    assert not list((out / part).glob("*.safetensors"))
    pipes = [maskfx.compile(load_pipeline(str(one), "float32", "cpu")) for one in (folder, out)]
    one, other = map(edited, pipes)
    assert np.abs(one - other).max() < 1e-3


@pytest.mark.parametrize(
    ("line", "text"),
    [
        ("owner/name", "--no-compare exports a folder, owner/name is a hub id"),
        ("dit --dtype bfloat16", "copies the weights as they are, --dtype bfloat16 can't apply"),
    ],
)
def test_what_can_not_be_exported_from_files_is_refused(
    line: str, text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    assert cli.main(["export", *line.split(), "--out", str(out), "--no-compare"]) == 2
    assert text in " ".join(capsys.readouterr().err.split())
    assert not out.exists()
