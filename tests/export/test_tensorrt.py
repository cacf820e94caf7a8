"""Engines of TensorRT-RTX are built from exported ONNX, without a GPU; none ran."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import maskfx
from maskfx.errors import CompileError, InputError, MissingRequest
from maskfx.export.denoiser import ExportedDenoiser
from maskfx.export.manifest import read_manifest
from maskfx.export.profiles import ShapeProfile, read_ranges
from maskfx.export.tensorrt import build_engine, import_tensorrt
from tests.export.tiny import arguments, tiny

RANGES = ("rows=1:40:192", "requests=1:2:2", "y=8:12:12", "x=8", "text:0=3:5:9")


def test_without_the_package_the_extra_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setitem(sys.modules, "tensorrt_rtx", None)
    with pytest.raises(MissingRequest, match=r"install maskfx\[tensorrt\]"):
        import_tensorrt()
    with pytest.raises(MissingRequest, match=r"install maskfx\[tensorrt\]"):
        maskfx.export(tiny(), tmp_path / "out", format="tensorrt")
    assert not list(tmp_path.iterdir())


def test_options_that_do_not_fit_the_format_are_refused(tmp_path: Path):
    with pytest.raises(InputError, match="profile= applies to tensorrt and .*, not to onnx"):
        maskfx.export(tiny(), tmp_path / "out", profile=["rows=1"])
    with pytest.raises(InputError, match="no backend of Triton runs aoti"):
        maskfx.export(tiny(), tmp_path / "out", format="aoti", layout="triton")
    with pytest.raises(InputError, match="layout='onyx'; choose one of plain, triton"):
        maskfx.export(tiny(), tmp_path / "out", layout="onyx")


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_engines_are_built_for_a_range_of_rows(dtype: torch.dtype, tmp_path: Path):
    pytest.importorskip("tensorrt_rtx")
    given = arguments(2, 12, 8, 5)
    inputs = {n: v.to(dtype) if v.is_floating_point() else v for n, v in given.items()}
    denoiser, out = maskfx.compile(tiny(dtype), example_inputs=inputs), tmp_path / "out"
    maskfx.export(
        denoiser,
        out,
        format="tensorrt",
        part="masked",
        profile=RANGES,
        layout="triton",
        verify=dtype != torch.bfloat16,  # onnxruntime's CPU lacks operators in bfloat16
    )
    manifest = read_manifest(out)
    assert list(manifest["graphs"]) == ["edit", "side_request"]
    for name, graph in manifest["graphs"].items():
        engine = out / graph["file"]
        assert engine.name == f"{name}.engine"
        assert engine.stat().st_size > 10_000
        plan = out / "triton" / f"denoiser_{name}" / "1" / "model.plan"
        assert plan.read_bytes() == engine.read_bytes()
    assert not [*out.glob("*.onnx"), *out.glob("*.data")]
    with pytest.raises(InputError, match=r"side_request\.engine: maskfx runs onnx, aoti, "):
        ExportedDenoiser(tiny(dtype), out, compares=False).record(**inputs)


def test_what_is_no_graph_is_refused_and_nothing_is_written(tmp_path: Path):
    pytest.importorskip("tensorrt_rtx")
    (tmp_path / "edit.onnx").write_bytes(b"no graph")
    manifest: dict[str, Any] = {
        "example": {"batch": 1, "y": 8, "x": 8},
        "sizes": {},
        "dimensions": {},
    }
    manifest |= {"levels": [], "segments": {}, "windows": {}}
    profile = ShapeProfile(manifest, read_ranges(["rows=4"]))
    graph: dict[str, Any] = {"inputs": [], "outputs": []}
    with pytest.raises(CompileError, match=r"edit\.onnx has operators that TensorRT can't"):
        build_engine(tmp_path / "edit.onnx", graph, profile, tmp_path / "edit.engine")
    assert not (tmp_path / "edit.engine").exists()
