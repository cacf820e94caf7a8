"""ExportedDenoiser: a compiled denoiser whose graphs and weights are in exported files.

Pipelines and the engine use it as any other `CompiledDenoiser`: it records, edits and runs dense.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from maskfx.compiler.artifact.artifact import load
from maskfx.compiler.artifact.graphs import weights_of
from maskfx.compiler.capture.arguments import roles as roles_
from maskfx.compiler.capture.arguments.infer_roles import infer
from maskfx.compiler.capture.arguments.roles import Roles, Sizes
from maskfx.compiler.capture.captured import Capture, groups_of, joined
from maskfx.compiler.compile import Compilation
from maskfx.config import Settings
from maskfx.errors import InputError
from maskfx.export.graph_set import GraphSet
from maskfx.export.graphs import lowered
from maskfx.export.manifest import read_manifest
from maskfx.ir.listed import Join, count_listed
from maskfx.ir.programs.program import KEYS, STRETCH, SideGraph
from maskfx.ir.values import is_wrapped
from maskfx.runtime.cache.loader import Loader
from maskfx.runtime.denoiser import CompiledDenoiser
from maskfx.runtime.programs.program_cache import ProgramCache
from maskfx.runtime.validation.sample_arguments import SampleArguments, join_results
from maskfx.runtime.validation.validate import expand_timesteps
from maskfx.runtime.weights import Weights

PROGRAM = "program.maskfx"  # the compiled program, without its weights


class ExportedDenoiser(CompiledDenoiser):
    """Runs a denoiser from a directory that `maskfx.export` wrote.

    Args:
        module: the denoiser; of its weights only names and shapes are used.
        directory: the exported denoiser.
        settings: what it is used for; how its program was compiled is in the directory.
        loader: see `CompiledDenoiser`.
        compares: compare edits with the dense graph, once at each new size, if there is one.
    """

    def __init__(
        self,
        module: nn.Module,
        directory: str | Path,
        settings: Settings | None = None,
        loader: Loader | None = None,
        compares: bool = True,
    ) -> None:
        self.directory, self._compares = Path(directory), compares
        self.graphs = GraphSet(self.directory, read_manifest(self.directory))
        self.compilation, self.capture = read_compilation(module, self.graphs)
        how = settings_of(settings or Settings(), self.compilation)
        super().__init__(module, how, loader=loader)
        self._executor.graphs.run_by(self.graphs.runner)
        self._arguments = SampleArguments()

    def __reduce_ex__(self, protocol: object) -> Any:
        """Return what deep copies and pickles are made from: they open the same files."""
        settings, loader, _ = self.compiled_with
        return type(self), (self.module, self.directory, settings, loader, self._compares)

    def _find_weights(self) -> Weights:
        return Weights(self.module, str(self.graphs.manifest["weights"]))

    def _find_programs(self, roles: Mapping[str, Roles] | None) -> ProgramCache:
        return ExportedPrograms(
            self.module,
            self.settings,
            roles,
            self._executor,
            self._weights.fingerprint,
        ).holding(self.compilation, self._compares and self.graphs.has("dense"))

    def dense(self, inputs: Mapping[str, object]) -> Any:
        """Return what the denoiser's forward would, by the graph that computes all sites."""
        capture = self.capture
        given = expand_timesteps(inputs, self.module)
        paths, values, spec = roles_.flatten(given)
        if spec == capture.in_spec and capture.fits(values):
            return self._dense(values)
        parts = self._arguments.split(given, capture.leaves, batch_of(given, capture))
        calls = [roles_.flatten(part) for part in parts]
        if not calls or any(s != capture.in_spec or not capture.fits(v) for _, v, s in calls):
            raise InputError(
                f"{self.directory.name}: the exported graphs take the arguments "
                f"{[leaf.path for leaf in capture.leaves]} with the constants "
                f"{capture.named_constants()}, got {paths}; export the denoiser with these "
                "arguments"
            )
        how = Join(list if count_listed(given) else None)
        return join_results([self._dense(v) for _, v, _ in calls], how)

    def _dense(self, values: Sequence[Any]) -> Any:
        """Return what the captured graph computes of arguments that it serves."""
        capture = self.capture
        batch, own = capture.fixed_batch, roles_.observed_sizes(capture.leaves, values)["batch"]
        if batch is None or batch == own:
            return pytree.tree_unflatten(self._flat(values), capture.out_spec)
        runs = [self._flat(group) for group in groups_of(capture.leaves, values, batch)]
        flat = [
            joined(parts, parts[0].new_empty(own * len(parts[0]) // batch, *parts[0].shape[1:]))
            for parts in zip(*runs, strict=True)
        ]
        return pytree.tree_unflatten(flat, capture.out_spec)

    def _flat(self, values: Sequence[Any]) -> list[Tensor]:
        capture = self.capture
        assert capture.module is not None
        places = capture.module.graph.find_nodes(op="placeholder")
        given = {
            str(node.target): value
            for index, (node, value) in enumerate(zip(places, values, strict=True))
            if index not in capture.fixed
        }
        return self.graphs.run("dense", given)


def batch_of(inputs: Mapping[str, object], capture: Capture) -> int:
    """Return the number of samples of a call whose arguments are those of a capture; else 0."""
    paths, values, _ = roles_.flatten(inputs)
    if paths != [leaf.path for leaf in capture.leaves]:
        return 0
    return roles_.observed_sizes(capture.leaves, values)["batch"]


def settings_of(settings: Settings, compilation: Compilation) -> Settings:
    """Return the settings with what the exported program decides."""
    program = compilation.program
    kinds = set() if program is None else {r.kind for r in program.interface.regions}
    return replace(
        settings,
        inductor=False,
        prepack=False,
        programs=None,
        plans=KEYS in kinds,
        stretches=STRETCH in kinds,
    )


@dataclass
class ExportedCapture(Capture):
    """A capture whose graph is in a file: no comparison with the module decides what it serves."""

    def serves(
        self, module: nn.Module, spec: pytree.TreeSpec, values: Sequence[object], sizes: Sizes
    ) -> bool:
        return spec == self.in_spec and self.fits(values) and self._same_frozen(sizes)

    def fits(self, values: Sequence[object]) -> bool:
        """Return True if constants, branches and sizes without a role are those of the capture."""
        other = self._other_constants(values) or self._other_features(values)
        return not other and not self._decides_otherwise(values)

    def named_constants(self) -> dict[str, object]:
        return {self.leaves[index].path: value for index, value in self.constants.items()}


class ExportedPrograms(ProgramCache):
    """The one compilation of exported graphs; calls that it doesn't serve run dense."""

    def holding(self, compilation: Compilation, compares: bool) -> ExportedPrograms:
        """Hold a compilation; `compares` if there is a dense graph to compare its results with."""
        self._only, self._compares = compilation, compares
        self._add(compilation)
        return self

    def forget(self) -> None:
        super().forget()
        self._add(self._only)

    def _taken(
        self, inputs: dict[str, object], values: list[object], spec: pytree.TreeSpec, single: bool
    ) -> Compilation | None:
        return None

    def _compile(
        self, inputs: dict[str, object], values: list[object], single: bool
    ) -> Compilation:
        paths, _, spec = roles_.flatten(inputs)
        capture = Capture(
            module=None,
            leaves=infer(self.module, inputs, self.roles),
            in_spec=spec,
            out_spec=spec,
            pyramid=copy.deepcopy(self._only.capture.pyramid),
            constants={},
            features=[tuple(v.shape) if isinstance(v, Tensor) else () for v in values],
        )
        reason = f"the exported graphs were made for other arguments or sizes than {paths}"
        return Compilation(capture, None, None, None, {"capture": reason})

    def _proven(
        self, compilation: Compilation, values: list[object], spec: pytree.TreeSpec
    ) -> Compilation:
        return super()._proven(compilation, values, spec) if self._compares else compilation


def read_compilation(module: nn.Module, graphs: GraphSet) -> tuple[Compilation, ExportedCapture]:
    """Return the compilation of a directory, its side graphs run from their files."""
    weights = {
        name: value if is_wrapped(value) else torch.empty_like(value, device="meta")
        for name, value in weights_of(module).items()
    }
    found = load(graphs.directory / PROGRAM, weights, module)
    edit = graphs.manifest["graphs"].get("edit") or graphs.manifest["graphs"].get("record")
    names = [value["name"] for value in edit["inputs"]] if edit else []
    if found.program is not None and names != list(found.program.interface.inputs):
        found = lowered(found)
    capture = ExportedCapture(**{f.name: getattr(found.capture, f.name) for f in fields(Capture)})
    assert capture.module is not None
    arguments = [str(n.target) for n in capture.module.graph.find_nodes(op="placeholder")]
    whole = replace(
        found,
        capture=capture,
        request=side_of(found.request, arguments, graphs, "side_request"),
        dense=side_of(found.dense, arguments, graphs, "side_dense"),
    )
    return whole, capture


class FileCall(nn.Module):
    """Calls a graph in a file."""

    def __init__(self, graphs: GraphSet, name: str, names: Sequence[str]) -> None:
        super().__init__()
        self.graphs, self.name, self.names = graphs, name, names

    def forward(self, *values: Tensor | int) -> list[Tensor]:
        return self.graphs.run(self.name, dict(zip(self.names, values, strict=True)))


def side_of(
    side: SideGraph | None, names: Sequence[str], graphs: GraphSet, name: str
) -> SideGraph | None:
    """Return a side graph that calls the one in its file, if it computes anything."""
    if side is None or not side.lanes:
        return side
    root, graph = nn.Module(), fx.Graph()
    used = [names[index] for index in side.used]
    root.add_module("file", FileCall(graphs, name, used))
    places = [graph.placeholder(each) for each in names]
    made = graph.call_module("file", tuple(places[index] for index in side.used))
    graph.output(made)
    return replace(side, module=fx.GraphModule(root, graph))
