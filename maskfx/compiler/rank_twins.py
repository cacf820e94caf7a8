"""The twins of a program whose rows are split over ranks."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from torch import fx
from torch._C import FunctionSchema

from maskfx import ops
from maskfx.ir.modules.lazy_module import LazyModule
from maskfx.ir.programs.head_sources import AttentionWay, AttentionWays, ByHead
from maskfx.ir.programs.program import Interface, Program
from maskfx.ir.programs.sources import Exchanged, Merged, Source
from maskfx.passes.add_exchanges import add_exchanges
from maskfx.passes.context import PassContext, Unsupported
from maskfx.passes.join_exchanges import join_exchanges
from maskfx.passes.pipeline import Pass, run_passes

# What an exchange sends: rows by a table, or a value of each request: its moments, or its sums.
Sent = Exchanged | Merged | ByHead | str

MOMENTS, SUMS = "moments", "sums"


@dataclass
class SplitProgram:
    """A program's graphs with exchanges between ranks.

    Args:
        program: The program, with further inputs; its code is the whole program's.
        exchanges: By number, what ranks send each other in a step.
        recorded: The same of the graph that records.
        gathered: Where ranks divide heads, why attentions gather keys, by their nodes' names.
        attentions: The numbers of the exchanges of each attention, by its node's name.
    """

    program: Program
    exchanges: dict[int, Sent]
    recorded: dict[int, Sent]
    gathered: dict[str, str]
    attentions: dict[str, tuple[int, ...]] = field(default_factory=dict)

    def attends(self, way: AttentionWay) -> bool:
        """Return True if an attention is divided in a way other than by gathered keys."""
        kinds = set(map(type, self.exchanges.values()))
        return way != "gathered" and (Merged if way == "keys by rank" else ByHead) in kinds


def split_program(
    program: Program, attention: AttentionWays = "gathered", joined: bool = True
) -> SplitProgram | str:
    """Return a program's graphs for a rank, or why they can't be split.

    Args:
        program: The whole program, which stays as it is.
        attention: How ranks attend. "gathered": keys and values are exchanged. "keys by rank":
            queries and partial results of attentions to cached keys are exchanged, and each rank
            reads its share of these keys. "heads": each rank gets all rows for its share of the
            heads, and returns the results. Attentions may attend in different ways.
        joined: Whether border rows travel with the moments of the norm before them; rows of late
            members don't.
    """
    inputs: dict[str, Source] = {}
    notes, unread = PassContext(program.interface, {}), PassContext(program.interface, {})
    try:
        module, sent = with_exchanges(
            program.module, program.interface, inputs, attention, notes, joined
        )
        recording, recorded = with_exchanges(
            program.recording, program.interface, inputs, attention, unread, joined
        )
    except Unsupported as refused:
        return str(refused)
    interface = replace(program.interface, inputs=inputs)
    own = replace(program, module=module, recording=recording, interface=interface)
    return SplitProgram(own, sent, recorded, notes.gathered, notes.attentions)


def with_exchanges(
    module: fx.GraphModule,
    interface: Interface,
    inputs: dict[str, Source],
    attention: AttentionWays,
    notes: PassContext,
    joined: bool,
) -> tuple[fx.GraphModule, dict[int, Sent]]:
    """Return a copy of a graph with exchanges, and what they send; add its inputs to `inputs`.

    What the passes find out about attentions is added to `notes`.
    """
    graph = fx.Graph(owning_module=module)
    graph.output(graph.graph_copy(module.graph, {}))
    own = replace(interface, inputs=dict(interface.inputs))
    ctx = replace(notes, interface=own, attention=attention)
    run_passes(graph, ctx, (Pass(add_exchanges), Pass(join_exchanges))[: 1 + joined])
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
        tables = [source for source in sources if isinstance(source, Exchanged | Merged | ByHead)]
        values = MOMENTS if node.target is ops.peer_moments else SUMS
        found[number] = replace(tables[0], part="send") if tables else values
    return found


def names_of(node: fx.Node) -> list[str]:
    """Return the names of an operator's arguments."""
    schema: FunctionSchema | None = getattr(node.target, "_schema", None)
    if node.op != "call_function" or schema is None or not schema.name.startswith("maskfx::"):
        return []
    return [argument.name for argument in schema.arguments]
