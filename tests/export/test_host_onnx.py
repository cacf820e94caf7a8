"""The host with graphs in ONNX: templates and edits are those of the module."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import maskfx
from maskfx.export.host import Edit, Host, Record
from maskfx.export.host.arrays import Array
from maskfx.export.triton import write_repository
from tests.export.hosted import recording_of
from tests.export.tiny import arguments, tiny
from tests.factories.masks import MASKS

SIZES = ((1, 8, 8, 5), (2, 12, 8, 3), (1, 10, 14, 9))
KINDS = ("stroke", "one_site", "random")


class Sessions:
    """Runs the graphs of a directory by onnxruntime."""

    def __init__(self, host: Host, folder: Path) -> None:
        runtime = pytest.importorskip("onnxruntime")
        graphs = host.manifest["graphs"].items()
        self.sessions = {n: runtime.InferenceSession(folder / g["file"]) for n, g in graphs}

    def __call__(self, graph: str, inputs: Mapping[str, Array]) -> list[Array]:
        found: list[Array] = self.sessions[graph].run(None, dict(inputs))
        return found


def apart(found: Array, wanted: torch.Tensor) -> float:
    exact = wanted.numpy()
    return float(np.linalg.norm(found - exact) / np.linalg.norm(exact))


def arrays(inputs: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    return {name: value.numpy() for name, value in inputs.items()}


@pytest.mark.slow
def test_one_export_serves_a_ragged_batch_of_templates_and_edits(tmp_path: Path):
    module, folder = tiny(), tmp_path / "out"
    denoiser = maskfx.compile(module, example_inputs=arguments(2))
    maskfx.export(denoiser, folder)
    host = Host.read(folder)
    run = Sessions(host, folder)
    inputs = [arguments(*size, seed=n) for n, size in enumerate(SIZES)]
    recorded = host.step([Record(arrays(own)) for own in inputs], run)
    masks = [MASKS[k](tuple(i["sample"].shape[2:]), 1) for k, i in zip(KINDS, inputs, strict=True)]
    edits = []
    for own, result, mask in zip(inputs, recorded, masks, strict=True):
        assert apart(result.outputs[0], module(**own)) < 1e-4
        assert result.recording is not None
        edits.append(Edit(arrays(own), mask.numpy(), result.recording))
    for own, result in zip(inputs, host.step(edits, run), strict=True):
        assert apart(result.outputs[0], module(**own)) < 1e-4
    [dense] = host.dense(arrays(inputs[0]), run)
    assert apart(dense, module(**inputs[0])) < 1e-4

    # a template of the runtime, read by another text
    kept = denoiser.record(**inputs[0])[1]
    other = {
        **inputs[0],
        "encoder_hidden_states": arguments(*SIZES[0], seed=9)["encoder_hidden_states"],
    }
    wanted = denoiser.edit([maskfx.EditStep(other, masks[0], kept)])[0]
    [found] = host.step([Edit(arrays(other), masks[0].numpy(), recording_of(kept))], run)
    assert apart(found.outputs[0], wanted) < 1e-4
    assert apart(found.outputs[0], module(**inputs[0])) > 1e-3

    # the files of a model repository run too
    made = write_repository(folder, tmp_path / "models", "tiny")
    runtime = pytest.importorskip("onnxruntime")
    for model in made:
        runtime.InferenceSession(model / "1" / "model.onnx")
