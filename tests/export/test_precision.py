"""Graphs whose weights have 16 bits."""

import math
from pathlib import Path

import pytest
import torch

import maskfx
from maskfx import EditStep
from maskfx.export.denoiser import ExportedDenoiser
from maskfx.export.exporter import export
from maskfx.export.manifest import read_manifest
from tests.export.tiny import WIDTH, arguments, tiny


def arguments_in(dtype: torch.dtype) -> dict[str, torch.Tensor]:
    given = arguments()
    return {n: v.to(dtype) if v.is_floating_point() else v for n, v in given.items()}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("format", "dtype"),
    [("pt2", torch.bfloat16), ("pt2", torch.float16), ("onnx", torch.float16)],
    ids=str,
)
def test_graphs_of_16_bits_compute_what_the_denoiser_does(
    tmp_path: Path, format: str, dtype: torch.dtype
) -> None:
    found = export(tiny(dtype), tmp_path / "x", format=format, example_inputs=arguments_in(dtype))
    verdicts = found.verdicts["denoiser"]
    assert {v.graph for v in verdicts} == {"edit", "record", "dense"}
    assert max(v.error for v in verdicts) < 2e-2
    assert read_manifest(tmp_path / "x")["dtype"] == str(dtype).removeprefix("torch.")


@pytest.mark.slow
def test_onnx_holds_bfloat16_as_it_is(tmp_path: Path) -> None:
    onnx = pytest.importorskip("onnx")
    given = arguments_in(torch.bfloat16)
    export(tiny(torch.bfloat16), tmp_path / "x", example_inputs=given, verify=False)
    bf16, fp32 = onnx.TensorProto.BFLOAT16, onnx.TensorProto.FLOAT
    held: dict[str, list[tuple[int, int]]] = {}
    for name in ("edit", "dense"):
        graph = onnx.load(tmp_path / "x" / f"{name}.onnx").graph  # with weights that are so small
        assert {value.type.tensor_type.elem_type for value in graph.output} == {bf16}
        held[name] = [(math.prod(one.dims), one.data_type) for one in graph.initializer]
        assert max(held[name]) == (4 * WIDTH * 9, bf16)
        # the norm's alone, which is computed in float32
        assert all(count <= WIDTH for count, kind in held[name] if kind == fp32)
    numbers = sum(weight.numel() for weight in tiny().parameters())
    assert sum(count for count, kind in held["dense"] if kind == bf16) >= numbers


@pytest.mark.slow
def test_an_exported_edit_of_16_bits_is_as_right_as_the_module(tmp_path: Path) -> None:
    """Against the module in fp32, its error is at most three times that of the module in bf16."""
    denoiser, given = maskfx.compile(tiny(torch.bfloat16)), arguments_in(torch.bfloat16)
    export(denoiser, tmp_path / "x", format="pt2", part="masked", example_inputs=given)
    exact = tiny()(**arguments())
    cache = denoiser.record(**given)[1]
    mask = torch.rand(denoiser.mask_shape(given), generator=torch.Generator().manual_seed(0)) < 0.3
    exported = ExportedDenoiser(denoiser.module, tmp_path / "x", compares=False)
    (edit,) = exported.edit([EditStep(given, mask, cache)])
    dense, edited = (
        float((value.float() - exact).norm()) for value in (denoiser.module(**given), edit)
    )
    assert 0 < edited < 3 * dense
