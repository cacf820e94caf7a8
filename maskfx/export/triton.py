"""Writes an exported denoiser as a model repository of the Triton Inference Server.

Each graph is one model of the repository, described by a `config.pbtxt` made from the manifest.
Triton batches nothing: the rows of several calls are one batch already, which the host made.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from maskfx.errors import InputError
from maskfx.export.manifest import NAME, read_manifest
from maskfx.ir.json_values import Document

VERSION = "1"  # the folder of a model's files
TYPES = {
    "float64": "TYPE_FP64",
    "float32": "TYPE_FP32",
    "float16": "TYPE_FP16",
    "bfloat16": "TYPE_BF16",
    "int64": "TYPE_INT64",
    "int32": "TYPE_INT32",
    "int16": "TYPE_INT16",
    "int8": "TYPE_INT8",
    "uint8": "TYPE_UINT8",
    "bool": "TYPE_BOOL",
}
# by the ending of a graph's file: the setting that names what runs it, and the file's name there
RUNS = {
    ".onnx": ('backend: "onnxruntime"', "model.onnx"),
    ".engine": ('platform: "tensorrt_plan"', "model.plan"),
}


def write_repository(exported: str | Path, repository: str | Path, name: str) -> list[Path]:
    """Write one model for each graph of an exported denoiser; return their folders.

    Files are linked where the file system allows it, and copied elsewhere.

    Args:
        exported: the directory of the exported denoiser.
        repository: the model repository; models of other names in it stay.
        name: what the models are called: NAME_edit, NAME_record and so on.
    """
    source, root = Path(exported), Path(repository)
    manifest = read_manifest(source)
    if not name.replace("_", "").replace("-", "").isalnum():
        raise InputError(f"triton: the name {name!r} has other signs than letters, digits, - and _")
    made = [(graph, root / f"{name}_{graph}") for graph in manifest["graphs"]]
    for graph, folder in made:
        if folder.exists():
            raise InputError(f"triton: {folder} exists; remove it or choose another name")
        runs_of(source, manifest, graph)
    for graph, folder in made:
        try:
            write_model(source, manifest, graph, folder)
        except BaseException:
            for _, half in made:
                shutil.rmtree(half, ignore_errors=True)
            raise
    link(source / NAME, root / f"{name}_{NAME}")
    return [folder for _, folder in made]


def write_model(source: Path, manifest: Document, graph: str, folder: Path) -> None:
    """Write the folder of one graph: its configuration, its file and what that refers to."""
    setting, file_name = runs_of(source, manifest, graph)
    files = folder / VERSION
    files.mkdir(parents=True)
    link(source / manifest["graphs"][graph]["file"], files / file_name)
    for weights in source.glob("*.data"):  # ONNX: weights of all graphs
        link(weights, files / weights.name)
    text = "\n".join(config_lines(folder.name, setting, manifest["graphs"][graph]))
    (folder / "config.pbtxt").write_text(text + "\n", encoding="utf-8")


def runs_of(source: Path, manifest: Document, graph: str) -> tuple[str, str]:
    """Return the setting that names what runs a graph, and the name of its file."""
    file = manifest["graphs"][graph]["file"]
    if file is None or not (source / file).is_file():
        raise InputError(f"triton: {source} holds no file of the graph {graph!r}; export it again")
    values = (*manifest["graphs"][graph]["inputs"], *manifest["graphs"][graph]["outputs"])
    for value in values:
        if value["dtype"] not in TYPES:
            raise InputError(
                f"triton: {value['name']} of the graph {graph!r} is {value['dtype']}, which Triton "
                "doesn't have; run the exported graphs without it"
            )
    ending = Path(file).suffix
    if ending not in RUNS:
        raise InputError(
            f"triton: no backend of Triton runs {file}; export the denoiser with format onnx or "
            "tensorrt"
        )
    return RUNS[ending]


def config_lines(name: str, setting: str, graph: Document) -> Iterator[str]:
    """Yield the lines of a model's configuration."""
    yield f'name: "{name}"'
    yield setting
    yield "max_batch_size: 0  # the rows of several calls are one batch already"
    for side, values in (("input", graph["inputs"]), ("output", graph["outputs"])):
        for value in values:
            yield from value_lines(side, value)


def value_lines(side: str, value: Document) -> Iterator[str]:
    dims = [-1 if isinstance(dim, str) else dim for dim in value["dims"]]
    yield f"{side} {{"
    yield f'  name: "{value["name"]}"'
    yield f"  data_type: {TYPES[value['dtype']]}"
    yield f"  dims: {dims or [1]}"
    if not dims:
        yield "  reshape: { shape: [] }"
    yield "}"


def link(source: Path, target: Path) -> None:
    """Link a file under another name, or copy it."""
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)
