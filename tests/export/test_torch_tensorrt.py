"""The adapter to Torch-TensorRT calls it as its version 2.13 is declared; the package never ran."""

from __future__ import annotations

import inspect
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from maskfx.errors import InputError, MissingRequest
from maskfx.export.denoiser import ExportedDenoiser
from maskfx.export.exporter import export
from maskfx.export.profiles import ShapeProfile, read_ranges
from maskfx.export.torch_tensorrt import import_torch_tensorrt, write_compiled
from tests.export.hosted import manifest_of
from tests.export.tiny import arguments as arguments_of_tiny
from tests.export.tiny import tiny
from tests.factories.zoo import ZOO
from tests.passes.tools import error

FLUX = "FluxTransformer2DModel"
# names of parameters, read from the package's own files
RECORDED = json.loads(Path(__file__).with_name("torch_tensorrt_2_13.json").read_text())


def signature(name: str) -> inspect.Signature:
    found, kinds = RECORDED[name], inspect.Parameter
    every = [kinds(n, kinds.POSITIONAL_OR_KEYWORD) for n in found["positional"]]
    every += [kinds(n, kinds.KEYWORD_ONLY, default=None) for n in found["keyword"]]
    every[1] = every[1].replace(default=None)
    return inspect.Signature([*every, kinds("others", kinds.VAR_KEYWORD)])


class Declared:
    """A function of the recorded signature that notes its arguments, and refuses unknown names."""

    def __init__(self, name: str, result: Any = None) -> None:
        self.__signature__ = signature(name)
        self.result, self.calls = result, list[dict[str, Any]]()

    def __call__(self, *args: Any, **named: Any) -> Any:
        bound = self.__signature__.bind(*args, **named).arguments
        assert "others" not in bound, bound["others"]
        self.calls.append(bound)
        return self.result


def declared_input(**named: Any) -> SimpleNamespace:
    assert named.keys() <= set(RECORDED["Input"])
    return SimpleNamespace(**named)


def package(monkeypatch: pytest.MonkeyPatch) -> Any:
    compiles, saves = Declared("compile", "compiled"), Declared("save")
    made = SimpleNamespace(
        dynamo=SimpleNamespace(compile=compiles),
        save=saves,
        Input=declared_input,
        __version__="2.13",
    )
    monkeypatch.setitem(sys.modules, "torch_tensorrt", made)
    return made


def arguments() -> tuple[Any, ShapeProfile]:
    manifest = manifest_of(FLUX, (), ZOO[FLUX].sizes[0], True)
    ranges = read_ranges(["rows=2:10:16", "requests=1:2:2"])
    return manifest["graphs"]["edit"], ShapeProfile(manifest, ranges)


def test_a_graph_is_compiled_for_the_profile_and_saved(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    made, (graph, profile) = package(monkeypatch), arguments()
    program: Any = "program"
    write_compiled(program, graph, profile, tmp_path / "edit.pt2", optimization_level=3)
    [call], [saved] = made.dynamo.compile.calls, made.save.calls
    assert (call["exported_program"], call["arg_inputs"]) == ("program", ())
    assert call["optimization_level"] == 3
    assert list(call["kwarg_inputs"]) == [value["name"] for value in graph["inputs"]]
    latent = call["kwarg_inputs"]["hidden_states"]
    [width] = [v["dims"][1] for v in graph["inputs"] if v["name"] == "hidden_states"]
    assert (latent.min_shape, latent.opt_shape, latent.max_shape) == (
        (2, width),
        (10, width),
        (16, width),
    )
    assert latent.dtype == torch.float32
    assert (saved["module"], saved["output_format"]) == ("compiled", "exported_program")
    assert saved["file_path"] == str(tmp_path / "edit.pt2")


def test_unknown_settings_and_formats_are_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    package(monkeypatch)
    graph, profile = arguments()
    program: Any = "program"
    with pytest.raises(InputError, match=r"no settings \['colour'\]; it has \['device'"):
        write_compiled(program, graph, profile, tmp_path / "a", colour=1)
    with pytest.raises(InputError, match="no settings \\['inputs'\\]"):
        write_compiled(program, graph, profile, tmp_path / "a", inputs=1)
    with pytest.raises(InputError, match="format='onnx'; choose one of pt2, aoti"):
        write_compiled(program, graph, profile, tmp_path / "a", "onnx")


def test_without_the_package_the_extra_and_the_torch_version_are_named(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setitem(sys.modules, "torch_tensorrt", None)
    with pytest.raises(MissingRequest, match=r"maskfx\[torch-tensorrt\], whose version 2\.\d+ is"):
        import_torch_tensorrt()


def test_the_format_compiles_each_graph_and_runs_what_was_saved(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    """Compiling is left out, so that the files are the programs themselves."""
    made = package(monkeypatch)
    monkeypatch.setattr(made.dynamo, "compile", lambda program, **_: program)
    monkeypatch.setattr(made, "save", lambda program, path, **_: torch.export.save(program, path))
    ranges = ("rows=4:16:64", "requests=1:1:4")
    export(
        tiny(),
        tmp_path / "x",
        format="torch_tensorrt",
        part="record",
        example_inputs=arguments_of_tiny(),
        verify=False,
        profile=ranges,
    )
    assert {path.name for path in (tmp_path / "x").glob("*.pt2")} == {
        "record.trt.pt2",
        "side_request.trt.pt2",
    }
    denoiser = ExportedDenoiser(tiny(), tmp_path / "x", compares=False)
    output, _ = denoiser.record(**arguments_of_tiny())
    assert error(output, tiny()(**arguments_of_tiny())) < 1e-4
    monkeypatch.setitem(sys.modules, "torch_tensorrt", None)
    other = ExportedDenoiser(tiny(), tmp_path / "x", compares=False)
    with pytest.raises(InputError, match=r"torch_tensorrt, .*pip install 'maskfx\[torch-tensorrt"):
        other.record(**arguments_of_tiny())


def test_the_format_is_refused_before_any_work_without_the_package(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    monkeypatch.setitem(sys.modules, "torch_tensorrt", None)
    with pytest.raises(MissingRequest, match=r"install maskfx\[torch-tensorrt\]"):
        export(tiny(), tmp_path / "x", format="torch_tensorrt")
