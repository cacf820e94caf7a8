"""The graphs of a compiled denoiser as programs of torch.export, which every format begins with.

All sizes that the capture left free are free in them: rows, requests, the length of texts, the size
of the picture.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, fx
from torch.export import Dim, ExportedProgram
from torch.fx.experimental import _config as symbol_config
from torch.utils import _pytree as pytree

from maskfx import ops
from maskfx.compiler.capture.arguments.roles import is_fixed
from maskfx.compiler.capture.captured import Capture
from maskfx.compiler.compile import Compilation
from maskfx.compiler.lower import lower
from maskfx.compiler.real_inputs import with_real_inputs
from maskfx.compiler.rows_export import blank_inputs, export_rows
from maskfx.errors import InputError
from maskfx.export.graph_facts import GraphFacts, compiled_graphs, number_name, outputs_of
from maskfx.ir.geometry.lanes import shape_hint
from maskfx.ir.nodes import module_path
from maskfx.ir.programs.program import Program
from maskfx.ops.number_at import number_at

PARTS = {
    "masked": ("edit", "side_request", "side_dense"),
    "record": ("record", "side_request", "side_dense"),
    "dense": ("dense",),
    "all": ("edit", "record", "dense", "side_request", "side_dense"),
}


@dataclass(frozen=True)
class ExportedGraph:
    """One graph to export.

    Args:
        facts: its inputs and outputs, by name and in order.
        module: what computes it, with its inputs by name.
        example: an input of each name, with sizes that differ where they may.
        free: by input, the axes whose sizes are free.
    """

    facts: GraphFacts
    module: fx.GraphModule
    example: Mapping[str, Tensor]
    free: Mapping[str, Sequence[int]]

    def exported(self) -> ExportedProgram:
        shapes = {name: dict.fromkeys(axes, Dim.AUTO) for name, axes in self.free.items()}
        with torch.no_grad(), symbol_config.patch(use_duck_shape=False):  # type: ignore[attr-defined]
            return torch.export.export(
                self.module,
                (),
                dict(self.example),
                dynamic_shapes=shapes,
                strict=False,
            )

    def in_module_layout(self) -> ExportedGraph:
        """Return the graph with the weights as the module holds them."""
        return self


# operators whose rows are chosen by data
PICKS = {
    *(ops.pick_tokens, ops.choose, ops.chosen, ops.by_expert, ops.expert_product, ops.run_whole)
}


def picks_of(compilation: Compilation) -> list[fx.Node]:
    """Return the nodes of a program that no format has operators for yet."""
    program = compilation.program
    if program is None:
        return []
    return [node for node in program.module.graph.nodes if node.target in PICKS]


def lowered(compilation: Compilation) -> Compilation:
    """Return the compilation with its program in standard operators, where there are any."""
    program = compilation.program
    if program is None or picks_of(compilation):
        return replace(compilation, program=None)
    return with_real_inputs(replace(compilation, program=lower(program)))


def check_exportable(compilation: Compilation, part: str) -> None:
    """Raise InputError if a graph holds the values of an argument, or picks rows by data.

    So does a graph that takes a number which is no size.
    """
    capture, picks = compilation.capture, picks_of(compilation)
    if part != "dense" and picks:
        path = module_path(picks[0]) or picks[0].name
        raise InputError(
            f"export: {path} sends each row to experts, or picks text tokens by a mask, which "
            'no format has operators for yet; export part="dense", or run the denoiser here'
        )
    for index, (leaf, node) in enumerate(zip(capture.leaves, arguments_of(capture), strict=True)):
        if leaf.held:
            raise InputError(
                f"export: the sizes of the graphs depend on the values of {leaf.path}, so that "
                "they are right for these alone; run the denoiser here, or export one that takes "
                "no such argument"
            )
        free = not leaf.tensor and index not in capture.constants
        if free and not is_integer(node.meta.get("val")):
            raise InputError(
                f"export: the graphs take the number {leaf.path}, which is neither an integer nor "
                "in a tensor; pass it as a tensor, or give the denoiser a constant"
            )


def arguments_of(capture: Capture) -> list[fx.Node]:
    """Return the placeholders of the captured graph, one for each flattened argument."""
    assert capture.module is not None, "a graph is exported"
    return list(capture.module.graph.find_nodes(op="placeholder"))


def is_integer(value: object) -> bool:
    """Return True for a number that a graph takes; one that was loaded has its value at capture."""
    return isinstance(value, torch.SymInt) or type(value) is int


def with_inputs(graph: fx.GraphModule, names: Collection[str], capture: Capture) -> fx.GraphModule:
    """Return a graph over all flattened arguments as one over these; others are constants.

    A number becomes the length of an input, which every format has as a symbol; so does one that
    the graph reads from a tensor.
    """
    constants, arguments = capture.fixed, arguments_of(capture)
    numbers = {str(n.target) for n in arguments if is_integer(n.meta.get("val"))}
    made = fx.Graph()
    values: dict[fx.Node, fx.node.Argument] = {}
    places = graph.graph.find_nodes(op="placeholder")
    for index, node in enumerate(places):
        name = str(node.target)
        values[node] = made.placeholder(name) if name in names else constants.get(index)
    read = graph.graph.find_nodes(op="call_function", target=number_at)
    values |= {node: made.placeholder(number_name(node)) for node in read}
    for node in (*places, *read):
        if node in read or str(node.target) in numbers.intersection(names):
            values[node] = made.call_function(torch.ops.aten.sym_size.int, (values[node], 0))
    for node in graph.graph.nodes:
        if node.op == "output":
            made.output(tuple(fx.map_arg(node.args[0], values.__getitem__)))
        elif node not in values:
            values[node] = made.node_copy(node, values.__getitem__)
    return fx.GraphModule(graph, made)


def graphs_of(compilation: Compilation, part: str) -> dict[str, ExportedGraph]:
    """Return the graphs of a part ("masked", "record", "dense" or "all") by name."""
    facts = compiled_graphs(compilation)
    made = {}
    for name in PARTS[part]:
        if name in facts:
            made[name] = graph_of(compilation, name, facts[name])
    return made


def graph_of(compilation: Compilation, name: str, facts: GraphFacts) -> ExportedGraph:
    capture, program = compilation.capture, compilation.program
    if name in ("edit", "record"):
        assert program is not None
        module = program.module if name == "edit" else program.recording
        return RowsGraph(facts, module, blank_inputs(program), {}, program)
    assert capture.module is not None
    sides = {"side_request": compilation.request, "side_dense": compilation.dense}
    side = sides.get(name)
    graph = capture.module if side is None else side.module
    places = arguments_of(capture)
    example = {
        str(node.target): example_of(node) for node in places if str(node.target) in facts.inputs
    }
    free = {
        str(node.target): [axis for axis, role in enumerate(leaf.roles) if not is_fixed(role)]
        if leaf.tensor
        else [0]
        for node, leaf in zip(places, capture.leaves, strict=True)
        if str(node.target) in facts.inputs
    }
    for node in graph.graph.find_nodes(op="call_function", target=number_at):
        example[number_name(node)] = example_of(node)
        free[number_name(node)] = [0]
    free = {name: [a for a in axes if example[name].shape[a] > 1] for name, axes in free.items()}
    module = with_inputs(graph, facts.inputs, capture)
    return ExportedGraph(facts, module, example, free)


@dataclass(frozen=True)
class RowsGraph(ExportedGraph):
    """The graph of a program, whose inputs are rows."""

    program: Program

    def exported(self) -> ExportedProgram:
        return export_rows(self.program, self.module, self.example)

    def in_module_layout(self) -> ExportedGraph:
        return replace(self, module=with_origins(self.module, self.program))


def with_origins(module: fx.GraphModule, program: Program) -> fx.GraphModule:
    """Return a graph of a program that derives weights of another layout from their origins."""
    derived = {item.name: item for item in program.interface.derived}
    graph, held = fx.Graph(), {}
    copies: dict[fx.Node, fx.Node] = {}
    for node in module.graph.nodes:
        item = derived.get(str(node.target)) if node.op == "get_attr" else None
        if item is not None:
            held[item.origin] = program.origins[item.origin]
            origin = graph.get_attr(item.origin)
            turned = graph.call_function(torch.ops.aten.permute.default, (origin, item.order))
            place = (turned, item.shape)
            copies[node] = graph.call_function(torch.ops.aten.reshape.default, place)
            continue
        copies[node] = graph.node_copy(node, copies.__getitem__)
        if node.op == "get_attr":
            held[str(node.target)] = operator.attrgetter(str(node.target))(module)
    return fx.GraphModule(held, graph)


def first_results(program: ExportedProgram, count: int) -> ExportedProgram:
    """Return an exported graph with this number of its results, the first ones, in a tuple."""
    signature = program.graph_signature
    if count == len(signature.output_specs):
        return program
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    graph.graph_copy(program.graph, copies)
    places = outputs_of(program.graph_module)[:count]
    graph.output(tuple(copies[place] for place in places))
    graph.eliminate_dead_code()
    root = program.module_call_graph[0]
    assert root.signature is not None, "torch.export describes the whole graph first"
    described = replace(
        root.signature,
        outputs=root.signature.outputs[:count],
        out_spec=pytree.tree_structure((0,) * count),
    )
    return ExportedProgram(
        root=program.graph_module,
        graph=graph,
        graph_signature=replace(signature, output_specs=signature.output_specs[:count]),
        state_dict=program.state_dict,
        range_constraints=dict(program.range_constraints),
        module_call_graph=[replace(root, signature=described), *program.module_call_graph[1:]],
        example_inputs=program.example_inputs,
        constants=program.constants,
    )


def example_of(node: fx.Node) -> Tensor:
    """Return an argument of the sizes at capture, where all roles have different ones."""
    value = node.meta["val"]
    if isinstance(value, torch.SymInt | int):
        known = value if isinstance(value, int) else value.node.hint
        return torch.zeros(known, dtype=torch.int64)
    return torch.ones(shape_hint(value), dtype=value.dtype)
