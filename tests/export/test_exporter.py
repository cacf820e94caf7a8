"""Exported graphs compute what the denoiser does, and a failed export leaves nothing behind."""

import copy
import errno
import json
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import maskfx
from maskfx.cli import main as cli
from maskfx.cli.export_model import part_of
from maskfx.export import write_denoiser
from maskfx.export.denoiser import ExportedDenoiser
from maskfx.export.exporter import export
from maskfx.export.formats import package
from maskfx.export.graph_set import ENDINGS, GraphSet
from maskfx.export.manifest import read_manifest
from tests.export.tiny import arguments, tiny
from tests.passes.tools import error

GRAPHS = ("edit", "record", "dense", "side_request")
Export = Callable[..., Path]


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Export:
    """Exports the tiny denoiser in a format, once."""
    known: dict[Any, Path] = {}

    def made(format: str, **options: Any) -> Path:
        key = (format, *sorted(options.items()))
        if key not in known:
            path = tmp_path_factory.mktemp("exports") / "tiny"
            found = export(tiny(), path, format=format, example_inputs=arguments(), **options)
            assert found.verdicts["denoiser"]
            known[key] = path
        return known[key]

    return made


def masks(height: int, width: int) -> list[Tensor]:
    sites = torch.arange(height * width).view(height, width)
    return [sites % 3 == 0, sites == height * width - 1, sites < 2 * width]


FORMATS = ["pt2", "onnx", pytest.param("aoti", marks=pytest.mark.slow)]


@pytest.mark.parametrize("format", FORMATS)
def test_one_export_serves_every_mask_size_batch_and_text(written: Export, format: str) -> None:
    module = tiny()
    denoiser = ExportedDenoiser(module, written(format), compares=False)
    steps, wanted = [], []
    for seed, (batch, height, width, text) in enumerate(
        ((1, 8, 8, 5), (2, 6, 10, 9), (1, 7, 5, 2))
    ):
        given = arguments(batch, height, width, text, seed)
        output, cache = denoiser.record(**given)
        want = module(**given)
        assert error(output, want) < 1e-4
        assert error(denoiser.dense(given), want) < 1e-4
        for mask in masks(height, width):
            steps.append(maskfx.EditStep(given, mask, cache))
            wanted.append(want)
    found = denoiser.edit(steps)  # one batch of nine requests
    assert max(map(error, found, wanted)) < 1e-4


@pytest.mark.parametrize("format", ["pt2", pytest.param("onnx", marks=pytest.mark.slow)])
def test_an_edit_changes_what_the_compiled_one_changes(written: Export, format: str) -> None:
    """New noise under the mask alone: the rest of the picture is the recording's."""
    compiled = maskfx.compile(tiny())
    exported = ExportedDenoiser(tiny(), written(format), compares=False)
    before, after, mask = arguments(), arguments(seed=1), masks(8, 8)[2]
    outputs = []
    for denoiser in (compiled, exported):
        _, cache = denoiser.record(**before)
        outputs.append(denoiser.edit([maskfx.EditStep(after, mask, cache)])[0])
    assert error(outputs[1], outputs[0]) < 1e-5
    assert error(outputs[0], tiny()(**before)) > 1e-2


def test_a_recording_of_the_compiled_denoiser_serves_the_exported_one(written: Export) -> None:
    module = tiny()
    compiled = maskfx.compile(module)
    exported = ExportedDenoiser(module, written("pt2"), compares=False)
    _, cache = compiled.record(**arguments())
    step = maskfx.EditStep(arguments(), masks(8, 8)[0], cache)
    assert error(exported.edit([step])[0], module(**arguments())) < 1e-4


def test_graphs_need_no_operators_of_maskfx(written: Export) -> None:
    names = {str(n.target) for n in program_nodes(written("pt2") / "edit.pt2")}
    assert "aten.scaled_dot_product_attention.default" in names
    assert not any("maskfx" in name for name in names)


@pytest.mark.slow
def test_operators_can_be_kept(written: Export) -> None:
    path = written("pt2", operators=True)
    assert any("maskfx.attend" in str(n.target) for n in program_nodes(path / "edit.pt2"))
    denoiser = ExportedDenoiser(tiny(), path)
    _, cache = denoiser.record(**arguments(2))
    step = maskfx.EditStep(arguments(2), masks(8, 8)[0], cache)
    assert error(denoiser.edit([step])[0], tiny()(**arguments(2))) < 1e-4


def program_nodes(path: Path) -> list[torch.fx.Node]:
    return list(torch.export.load(path).graph.nodes)


def test_the_weights_of_all_graphs_in_onnx_are_written_once(written: Export) -> None:
    from maskfx.export.formats import onnx, weight_data

    folder = written("onnx")
    large = [w.nbytes for w in tiny().parameters() if w.nbytes >= onnx.SMALL]
    padding = (len(large) + 8) * weight_data.ALIGNED  # 8: tables of the graphs
    assert 0 < sum(large) <= (folder / onnx.WEIGHTS).stat().st_size < sum(large) + padding


def test_the_manifest_names_the_files(written: Export) -> None:
    graphs = read_manifest(written("onnx"))["graphs"]
    assert {name: graph["file"] for name, graph in graphs.items()} == {
        name: f"{name}.onnx" for name in GRAPHS
    }


@pytest.mark.parametrize(
    ("part", "there"),
    [
        ("masked", {"edit", "side_request"}),
        pytest.param("record", {"record", "side_request"}, marks=pytest.mark.slow),
        pytest.param("dense", {"dense"}, marks=pytest.mark.slow),
    ],
)
def test_a_part_has_its_graphs(tmp_path: Path, part: str, there: set[str]) -> None:
    export(tiny(), tmp_path / "x", format="pt2", part=part, example_inputs=arguments())
    manifest = read_manifest(tmp_path / "x")
    assert set(manifest["graphs"]) == there
    absent = next(name for name in ("dense", "record") if name not in there)
    with pytest.raises(maskfx.InputError, match=f"no graph '{absent}'; export .* {absent} or all"):
        GraphSet(tmp_path / "x", manifest).run(absent, {})


def test_wrong_inputs_are_named_as_in_the_manifest(written: Export) -> None:
    folder = written("pt2")
    graphs = GraphSet(folder, read_manifest(folder))
    good = arguments(2)
    with pytest.raises(maskfx.InputError, match=r"input 'timestep' of graph 'dense' is missing"):
        graphs.run("dense", {k: v for k, v in good.items() if k != "timestep"})
    with pytest.raises(maskfx.InputError, match=r"'timestep'.*\[3\], expected \['size_batch'\]"):
        graphs.run("dense", good | {"timestep": torch.arange(3)})
    with pytest.raises(maskfx.InputError, match=r"'sample'.*float64, expected torch.float32"):
        graphs.run("dense", good | {"sample": good["sample"].double()})
    with pytest.raises(maskfx.InputError, match=r"'timestep'.*float32, expected torch.int64"):
        graphs.run("dense", good | {"timestep": torch.tensor([0.5, 1.0])})


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"format": "tflite"}, "format='tflite'; choose one of onnx, aoti, pt2"),
        ({"part": "half"}, "part='half'; choose one of"),
        ({"opset": 17}, "opset 17: PyTorch writes 18 and newer, and the onnx here knows"),
        ({"opset": 999}, "opset 999: PyTorch writes 18 and newer"),
        ({"opset": "23"}, "opset '23': PyTorch writes 18 and newer"),
        ({"opset": 23, "format": "pt2"}, "opset= applies to onnx"),
        ({"operators": True}, "ONNX knows no operators of maskfx"),
    ],
)
def test_unknown_options_are_refused(tmp_path: Path, options: dict[str, Any], text: str) -> None:
    with pytest.raises(maskfx.InputError, match=text):
        export(tiny(), tmp_path / "x", example_inputs=arguments(), **options)
    assert list(tmp_path.iterdir()) == []


def test_what_was_not_called_or_exists_is_refused(tmp_path: Path) -> None:
    with pytest.raises(maskfx.MissingRequest, match="give example_inputs="):
        export(tiny(), tmp_path / "x")
    with pytest.raises(maskfx.MissingRequest, match="nothing was called yet"):
        export(maskfx.compile(tiny()), tmp_path / "x")
    with pytest.raises(maskfx.InputError, match="exists; remove it"):
        export(tiny(), tmp_path, example_inputs=arguments())


def test_a_place_that_cant_be_written_is_refused_before_the_work(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for place in (Path("/dev/null/x"), tmp_path / "file" / "deep" / "x"):
        with pytest.raises(maskfx.InputError, match="x can't be written: Not a directory; give"):
            export(object(), place)  # type: ignore[arg-type]
    with pytest.raises(maskfx.InputError, match="expected a pipeline or a denoiser"):
        export(object(), tmp_path / "new" / "x")  # type: ignore[arg-type]
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_full_disk_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(program: object, path: Path) -> None:
        path.write_bytes(b"half of it")
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(write_denoiser, "write_program", full)
    with pytest.raises(maskfx.InputError, match="no room left"):
        export(tiny(), tmp_path / "x", format="pt2", example_inputs=arguments())
    assert list(tmp_path.iterdir()) == []


def test_graphs_that_compute_something_else_are_not_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = package.write_program

    def other(program: torch.export.ExportedProgram, path: Path) -> None:
        for name, weight in program.state_dict.items():
            if "out" in name:
                program.state_dict[name] = torch.nn.Parameter(weight + 1, requires_grad=False)
        real(program, path)

    monkeypatch.setattr(write_denoiser, "write_program", other)
    with pytest.raises(maskfx.CompileError, match="computes something else than the denoiser"):
        export(tiny(), tmp_path / "x", format="pt2", example_inputs=arguments())
    assert list(tmp_path.iterdir()) == []


def test_the_room_is_called_and_its_host_needs_no_torch(tmp_path: Path) -> None:
    code = (
        "import sys, maskfx.export.host, maskfx\n"
        "assert 'torch' not in sys.modules\n"
        "assert callable(maskfx.export) and maskfx.export.host\n"
        "try: maskfx.export(3, 'x')\n"
        "except maskfx.InputError as error: assert 'got int' in str(error), error\n"
        "else: raise SystemExit(1)\n"
        "assert 'torch' in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120, cwd=Path.cwd())


@pytest.mark.parametrize(
    "format", ["onnx", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("pt2", "aoti"))]
)
def test_graphs_run_where_maskfx_is_not_imported(written: Export, format: str) -> None:
    folder = written(format)
    inputs = {name: value.tolist() for name, value in arguments().items()}
    code = f"""
import json, sys
given = json.load(sys.stdin)
path = {str(folder / ("dense" + ENDINGS[format]))!r}
if {format!r} == "onnx":
    import numpy as np, onnxruntime
    kinds = {{"timestep": np.int64}}
    given = {{n: np.array(v, kinds.get(n, np.float32)) for n, v in given.items()}}
    [out] = onnxruntime.InferenceSession(path).run(None, given)
    assert "torch" not in sys.modules
else:
    import torch
    given = {{n: torch.tensor(v) for n, v in given.items()}}
    if {format!r} == "aoti":
        from torch._inductor import aoti_load_package
        [out] = aoti_load_package(path)(**given)
    else:
        [out] = torch.export.load(path).module()(**given)
assert "maskfx" not in sys.modules and "diffusers" not in sys.modules
print(json.dumps(out.tolist()))
"""
    done = subprocess.run(
        [sys.executable, "-c", code],
        input=json.dumps(inputs),
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    assert error(torch.tensor(json.loads(done.stdout)), tiny()(**arguments())) < 1e-4


def test_the_mode_of_the_command_chooses_the_graphs(capsys: pytest.CaptureFixture[str]) -> None:
    assert [part_of("mask_cache", part) for part in ("all", "record")] == ["all", "record"]
    assert [part_of("dense", part) for part in ("all", "dense")] == ["dense", "dense"]
    for line, text in (("--mode sparse", "choose one of"), ("--mode dense --part record", "leave")):
        assert cli.main(["export", "--out", "x", *line.split()]) == 2
        assert text in capsys.readouterr().err


@pytest.mark.parametrize("again", [copy.deepcopy, lambda one: pickle.loads(pickle.dumps(one))])
def test_copies_of_an_exported_denoiser_run_its_files(written: Export, again: Any) -> None:
    denoiser = ExportedDenoiser(tiny(), written("pt2"), compares=False)
    copied = again(denoiser)
    assert type(copied) is ExportedDenoiser
    assert copied.module is not denoiser.module
    given = arguments(2)
    output, cache = copied.record(**given)
    edits = copied.edit([maskfx.EditStep(given, masks(8, 8)[0], cache)])
    for found in (output, *edits, copied.dense(given)):
        assert error(found, tiny()(**given)) < 1e-4
    for one in (denoiser, copied):  # each accepts the other's recordings
        one.edit([maskfx.EditStep(given, masks(8, 8)[0], cache)])
