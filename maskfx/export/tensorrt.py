"""Builds engines of TensorRT-RTX from exported ONNX graphs; no GPU is needed for that.

An engine is for one type. Attention stays one operator where TensorRT has a kernel for it (16 bits,
usual widths of heads); elsewhere it becomes several. Nothing of TensorRT is part of maskfx: its
licence forbids that, so the extra `tensorrt` installs it.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

from maskfx.errors import CompileError, InputError, MissingRequest
from maskfx.export.manifest import read_manifest, write_manifest
from maskfx.export.profiles import Range, ShapeProfile
from maskfx.ir.json_values import Document

if TYPE_CHECKING:
    import tensorrt_rtx

PACKAGE = "tensorrt_rtx"
ENGINES, SUFFIX = "tensorrt", ".engine"  # the format's name, and its files' ending


def import_tensorrt() -> ModuleType:
    """Return the module of TensorRT-RTX; raise MissingRequest that names the extra."""
    try:
        return import_module(PACKAGE)
    except ImportError as error:
        raise MissingRequest(
            f"tensorrt: the package {PACKAGE} can't be imported ({error}); install "
            "maskfx[tensorrt], NVIDIA's package under NVIDIA's licence"
        ) from error


def replace_by_engines(folder: Path, ranges: Mapping[str, Range]) -> None:
    """Build an engine from each ONNX graph of an exported denoiser; drop the graphs and weights."""
    manifest = dict(read_manifest(folder))
    profile, graphs = ShapeProfile(manifest, ranges), {}
    for name, graph in manifest["graphs"].items():
        engine = folder / f"{name}{SUFFIX}"
        build_engine(folder / graph["file"], graph, profile, engine)
        graphs[name] = {**graph, "file": engine.name}
    for left in (*folder.glob("*.onnx"), *folder.glob("*.data")):
        left.unlink()
    write_manifest({**manifest, "graphs": graphs}, folder)


def build_engine(
    onnx: Path, graph: Document, profile: ShapeProfile, engine: Path, level: int | None = None
) -> None:
    """Build an engine for an ONNX graph.

    Args:
        onnx: the file of the graph; its weights lie beside it.
        graph: the graph in the manifest.
        profile: the ranges of its dimensions.
        engine: the file to write.
        level: how much TensorRT searches while it builds, 0 to 5; by default its own choice.
    """
    trt = import_tensorrt()
    problems = Problems(trt)
    builder = trt.Builder(problems.logger)
    network = builder.create_network(1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
    parser = trt.OnnxParser(network, problems.logger)
    if not parser.parse_from_file(str(onnx)):
        errors = [parser.get_error(n).desc() for n in range(parser.num_errors)]
        raise CompileError(
            f"tensorrt: {onnx.name} has operators that TensorRT can't compile: "
            f"{'; '.join(errors[:3])}; export the denoiser as onnx, aoti or pt2"
        )
    allow_decomposition(trt, network)
    config = builder.create_builder_config()
    if level is not None:
        config.builder_optimization_level = level
    config.add_optimization_profile(shapes_of(builder, network, graph, profile))
    built = builder.build_serialized_network(network, config)
    if built is None:
        raise CompileError(
            f"tensorrt: no engine for {onnx.name}: {problems.text()}; narrow the profile, or "
            "export the graph as onnx"
        )
    engine.write_bytes(built)


def allow_decomposition(trt: ModuleType, network: tensorrt_rtx.INetworkDefinition) -> None:
    """Let attention become several operators where TensorRT has no kernel for its type or width."""
    for number in range(network.num_layers):
        layer = network.get_layer(number)
        if layer.type == trt.LayerType.ATTENTION_INPUT:
            layer.__class__ = trt.IAttentionInputLayer  # how TensorRT's layers are cast in Python
            layer.attention.decomposable = True


def shapes_of(
    builder: tensorrt_rtx.Builder,
    network: tensorrt_rtx.INetworkDefinition,
    graph: Document,
    profile: ShapeProfile,
) -> tensorrt_rtx.IOptimizationProfile:
    """Return TensorRT's profile: the least, usual and greatest shape of each input."""
    described = {value["name"]: value for value in graph["inputs"]}
    shapes = builder.create_optimization_profile()
    for number in range(network.num_inputs):
        name = network.get_input(number).name
        if name not in described:
            raise InputError(f"tensorrt: the graph reads {name!r}, which the manifest hasn't")
        least, usual, most = profile.shapes(described[name]["dims"])
        if least != most:
            shapes.set_shape(name, least, usual, most)
    return shapes


class Problems:
    """Keeps TensorRT's warnings and errors, for messages."""

    def __init__(self, trt: ModuleType) -> None:
        kept: list[str] = []

        class Logger(trt.ILogger):  # type: ignore[misc, name-defined]
            def log(self, severity: tensorrt_rtx.ILogger.Severity, text: str) -> None:
                if severity <= trt.ILogger.Severity.ERROR:
                    kept.append(text)

        self.logger, self._kept = Logger(), kept

    def text(self) -> str:
        return "; ".join(self._kept[-3:]) or "TensorRT gave no reason"
