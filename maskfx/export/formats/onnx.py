"""Writes graphs in ONNX, checked, with the weights of all graphs of a denoiser in one file."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import fx
from torch._ops import OperatorBase
from torch.export import ExportedProgram

from maskfx.errors import CompileError, InputError
from maskfx.export.formats.spellings import spell
from maskfx.export.formats.weight_data import WeightData
from maskfx.export.part_times import PartTimes
from maskfx.export.weight_files import WeightFiles
from maskfx.runtime.backends.graph_files import imported

if TYPE_CHECKING:
    import onnx_ir as ir

OPSET = 23  # the first with attention as one operator
OLDEST = 18
WEIGHTS = "weights.data"
LAYOUTS = ("Transpose", "Reshape")
SMALL = 1024  # bytes; smaller tensors stay in the graph


class OnnxWriter:
    """Writes the graphs of one directory; a weight that several graphs read is written once.

    Args:
        directory: where the graphs and their weights go.
        opset: of ONNX.
        files: where weights lie that are copied from files.
        times: where the time of each part is added.
    """

    def __init__(
        self,
        directory: Path,
        opset: int | None = None,
        files: WeightFiles | None = None,
        times: PartTimes | None = None,
    ) -> None:
        self._times = PartTimes() if times is None else times
        self.directory, self.opset = directory, OPSET if opset is None else opset
        check_opset(self.opset)
        self._onnx = imported("onnx")
        self._ir = imported("onnx_ir")
        self._passes = import_module("onnx_ir.passes.common")
        imported("onnxscript")
        self._optimizer = import_module("onnxscript.optimizer")
        self._weights = WeightData(directory / WEIGHTS, files)

    def write(self, program: ExportedProgram, results: Mapping[Path, Sequence[str]]) -> None:
        """Write one graph to files in the directory.

        Args:
            program: the graph.
            results: by file, the names of the results that the graph in it returns: all of them,
                then the first of them, fewer from file to file.
        """
        with self._times.of("translation to ONNX"):
            model = self._translated(program, next(iter(results)).name)
        for number, (path, names) in enumerate(results.items()):
            if number:
                keep_results(model.graph, len(names))
                self._passes.RemoveUnusedNodesPass()(model)
            else:
                self._name_results(model.graph, names)
                with self._times.of("weights"):
                    self._move_weights(model)
            with self._times.of("graphs and checker"):
                self._ir.save(model, path)
                self._onnx.checker.check_model(str(path), full_check=True)

    def _translated(self, program: ExportedProgram, name: str) -> ir.Model:
        """Return a graph as a model of onnx_ir, without what only its making needs."""
        inputs = list(program.graph_signature.user_inputs)
        spell(program)
        kind = type(program)
        with torch.no_grad(), quiet(), known_values():
            try:
                program.__class__ = Translatable
                model = self._translate(program, inputs)
            except torch.onnx.errors.OnnxExporterError:
                program.__class__ = kind  # decompose everything
                try:
                    model = self._translate(program, inputs)
                except torch.onnx.errors.OnnxExporterError as error:
                    raise CompileError(
                        f"export: {name}: an operator has no translation to ONNX: "
                        f"{first_line(error)}; export it as aoti or pt2"
                    ) from error
            self._simplify(model)
        return model

    def _translate(self, program: ExportedProgram, inputs: Sequence[str]) -> ir.Model:
        made = torch.onnx.export(
            program,
            (),
            dynamo=True,
            opset_version=self.opset,
            input_names=inputs,
            external_data=False,
            verbose=False,
            optimize=False,  # its rewriting takes longer than all the rest
        )
        assert made is not None, "it returns a program when it is given one"
        return made.model

    def _simplify(self, model: ir.Model) -> None:
        """Compute what is constant and drop what is there twice or read by nothing."""
        known = self._passes
        known.InlinePass()(model)
        self._optimizer.fold_constants(model, should_fold=folds)
        for each in (
            known.RemoveUnusedNodesPass(),
            known.RemoveUnusedFunctionsPass(),
            known.RemoveUnusedOpsetsPass(),
            known.LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0),
            known.LiftSubgraphInitializersToMainGraphPass(),
            known.DeduplicateInitializersPass(),
            known.CommonSubexpressionEliminationPass(),
            known.IdentityEliminationPass(),
            known.ClearMetadataAndDocStringPass(),
            known.NameFixPass(),
        ):
            each(model)

    def _name_results(self, graph: ir.Graph, names: Sequence[str]) -> None:
        """Give the results their names; other values that have one of them get another."""
        seen: set[int] = set()
        for place, value in enumerate(list(graph.outputs)):
            if id(value) in seen or value.producer() is None:
                same = self._ir.node("Identity", [value])
                same.outputs[0].shape, same.outputs[0].type = value.shape, value.type
                graph.append(same)
                graph.outputs[place] = same.outputs[0]
            seen.add(id(value))
        results = {id(value) for value in graph.outputs}
        for name in names:
            if name in graph.initializers:
                held = graph.initializers.pop(name)
                held.name = f"{name}_value"
                graph.register_initializer(held)
        for node in graph:
            for value in node.outputs:
                if id(value) not in results and value.name in names:
                    value.name = f"{value.name}_value"
        for value, name in zip(graph.outputs, names, strict=True):
            value.name = name

    def _move_weights(self, model: ir.Model) -> None:
        """Replace large tensors by references into the file of weights."""
        for value in model.graph.initializers.values():
            tensor = value.const_value
            if tensor is None or tensor.nbytes < SMALL:
                continue
            offset, length = self._weights.place(tensor)
            value.const_value = self._ir.ExternalTensor(
                WEIGHTS,
                offset,
                length,
                tensor.dtype,
                shape=tensor.shape,
                name=value.name,
                base_dir=self.directory,
            )


def check_opset(opset: int) -> None:
    """Raise InputError for a version of ONNX that can't be written or isn't known here."""
    newest = imported("onnx").defs.onnx_opset_version()
    if type(opset) is not int or not OLDEST <= opset <= newest:
        raise InputError(
            f"export: opset {opset!r}: PyTorch writes {OLDEST} and newer, and the onnx here knows "
            f"those up to {newest}; give one of these ({OPSET} is the first with attention as one "
            "operator)"
        )


class Translatable(ExportedProgram):
    """An exported program that is traced again only if an operator has no translation.

    `torch.onnx.export` decomposes every program. That traces the graph twice, which takes three
    times as long as its export, and most graphs have no operator that needs it.
    """

    def run_decompositions(
        self,
        decomp_table: Mapping[OperatorBase, Callable[..., object]] | None = None,
        **others: object,
    ) -> ExportedProgram:
        calls = [n.target for n in self.graph.nodes if n.op == "call_function"]
        writes = any(getattr(t, "_schema", None) and t._schema.is_mutable for t in calls)
        if decomp_table is None or writes or any(target in decomp_table for target in calls):
            found: ExportedProgram = super().run_decompositions(decomp_table, **others)
            return found
        return self


@contextmanager
def quiet() -> Iterator[None]:
    """Silence what the exporter and the passes of onnx_ir report about themselves."""
    logs = [logging.getLogger(name) for name in ("torch.onnx", "onnx_ir")]
    before = [log.level for log in logs]
    for log in logs:
        log.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for log, level in zip(logs, before, strict=True):
            log.setLevel(level)


@contextmanager
def known_values() -> Iterator[None]:
    """Let the exporter's pass that inserts casts read the values that torch.export found.

    It runs every operator on fake tensors, once more, to find them.
    """
    pass_ = import_module("torch.onnx._internal.fx.passes.type_promotion")
    interpreter: Any = getattr(pass_, "_TypePromotionInterpreter", None)
    if not hasattr(interpreter, "_maybe_promote_node"):  # another version of PyTorch
        yield
        return
    run = interpreter.run_node

    def run_known(self: Any, node: fx.Node) -> object:
        if node.op != "call_function" or "val" not in node.meta:
            return run(self, node)
        with self._set_current_node(node):
            if rule := pass_.get_type_promotion_rule(node, self.type_promotion_table):
                self._maybe_promote_node(node, rule)
        return node.meta["val"]

    interpreter.run_node = run_known
    try:
        yield
    finally:
        interpreter.run_node = run


def folds(node: ir.Node) -> bool | None:
    """Return False for a weight in another layout, and None for nodes that are folded by size.

    Runtimes change the layout when they load a graph. Folded here, a weight would be written once
    for each layout.
    """
    values = [value.const_value for value in node.inputs if value is not None]
    weighs = any(value is not None and value.nbytes >= SMALL for value in values)
    return False if weighs and node.op_type in LAYOUTS else None


def keep_results(graph: ir.Graph, count: int) -> None:
    """Let a graph return only the first of its results."""
    while len(graph.outputs) > count:
        graph.outputs.pop()


def first_line(error: BaseException) -> str:
    cause: BaseException = error
    while cause.__cause__ is not None:
        cause = cause.__cause__
    return (str(cause).strip().splitlines() or [type(cause).__name__])[0]
