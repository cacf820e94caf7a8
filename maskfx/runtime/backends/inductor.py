"""Compiles a rewritten graph with Inductor, once for all batches.

The graph is exported with a separate symbol for each input's first dimension and compiled for
these symbols, without guards: masks, sizes and numbers of requests are data.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
import torch._inductor as inductor
import torch._inductor.config as inductor_config
from torch import Tensor, fx
from torch._dynamo.source import ConstantSource
from torch._inductor.cpu_vec_isa import pick_vec_isa
from torch._inductor.standalone_compile import CompiledArtifact
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv

from maskfx import ops
from maskfx.compiler.pieces import Also, Piece, cut
from maskfx.compiler.rows_export import export_rows
from maskfx.config import Settings
from maskfx.ir.programs.program import Program
from maskfx.runtime.backends.graph_function import Fetch, Run
from maskfx.runtime.backends.pieces import PieceRunner, at_inputs

if TYPE_CHECKING:
    import sympy

log = logging.getLogger(__name__)
aten = torch.ops.aten
compiles = 0


def compile_rows(
    program: Program,
    module: fx.GraphModule,
    settings: Settings,
    inputs: Sequence[Tensor],
    waited: Collection[str] = (),
) -> Run:
    """Compile a program; the result fetches its inputs by name and accepts any number of rows.

    Args:
        program: the program.
        module: its graph.
        settings: how the denoiser was compiled.
        inputs: an example of each input.
        waited: inputs that may arrive while the graph runs. The graph is cut at their first
            readers, because compiled code takes all its inputs at its start.
    """
    global compiles
    compiles += 1
    with configured(inputs, freezing=settings.prepack):
        exported = exported_rows(program, module, inputs)
        try:
            pieces = cut(exported, at_inputs(exported, waited), sizes_behind(exported))
            return PieceRunner(pieces, compile_piece)
        except Exception as error:
            if not waited:
                raise
            log.warning("compiled as a whole, which waits for all loads first: %s", error)
        return compile_rows(program, module, settings, inputs)


@contextmanager
def configured(inputs: Sequence[Tensor], freezing: bool) -> Iterator[None]:
    """Let Inductor compile graphs for any number of rows, for the device of their inputs."""
    on_cpu = all(value.device.type == "cpu" for value in inputs)
    with (
        torch.no_grad(),
        # blocks of the same graph share code; names of their symbols don't exist outside of each
        inductor_config.patch(
            {
                "freezing": freezing,
                "unsafe_skip_cache_dynamic_shape_guards": True,
                **({"cpp.simdlen": vector_bits()} if on_cpu else {}),
            }
        ),
    ):
        yield


@cache
def vector_bits() -> int:
    """Return the width of the vectors that code for the CPU computes with; 1 without vectors.

    Inductor's key of compiled code holds its settings, but not what it found of the processor: if
    this isn't a setting, code of a process that found no vectors is reused by others.
    """
    found = pick_vec_isa()
    if found:
        return int(found.bit_width())
    if torch.backends.cpu.get_cpu_capability() != "DEFAULT":
        log.warning(
            "Inductor's test of vector instructions failed, though this processor has them: its "
            "code is slower. Does the C++ compiler work, and does a file beside the "
            "started script have the name of a standard module?"
        )
    return 1


def exported_rows(
    program: Program, graph: fx.GraphModule, inputs: Sequence[Tensor]
) -> fx.GraphModule:
    """Return a program's graph with symbolic numbers of rows, whose inputs have their names."""
    given = dict(zip(program.interface.inputs, inputs, strict=True))
    named = {str(node.target): given[str(node.target)] for node in placeholders(graph)}
    module = export_rows(program, with_fusible_norms(graph), named).module(check_guards=False)
    assert isinstance(module, fx.GraphModule)
    for node, name in zip(placeholders(module), named, strict=True):
        node.target = name
    return module


def placeholders(module: fx.GraphModule) -> list[fx.Node]:
    return list(module.graph.find_nodes(op="placeholder"))


def sizes_behind(module: fx.GraphModule) -> Also:
    """Return, for `cut`, a function that finds the sizes a piece needs beside its values.

    Inductor wants each symbol of a piece's sizes as a size of its own: for a value of `a + b` rows
    it wants `a` and `b`. An exported graph's symbols are sizes of its inputs.
    """
    sizes: dict[sympy.Symbol, fx.Node] = {}
    read = [(node, place) for node in module.graph.nodes for place in inputs_of(node)]
    for node, place in read:
        for axis, size in enumerate(place.meta["val"].shape):
            symbol = plain_symbol(size)
            if symbol is not None and symbol not in sizes:
                with module.graph.inserting_after(node):  # in the piece that reads the input
                    sizes[symbol] = module.graph.call_function(aten.sym_size.int, (place, axis))
                sizes[symbol].meta["val"] = size

    def also(taken: Sequence[fx.Node]) -> list[fx.Node]:
        values = [node.meta["val"] for node in taken]
        known = {plain_symbol(size) for value in values for size in shape_of(value)}
        missing = {symbol for value in values for _, symbol in symbols_in(value)} - known
        return [node for symbol, node in sizes.items() if symbol in missing]

    return also


def inputs_of(node: fx.Node) -> list[fx.Node]:
    return [n for n in node.all_input_nodes if n.op == "placeholder"]


def shape_of(value: object) -> Sequence[object]:
    """Return a tensor's sizes, or the number itself."""
    return value.shape if isinstance(value, Tensor) else (value,)


def symbols_in(value: object) -> list[tuple[ShapeEnv, sympy.Symbol]]:
    """Return the symbols in a value's sizes and strides, each with its environment."""
    numbers = (*value.shape, *value.stride()) if isinstance(value, Tensor) else (value,)
    nodes = [n.node for n in numbers if isinstance(n, torch.SymInt)]
    return [
        (node.shape_env, symbol)
        for node in nodes
        for symbol in sorted(node.expr.free_symbols, key=str)
    ]


def plain_symbol(size: object) -> sympy.Symbol | None:
    """Return the symbol that a size is, or None for a number or an expression."""
    expr = size.node.expr if isinstance(size, torch.SymInt) else None
    return expr if expr is not None and expr.is_Symbol else None


def compile_piece(piece: Piece) -> Run:
    """Compile one piece for inputs whose sizes are related as in the graph it was cut from."""
    mode, inputs = fresh_fakes([node.meta["val"] for node in placeholders(piece.module)])
    # of a class that is cached on disk
    module = fx.GraphModule(piece.module, piece.module.graph)
    # else it copies the weights, and sees no changes of them; packed ones are copies anyway
    artifact = compiled(module, mode, inputs, donated=not inductor_config.freezing)
    names = [*piece.values, *piece.inputs]

    def run(fetch: Fetch) -> object:
        with torch.no_grad():
            return artifact(*map(fetch, names))

    return run


def compiled(
    module: fx.GraphModule, mode: FakeTensorMode, inputs: Sequence[Any], donated: bool
) -> CompiledArtifact:
    """Compile a graph for fake inputs of a mode."""
    for node in module.graph.output_node().all_input_nodes:
        node.meta["example_value"] = mode.from_tensor(torch.empty(()))  # names the mode to Inductor
    return inductor.standalone_compile(
        module, list(inputs), dynamic_shapes="from_graph", donate_graph_module=donated
    )


def fresh_fakes(values: Sequence[object]) -> tuple[FakeTensorMode, list[Any]]:
    """Return copies of fake values with new symbols in place of the old ones, and their mode.

    The conditions that the export found on the old symbols don't hold for the copies.
    """
    shapes = ShapeEnv(duck_shape=False)
    mode = FakeTensorMode(shape_env=shapes)
    symbols: dict[sympy.Symbol, sympy.Symbol] = {}
    hints: dict[sympy.Symbol, int] = {}
    for known, symbol in (pair for value in values for pair in symbols_in(value)):
        if symbol not in symbols:
            source = ConstantSource(f"size_{len(symbols)}")
            hint = int(known.backed_var_to_val[symbol])
            symbols[symbol] = shapes.create_symbol(hint, source, DimDynamic.DYNAMIC)
            hints[symbols[symbol]] = hint

    def renewed(size: object) -> Any:
        if not isinstance(size, torch.SymInt):
            return size
        expr = size.node.expr.xreplace(symbols)
        return shapes.create_symintnode(expr, hint=int(expr.xreplace(hints)))

    def copy_of(value: object) -> object:
        if not isinstance(value, Tensor):
            return renewed(value)
        shape, stride = map(renewed, value.shape), map(renewed, value.stride())
        with mode:
            return torch.empty_strided(
                tuple(shape), tuple(stride), dtype=value.dtype, device=value.device
            )

    return mode, [copy_of(value) for value in values]


def with_fusible_norms(module: fx.GraphModule) -> fx.GraphModule:
    """Expand the second half of each group norm, so that Inductor fuses it with what follows."""
    graph = fx.Graph()
    graph.output(graph.graph_copy(module.graph, {}))
    for node in graph.find_nodes(op="call_function", target=ops.scale_shift):
        rows, scales, owner = node.args
        with graph.inserting_before(node):
            halves = [graph.call_function(aten.select.int, (scales, 1, i)) for i in (0, 1)]
            scale, shift = (graph.call_function(aten.index_select, (h, 0, owner)) for h in halves)
            wide = graph.call_function(aten.addcmul.default, (shift, rows, scale))
            narrow = graph.call_function(aten.type_as.default, (wide, rows))
        node.replace_all_uses_with(narrow)
        graph.erase_node(node)
    return fx.GraphModule(module, graph)
