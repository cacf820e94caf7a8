"""Model repositories of Triton: one model for each graph, described by its manifest."""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import Any

import pytest

from maskfx.errors import InputError
from maskfx.export.manifest import write_manifest
from maskfx.export.triton import write_repository
from tests.export.hosted import manifest_of
from tests.factories.zoo import ZOO

FLUX = "FluxTransformer2DModel"


def exported(folder: Path, ending: str = ".onnx") -> dict[str, Any]:
    """An exported denoiser whose files hold their names."""
    document = copy.deepcopy(manifest_of(FLUX, (), ZOO[FLUX].sizes[0], True))
    folder.mkdir()
    for name, graph in document["graphs"].items():
        graph["file"] = name + ending
        (folder / graph["file"]).write_text(name)
    (folder / "weights.data").write_text("weights")
    write_manifest(document, folder)
    return document


def read_text(text: str) -> dict[str, list[Any]]:
    """A message of protobuf's text format, with every member as a list."""
    tokens = re.findall(r'"[^"]*"|[\w.-]+|[{}:\[\],]', re.sub(r"#.*", "", text))
    return read_message(tokens)


def read_message(tokens: list[str]) -> dict[str, list[Any]]:
    found: dict[str, list[Any]] = {}
    while tokens and tokens[0] != "}":
        name = tokens.pop(0)
        if tokens[0] == ":":
            tokens.pop(0)
        if tokens[0] == "{":
            tokens.pop(0)
            value: Any = read_message(tokens)
            assert tokens.pop(0) == "}"
        elif tokens[0] == "[":
            end = tokens.index("]")
            value = [int(token) for token in tokens[1:end] if token != ","]
            del tokens[: end + 1]
        else:
            value = tokens.pop(0).strip('"')
        found.setdefault(name, []).append(value)
    return found


def test_each_graph_is_a_model_with_its_inputs_and_outputs(tmp_path: Path):
    document = exported(tmp_path / "out")
    made = write_repository(tmp_path / "out", tmp_path / "models", "flux")
    assert [folder.name for folder in made] == [f"flux_{name}" for name in document["graphs"]]
    for folder, (name, graph) in zip(made, document["graphs"].items(), strict=True):
        config = read_text((folder / "config.pbtxt").read_text())
        assert config["name"] == [folder.name]
        assert config["backend"] == ["onnxruntime"]
        assert config["max_batch_size"] == ["0"]
        assert "dynamic_batching" not in config
        assert (folder / "1" / "model.onnx").read_text() == name
        assert (folder / "1" / "weights.data").read_text() == "weights"
        for side in ("input", "output"):
            found = config.get(side, [])
            values = graph[f"{side}s"]
            assert [value["name"] for value in found] == [[value["name"]] for value in values]
            for one, value in zip(found, values, strict=True):
                dims = [-1 if isinstance(dim, str) else dim for dim in value["dims"]]
                assert one["dims"] == [dims or [1]]
                assert ("reshape" in one) == (not dims)
                kind = {"float32": "TYPE_FP32", "int64": "TYPE_INT64", "bool": "TYPE_BOOL"}
                assert one["data_type"] == [kind[value["dtype"]]]
    assert (tmp_path / "models" / "flux_manifest.json").exists()


def test_engines_are_plans_of_tensorrt(tmp_path: Path):
    exported(tmp_path / "out", ".engine")
    [edit, *_] = write_repository(tmp_path / "out", tmp_path / "models", "flux")
    assert read_text((edit / "config.pbtxt").read_text())["platform"] == ["tensorrt_plan"]
    assert (edit / "1" / "model.plan").exists()


def test_what_triton_has_no_backend_for_is_refused_before_anything_is_written(tmp_path: Path):
    exported(tmp_path / "out", ".aoti.pt2")
    with pytest.raises(InputError, match=r"no backend of Triton runs edit\.aoti\.pt2"):
        write_repository(tmp_path / "out", tmp_path / "models", "flux")
    assert not (tmp_path / "models").exists()


def test_names_and_folders_that_can_not_be_are_refused(tmp_path: Path):
    exported(tmp_path / "out")
    with pytest.raises(InputError, match="has other signs than letters"):
        write_repository(tmp_path / "out", tmp_path / "models", "a/b")
    write_repository(tmp_path / "out", tmp_path / "models", "flux")
    with pytest.raises(InputError, match="flux_edit exists; remove it"):
        write_repository(tmp_path / "out", tmp_path / "models", "flux")


def test_a_missing_file_leaves_nothing_behind(tmp_path: Path):
    exported(tmp_path / "out")
    (tmp_path / "out" / "record.onnx").unlink()
    with pytest.raises(InputError, match="holds no file of the graph 'record'"):
        write_repository(tmp_path / "out", tmp_path / "models", "flux")
    assert not (tmp_path / "models").exists()
