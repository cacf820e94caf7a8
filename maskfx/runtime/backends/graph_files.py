"""Graphs in files, run by the runtimes that they were exported for.

Each class runs the graphs of one format; a graph takes its inputs by name and returns a flat list.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Protocol

import torch
import torch.utils.dlpack
from torch import Tensor
from torch.utils import _pytree as pytree

from maskfx.errors import InputError


class GraphFile(Protocol):
    """One graph, ready to run."""

    def __call__(self, inputs: Mapping[str, Tensor]) -> list[Tensor]: ...


def open_graph(kind: str, path: Path) -> GraphFile:
    """Return the graph in a file of this format ("onnx", "aoti", "pt2" or "torch_tensorrt")."""
    if not path.exists():
        raise InputError(f"{path} is missing; export the denoiser again, with this part")
    try:
        return FORMATS[kind](path)
    except InputError:
        raise
    except Exception as error:
        raise InputError(
            f"{path} can't be opened as {kind}: {type(error).__name__}: {error}; run it with the "
            "versions that its manifest names, or export the denoiser again"
        ) from error


class PackagedGraph:
    """A graph that AOTInductor compiled."""

    def __init__(self, path: Path) -> None:
        from torch._inductor import aoti_load_package

        self._run = aoti_load_package(str(path))

    def __call__(self, inputs: Mapping[str, Tensor]) -> list[Tensor]:
        with torch.no_grad():
            return pytree.tree_leaves(self._run(**inputs))


class SavedProgram:
    """A graph that torch.export saved, run operator by operator."""

    def __init__(self, path: Path) -> None:
        self._run = torch.export.load(path).module()

    def __call__(self, inputs: Mapping[str, Tensor]) -> list[Tensor]:
        with torch.no_grad():
            return pytree.tree_leaves(self._run(**inputs))


class CompiledProgram(SavedProgram):
    """A graph that Torch-TensorRT compiled; its engines' class is in that package."""

    def __init__(self, path: Path) -> None:
        imported("torch_tensorrt", "torch-tensorrt")
        super().__init__(path)


class OnnxGraph:
    """A graph that onnxruntime runs, on CUDA where its provider is installed."""

    def __init__(self, path: Path) -> None:
        runtime = imported("onnxruntime")
        wanted = ("CUDAExecutionProvider", "CPUExecutionProvider")
        there = [name for name in wanted if name in runtime.get_available_providers()]
        options = runtime.SessionOptions()
        options.intra_op_num_threads = torch.get_num_threads()
        # spinning threads would take the cores on which PyTorch's operators run in between
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        self._session = runtime.InferenceSession(str(path), options, providers=there)
        self._value = runtime.OrtValue
        self._outputs = [output.name for output in self._session.get_outputs()]
        self._inputs = [value.name for value in self._session.get_inputs()]

    def __call__(self, inputs: Mapping[str, Tensor]) -> list[Tensor]:
        given = {name: self._given(inputs[name]) for name in self._inputs}
        found = self._session.run_with_ort_values(self._outputs, given)
        return [torch.utils.dlpack.from_dlpack(value._ortvalue) for value in found]

    def _given(self, value: Tensor) -> object:
        value = value.detach().contiguous()
        if value.dtype == torch.bfloat16:  # which NumPy doesn't have
            bits = value.cpu().view(torch.uint16).numpy()
            return self._value.ortvalue_from_numpy_with_onnx_type(bits, BFLOAT16)
        return self._value.ortvalue_from_numpy(value.cpu().numpy())


BFLOAT16 = 16  # in onnx's TensorProto
FORMATS: dict[str, Callable[[Path], GraphFile]] = {
    "onnx": OnnxGraph,
    "aoti": PackagedGraph,
    "pt2": SavedProgram,
    "torch_tensorrt": CompiledProgram,
}


def imported(name: str, extra: str = "export") -> ModuleType:
    """Import a package of an extra."""
    try:
        return import_module(name)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != name:
            raise
        raise InputError(
            f"this format needs the package {name}, which isn't installed; install it with: "
            f"pip install 'maskfx[{extra}]'"
        ) from error


__all__ = ["GraphFile", "imported", "open_graph"]
