"""Compiles exported programs by Torch-TensorRT, for deployments that have PyTorch and a GPU.

The settings are those of `torch_tensorrt.dynamo.compile`, under the same names. The adapter follows
the signature of version 2.13; it never ran, since the package's libraries don't install without
NVIDIA's own package index. Engines are for one type of GPU.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

import torch
from torch.export import ExportedProgram

from maskfx.errors import InputError, MissingRequest
from maskfx.export.manifest import read_manifest, write_manifest
from maskfx.export.profiles import Range, ShapeProfile
from maskfx.ir.json_values import Document

if TYPE_CHECKING:
    import torch_tensorrt

COMPILED, SUFFIX = "torch_tensorrt", ".trt.pt2"  # the format's name, and its files' ending
OWN = ("exported_program", "inputs", "arg_inputs", "kwarg_inputs")  # settings that maskfx gives
FORMATS = {"pt2": "exported_program", "aoti": "aot_inductor"}  # what `save` calls its formats


def import_torch_tensorrt() -> ModuleType:
    """Return the module torch_tensorrt; raise MissingRequest that names the extra."""
    try:
        return import_module("torch_tensorrt")
    except ImportError as error:
        release = ".".join(torch.__version__.split(".")[:2])
        raise MissingRequest(
            f"torch_tensorrt can't be imported ({error}); install maskfx[torch-tensorrt], whose "
            f"version {release} is made for the torch {torch.__version__} here, on a machine with "
            "an NVIDIA GPU"
        ) from error


def replace_by_compiled(folder: Path, ranges: Mapping[str, Range]) -> None:
    """Compile each saved program of an exported denoiser, and drop the programs."""
    manifest = dict(read_manifest(folder))
    profile, graphs = ShapeProfile(manifest, ranges), {}
    for name, graph in manifest["graphs"].items():
        plain, compiled = folder / graph["file"], folder / f"{name}{SUFFIX}"
        write_compiled(torch.export.load(plain), graph, profile, compiled)
        plain.unlink()
        graphs[name] = {**graph, "file": compiled.name}
    write_manifest({**manifest, "graphs": graphs}, folder)


def write_compiled(
    program: ExportedProgram,
    graph: Document,
    profile: ShapeProfile,
    path: Path,
    format: str = "pt2",
    **settings: object,
) -> None:
    """Compile an exported graph and save it.

    Args:
        program: the graph as torch.export has it, with its inputs by name.
        graph: the graph in the manifest.
        profile: the ranges of its dimensions.
        path: the file to write.
        format: "pt2" or "aoti".
        settings: those of `torch_tensorrt.dynamo.compile`.
    """
    if format not in FORMATS:
        raise InputError(f"torch_tensorrt: format={format!r}; choose one of {', '.join(FORMATS)}")
    package = import_torch_tensorrt()
    check_settings(package.dynamo.compile, settings)
    inputs = {value["name"]: input_of(package, profile, value) for value in graph["inputs"]}
    compiled = package.dynamo.compile(program, arg_inputs=(), kwarg_inputs=inputs, **settings)
    package.save(
        compiled,
        str(path),
        output_format=FORMATS[format],
        arg_inputs=(),
        kwarg_inputs=inputs,
        retrace=False,
    )


def check_settings(compiles: Callable[..., object], settings: Mapping[str, object]) -> None:
    """Raise InputError for settings that this version of Torch-TensorRT doesn't have."""
    parameters = inspect.signature(compiles).parameters.values()
    known = [p.name for p in parameters if p.kind is not p.VAR_KEYWORD and p.name not in OWN]
    unknown = sorted(settings.keys() - set(known))
    if unknown:
        raise InputError(f"torch_tensorrt: it has no settings {unknown}; it has {known}")


def input_of(package: ModuleType, profile: ShapeProfile, value: Document) -> torch_tensorrt.Input:
    """Return an input's ranges and type as Torch-TensorRT takes them."""
    least, usual, most = profile.shapes(value["dims"])
    dtype, name = getattr(torch, value["dtype"]), value["name"]
    if least == most:
        return package.Input(shape=usual, dtype=dtype, name=name)
    return package.Input(min_shape=least, opt_shape=usual, max_shape=most, dtype=dtype, name=name)
