"""The facts of exported graphs that a manifest states: the source of each input, the outputs.

An exporter that lowers graphs (spans to owners) states those of the lowered ones; `compiled_graphs`
states those of the graphs as they were compiled.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, fx

from maskfx.compiler.capture.arguments.grid_numbers import axis_of
from maskfx.compiler.capture.captured import Capture
from maskfx.compiler.compile import Compilation
from maskfx.compiler.source_dtypes import dtype_of
from maskfx.errors import InputError
from maskfx.ir.geometry.cuts import piece_of
from maskfx.ir.geometry.lanes import Lane, Tokens, padded
from maskfx.ir.programs.program import Interface, SideGraph
from maskfx.ir.programs.sources import Given, Pairs, Source
from maskfx.ops.number_at import number_at


@dataclass(frozen=True)
class WholeArgument:
    """An argument in full, by its number among the flattened arguments."""

    index: int


@dataclass(frozen=True)
class ArgumentNumber:
    """The number at a place of a flattened argument, in units of `width`: a side of the picture."""

    index: int
    place: int
    width: int
    axis: str


AnySource = Source | WholeArgument | ArgumentNumber


@dataclass(frozen=True)
class GraphInput:
    """An input of a graph; the shape is used where the source doesn't determine it."""

    source: AnySource
    dtype: torch.dtype
    shape: tuple[int | None, ...] | None = None


@dataclass(frozen=True)
class GraphOutput:
    """A result of a graph: a value with a lane, or the rows of a tap."""

    name: str
    dtype: torch.dtype
    lane: Lane | None = None
    tap: str | None = None
    shape: tuple[int | None, ...] | None = None


@dataclass(frozen=True)
class GraphFacts:
    """One exported graph: its inputs by name, in order, and its outputs.

    Args:
        inputs: what each input is.
        outputs: the results in order.
        file: the name of the file that holds the graph, in the directory of the manifest.
    """

    inputs: Mapping[str, GraphInput]
    outputs: Sequence[GraphOutput]
    file: str | None = None


def compiled_graphs(compilation: Compilation) -> dict[str, GraphFacts]:
    """Return the graphs of a compilation; an exporter that lowers them gives others."""
    capture, program = compilation.capture, compilation.program
    graphs: dict[str, GraphFacts] = {}
    if program is not None:
        inputs = {
            str(node.target): program_input(compilation, program.interface, node)
            for node in program.module.graph.nodes
            if node.op == "placeholder"
        }
        assert capture.module is not None, "a program is made from a graph"
        pairs = zip(outputs_of(capture.module), program.interface.outputs, strict=True)
        results = [
            GraphOutput(f"output_{i}", node_value(node).dtype, lane)
            for i, (node, lane) in enumerate(pairs)
        ]
        taps = [GraphOutput(t.name, t.dtype, tap=t.name) for t in program.interface.taps.values()]
        graphs["edit"] = GraphFacts(inputs, results)
        graphs["record"] = GraphFacts(inputs, [*results, *taps])
    if capture.module is not None:
        count = len(outputs_of(capture.module))
        lanes = [None] * count if program is None else program.interface.outputs
        graphs["dense"] = dense_graph(capture, lanes)
    for name, side in (
        ("side_request", compilation.request),
        ("side_dense", compilation.dense),
    ):
        if side is not None and side.lanes:
            graphs[name] = side_graph(capture, side)
    return graphs


def program_input(compilation: Compilation, interface: Interface, node: fx.Node) -> GraphInput:
    """Return what a placeholder of a program is."""
    source, value = interface.inputs[str(node.target)], node.meta.get("val")
    if isinstance(source, Pairs):
        value = given_value(compilation, source.value)
    dtype = dtype_of(source, interface.taps, value)
    if isinstance(source, Given | Pairs) and isinstance(value, Tensor):
        return GraphInput(source, dtype, known_shape(value))
    return GraphInput(source, dtype)


def given_value(compilation: Compilation, given: Given) -> Tensor:
    """Return the value at capture of a call's argument, or of a side graph's result."""
    sides = {"request": compilation.request, "dense": compilation.dense}
    if given.origin in sides:
        side = sides[given.origin]
        assert side is not None, given
        return node_value(outputs_of(side.module)[given.index])
    assert compilation.capture.module is not None, "a program is made from a graph"
    return node_value(compilation.capture.module.graph.find_nodes(op="placeholder")[given.index])


def side_graph(capture: Capture, side: SideGraph) -> GraphFacts:
    """Return the facts of a side graph, whose inputs are the arguments that it reads."""
    inputs = argument_inputs(capture)
    names = list(inputs)
    outputs = []
    for number, (node, lane) in enumerate(zip(outputs_of(side.module), side.lanes, strict=True)):
        value = node_value(node)
        outputs.append(GraphOutput(f"value_{number}", value.dtype, lane, shape=known_shape(value)))
    used = {names[i]: inputs[names[i]] for i in side.used}
    return GraphFacts({**used, **number_inputs(capture, side.module)}, outputs)


def dense_graph(capture: Capture, lanes: Sequence[Lane | None]) -> GraphFacts:
    """Return the facts of the captured graph, which computes the denoiser's result in full."""
    assert capture.module is not None
    outputs = []
    for number, (node, lane) in enumerate(zip(outputs_of(capture.module), lanes, strict=True)):
        value = node_value(node)
        name, known = f"output_{number}", lane if has_known_rows(lane) else None
        outputs.append(GraphOutput(name, value.dtype, known, shape=known_shape(value)))
    inputs = argument_inputs(capture)
    names = [name for i, name in enumerate(inputs) if i not in capture.fixed]
    used = {name: inputs[name] for name in names}
    return GraphFacts({**used, **number_inputs(capture, capture.module)}, outputs)


def argument_inputs(capture: Capture) -> dict[str, GraphInput]:
    """Return the captured graph's inputs, in the order of the flattened arguments."""
    assert capture.module is not None
    found = {}
    nodes = [n for n in capture.module.graph.nodes if n.op == "placeholder"]
    for index, node in enumerate(nodes):
        value = node.meta.get("val")
        dtype = value.dtype if isinstance(value, Tensor) else torch.int64
        found[str(node.target)] = GraphInput(WholeArgument(index), dtype)
    return found


def number_inputs(capture: Capture, graph: fx.GraphModule) -> dict[str, GraphInput]:
    """Return the inputs that give the sides that a graph reads from tensors."""
    paths = list(argument_inputs(capture))
    found = {}
    for node in graph.graph.find_nodes(op="call_function", target=number_at):
        tensor, place, width = node.args
        index = paths.index(str(tensor.target))
        axis = axis_of(capture.leaves[index].sides[place])[0]
        source = ArgumentNumber(index, place, width, axis)
        found[number_name(node)] = GraphInput(source, torch.int64)
    return found


def number_name(node: fx.Node) -> str:
    """Return the name of the input that gives a number in a tensor."""
    tensor, place, _ = node.args
    assert isinstance(tensor, fx.Node), "the number is read from an argument"
    return f"{tensor.target}_number_{place}"


def node_value(node: fx.Node) -> Tensor:
    """Return a node's value at capture, or the weight that it reads."""
    value = node.meta.get("val")
    if value is None and node.op == "get_attr":
        value = operator.attrgetter(str(node.target))(node.graph.owning_module)
    assert isinstance(value, Tensor), f"{node.name} holds no tensor"
    return value


def known_shape(value: Tensor) -> tuple[int | None, ...]:
    """Return the sizes of a captured value, None for symbolic ones."""
    return tuple(n if isinstance(n, int) else None for n in value.shape)


def outputs_of(module: fx.GraphModule) -> Sequence[fx.Node]:
    """Return the nodes of a graph's results."""
    (results,) = module.graph.output_node().args
    assert isinstance(results, (list, tuple)), "a graph returns a sequence"
    nodes = [one for one in results if isinstance(one, fx.Node)]
    assert len(nodes) == len(results), "a graph returns values that it computes"
    return nodes


def has_known_rows(lane: Lane | None) -> bool:
    """Return True if hosts compute the number and places of all rows of a lane."""
    atoms = [atom for dim in lane.dims for atom in dim] if lane is not None else []
    return all(
        is_known(name) for atom in atoms if isinstance(atom, Tokens) for name in atom.segments
    )


def is_known(segment: str) -> bool:
    """Return True if hosts compute the number and places of these rows."""
    return piece_of(segment) is None and padded(segment) is None and "+" not in segment


def check_segment(name: str) -> None:
    """Raise InputError for rows whose number and places hosts don't compute."""
    if not is_known(name):
        raise InputError(
            f"export: the rows {name} are a part of a sequence, or pad several or to a fixed "
            'number, which hosts don\'t compute yet; export part="dense", or run the denoiser here'
        )
