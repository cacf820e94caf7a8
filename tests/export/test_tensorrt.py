"""Engines of TensorRT-RTX are built from exported ONNX, without a GPU."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import maskfx
from maskfx.errors import MissingRequest
from maskfx.export.manifest import read_manifest
from maskfx.export.profiles import Profile, read_ranges
from maskfx.export.tensorrt import build_engine, import_tensorrt
from tests.factories.zoo import ZOO

FLUX = "FluxTransformer2DModel"
RANGES = ("rows=2:20:32", "requests=1:2:2", "tokens=16", "text:0=3:7:9")


def test_without_the_package_the_extra_is_named(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "tensorrt_rtx", None)
    with pytest.raises(MissingRequest, match=r"install maskfx\[tensorrt\]"):
        import_tensorrt()


def exported(name: str, folder: Path, dtype: torch.dtype, **options: Any) -> Path:
    case = ZOO[name]
    inputs = {
        key: value.to(dtype)
        if isinstance(value, torch.Tensor) and value.is_floating_point()
        else value
        for key, value in case.inputs(case.sizes[2], 0).items()
    }
    denoiser = maskfx.compile(case.build().to(dtype), example_inputs=inputs)
    maskfx.export(denoiser, folder, **options)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_an_engine_is_built_for_a_range_of_rows(dtype: torch.dtype, tmp_path: Path):
    trt = pytest.importorskip("tensorrt_rtx")
    folder = exported(FLUX, tmp_path / "out", dtype, opset=20 if dtype == torch.float32 else None)
    manifest = read_manifest(folder)
    profile = Profile(manifest, read_ranges(RANGES))
    graph = manifest["graphs"]["edit"]
    engine = tmp_path / "edit.engine"
    build_engine(folder / graph["file"], graph, profile, engine)
    assert engine.stat().st_size > 100_000
    del trt
