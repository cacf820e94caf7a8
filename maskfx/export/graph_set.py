"""GraphSet: the exported graphs of one denoiser, opened when they are first run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from maskfx.errors import InputError
from maskfx.export.torch_tensorrt import SUFFIX
from maskfx.ir.json_values import Document
from maskfx.ir.programs.program import Program
from maskfx.ops.number_at import number_at
from maskfx.runtime.backends.graph_files import GraphFile, open_graph
from maskfx.runtime.backends.graph_function import Fetch, Run

ENDINGS = {"onnx": ".onnx", "aoti": ".aoti.pt2", "torch_tensorrt": SUFFIX, "pt2": ".pt2"}
PARTS_WITH = {"record": "record or all", "dense": "dense or all"}


class GraphSet:
    """Runs the graphs of a directory that `maskfx.export` wrote.

    Args:
        directory: where the files are.
        manifest: the manifest there.
    """

    def __init__(self, directory: Path, manifest: Document) -> None:
        self.directory, self.manifest = directory, manifest
        self._open: dict[str, GraphFile] = {}

    def has(self, name: str) -> bool:
        return name in self.manifest["graphs"]

    def run(self, name: str, inputs: Mapping[str, Tensor | int]) -> list[Tensor]:
        """Run a graph on inputs with the names, shapes and dtypes of the manifest.

        A number is given to the graph as the length of an input, as is one in a tensor.
        """
        if not self.has(name):
            part = PARTS_WITH.get(name, "masked or all")
            raise InputError(
                f"{self.directory} has no graph {name!r}; export the denoiser with part {part}"
            )
        if name not in self._open:
            file = str(self.manifest["graphs"][name]["file"])
            kind = next((k for k, ending in ENDINGS.items() if file.endswith(ending)), None)
            if kind is None:
                raise InputError(
                    f"{self.directory / file}: maskfx runs {', '.join(ENDINGS)}; run engines with "
                    "TensorRT's runtime and maskfx.export.host, or export the denoiser as onnx"
                )
            self._open[name] = open_graph(kind, self.directory / file)
        return self._open[name](self._checked(name, inputs))

    def runner(self, program: Program, recording: bool) -> Run:
        """Return what runs a program's graph, as `BatchExecutor` wants it."""
        names, results = list(program.interface.inputs), len(program.interface.outputs)

        def run(fetch: Fetch) -> object:
            inputs = {name: fetch(name) for name in names}
            flat = self.run("record" if recording else "edit", inputs)
            return (flat[:results], flat[results:]) if recording else flat

        return run

    def _checked(self, name: str, inputs: Mapping[str, Tensor | int]) -> dict[str, Tensor]:
        """Return the inputs of a graph; raise InputError, with its names, if they don't fit."""
        sizes: dict[str, int] = {}
        found = {}
        for value in self.manifest["graphs"][name]["inputs"]:
            place = f"{self.directory.name}: input {value['name']!r} of graph {name!r}"
            source = value["source"]
            if source["kind"] == "number_at":
                path = self.manifest["arguments"][source["index"]]["name"]
                tensor = torch.as_tensor(inputs["_".join(path.split("."))])
                side = number_at(tensor, source["place"], source["width"])
                inputs = {**inputs, value["name"]: side}
            if value["name"] not in inputs:
                raise InputError(f"{place} is missing; the inputs are {sorted(inputs)}")
            found_here = inputs[value["name"]]
            if isinstance(found_here, int):
                found_here = torch.zeros(found_here, dtype=torch.int64)
            given = as_dtype(found_here, getattr(torch, value["dtype"]), place)
            wrong = list(wrong_sizes(value["dims"], given.shape, sizes))
            if wrong or len(value["dims"]) != given.dim():
                raise InputError(
                    f"{place} has shape {list(given.shape)}, expected {value['dims']}"
                    + (f" with {', '.join(wrong)}" if wrong else "")
                    + "; the manifest states what each dimension counts"
                )
            found[value["name"]] = given
        return found


def wrong_sizes(
    dims: Sequence[int | str], shape: Sequence[int], sizes: dict[str, int]
) -> Iterator[str]:
    """Yield the dimensions whose size isn't theirs; sizes of names are noted in `sizes`."""
    for dim, size in zip(dims, shape, strict=False):
        wanted = sizes.setdefault(dim, size) if isinstance(dim, str) else dim
        if wanted != size:
            yield f"{dim} = {wanted}"


def as_dtype(value: Tensor, dtype: torch.dtype, place: str) -> Tensor:
    """Return the value in this dtype; raise InputError if numbers would change for that."""
    if value.dtype == dtype:
        return value
    if not dtype.is_floating_point:
        cast = value.to(dtype)
        if dtype == torch.bool or not torch.equal(cast.to(value.dtype), value):
            raise InputError(f"{place} is {value.dtype}, expected {dtype}; convert it")
        return cast
    if value.is_floating_point() and value.dim() > 1:
        raise InputError(f"{place} is {value.dtype}, expected {dtype}; convert it")
    return value.to(dtype)
