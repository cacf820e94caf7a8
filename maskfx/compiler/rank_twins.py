"""The twins of a program whose rows are split over ranks."""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import fx
from torch._C import FunctionSchema

from maskfx import ops
from maskfx.ir.lazy_module import LazyModule
from maskfx.ir.program import Interface, Program
from maskfx.ir.sources import Exchanged, Merged, Source
from maskfx.passes.add_exchanges import add_exchanges
from maskfx.passes.context import PassContext, Unsupported
from maskfx.passes.pipeline import Pass, run_passes

# What an exchange sends: rows by a table, or a value of each request: its moments, or its sums.
Sent = Exchanged | Merged | str

MOMENTS, SUMS = "moments", "sums"


@dataclass
class SplitProgram:
    """A program's graphs with exchanges between ranks.

    Args:
        program: The program, with further inputs; its code is the whole program's.
        exchanges: By number, what ranks send each other in a step.
        recorded: The same of the graph that records.
    """

    program: Program
    exchanges: dict[int, Sent]
    recorded: dict[int, Sent]


def split_program(program: Program, keys_by_rank: bool) -> SplitProgram | str:
    """Return a program's graphs for a rank, or why they can't be split.

    Args:
        program: The whole program, which stays as it is.
        keys_by_rank: Exchange queries and partial results of attentions to cached keys, of which
            each rank then reads its share; else keys and values are exchanged.
    """
    inputs: dict[str, Source] = {}
    try:
        module, sent = with_exchanges(program.module, program.interface, inputs, keys_by_rank)
        recording, recorded = with_exchanges(
            program.recording, program.interface, inputs, keys_by_rank
        )
    except Unsupported as refused:
        return str(refused)
    interface = replace(program.interface, inputs=inputs)
    own = replace(program, module=module, recording=recording, interface=interface)
    return SplitProgram(own, sent, recorded)


def with_exchanges(
    module: fx.GraphModule, interface: Interface, inputs: dict[str, Source], keys_by_rank: bool
) -> tuple[fx.GraphModule, dict[int, Sent]]:
    """Return a copy of a graph with exchanges, and what they send; add its inputs to `inputs`."""
    graph = fx.Graph(owning_module=module)
    graph.output(graph.graph_copy(module.graph, {}))
    own = replace(interface, inputs=dict(interface.inputs))
    ctx = PassContext(own, {}, keys_by_rank=keys_by_rank)
    run_passes(graph, ctx, (Pass(add_exchanges),))
    for node in graph.find_nodes(op="placeholder"):
        if not node.users:
            graph.erase_node(node)
    read = {str(node.target) for node in graph.find_nodes(op="placeholder")}
    inputs.update({name: source for name, source in own.inputs.items() if name in read})
    return LazyModule(module, graph), exchanges_of(graph, own)


def exchanges_of(graph: fx.Graph, interface: Interface) -> dict[int, Sent]:
    """Return what each exchange of a graph sends, by its number."""
    found: dict[int, Sent] = {}
    for node in graph.nodes:
        if "number" not in names_of(node):
            continue
        number = node.args[-1]
        assert isinstance(number, int), node.format_node()
        sources = [interface.inputs.get(str(n.target)) for n in node.all_input_nodes]
        tables = [source for source in sources if isinstance(source, Exchanged | Merged)]
        values = MOMENTS if node.target is ops.peer_moments else SUMS
        found[number] = replace(tables[0], part="send") if tables else values
    return found


def names_of(node: fx.Node) -> list[str]:
    """Return the names of an operator's arguments."""
    schema: FunctionSchema | None = getattr(node.target, "_schema", None)
    if node.op != "call_function" or schema is None or not schema.name.startswith("maskfx::"):
        return []
    return [argument.name for argument in schema.arguments]
