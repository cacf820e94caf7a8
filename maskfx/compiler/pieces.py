"""Cuts a graph into pieces that run one after another, each when the inputs it reads are there.

An input may be waited for: cached rows that are being loaded, or a value that is being computed
elsewhere. A graph that runs operator by operator waits at the first operator that reads the input.
Compiled code takes all its inputs at its start, so its graph is cut at these operators.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from torch import fx

from maskfx.ir.modules.lazy_module import LazyModule, over_same


@dataclass(frozen=True)
class Piece:
    """A part of a graph, as a graph of its own.

    Args:
        module: its placeholders are `values`, then `inputs`; it returns `results`, or what the
            whole graph returns if it is the last piece.
        values: values of earlier pieces that it reads.
        inputs: inputs of the whole graph that it reads.
        results: its values that later pieces read.
    """

    module: fx.GraphModule
    values: tuple[str, ...]
    inputs: tuple[str, ...]
    results: tuple[str, ...]


def sink_late(module: fx.GraphModule, late: Collection[str]) -> fx.GraphModule:
    """Return the graph in an order in which it reads late inputs as late as possible.

    What depends on no late input comes first. Each other node stands right before its first
    reader, so a late residual of a skip connection is read where the sum is.
    """
    graph = copied(module)
    nodes = list(graph.nodes)
    behind = dependents(nodes, late)
    barrier = next((n for n in nodes if n in behind or n.op == "output"), None)
    for node in nodes:
        if barrier is not None and node not in behind and node.op != "output":
            barrier.prepend(node)
    for node in reversed(nodes):
        if node in behind and node.users:
            min(node.users).prepend(node)
    graph.lint()
    return over_same(module, graph)


def dependents(nodes: Sequence[fx.Node], inputs: Collection[str]) -> set[fx.Node]:
    """Return the operators that read one of these inputs, directly or not."""
    found: set[fx.Node] = set()
    for node in nodes:
        reads = any(
            n in found or n.op == "placeholder" and str(n.target) in inputs
            for n in node.all_input_nodes
        )
        if reads and node.op != "output":
            found.add(node)
    return found


Also = Callable[[Sequence[fx.Node]], Sequence[fx.Node]]


def cut(
    module: fx.GraphModule, starts: Callable[[fx.Node], bool], also: Also = lambda read: ()
) -> list[Piece]:
    """Cut a graph before each operator for which `starts` returns True.

    Run one after another, the pieces compute the same operators in the same order.

    Args:
        module: the graph.
        starts: returns True where a piece begins.
        also: returns what a piece takes beside the values and inputs that its operators read.
    """
    groups: list[list[fx.Node]] = [[]]
    for node in module.graph.nodes:
        if node.op in ("placeholder", "get_attr"):
            continue
        if groups[-1] and starts(node):
            groups.append([])
        groups[-1].append(node)
    number = {node: i for i, group in enumerate(groups) for node in group}
    takes: list[list[fx.Node]] = []
    for own, group in enumerate(groups):
        read = list(dict.fromkeys(n for node in group for n in node.all_input_nodes))
        crossing = [n for n in read if n.op == "placeholder" or number.get(n, own) != own]
        more = [n for n in also(crossing) if number.get(n, own) < own]
        takes.append(list(dict.fromkeys([*crossing, *more])))
    later = {n for taken in takes for n in taken if n in number}
    return [
        piece_of(module, group, taken, [n for n in group if n in later])
        for group, taken in zip(groups, takes, strict=True)
    ]


def piece_of(
    module: fx.GraphModule,
    group: Sequence[fx.Node],
    taken: Sequence[fx.Node],
    results: Sequence[fx.Node],
) -> Piece:
    """Return the piece of these operators, which takes and returns these values."""
    values = [n for n in taken if n.op != "placeholder"]
    inputs = [n for n in taken if n.op == "placeholder"]
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}

    def here(node: fx.Node) -> fx.Node:
        if node not in copies:  # a weight, at its first use in this piece
            copies[node] = graph.node_copy(node)
        return copies[node]

    for node in (*values, *inputs):
        copies[node] = graph.placeholder(str(node.target) if node in inputs else node.name)
        copies[node].meta = dict(node.meta)
    for node in group:
        if node.op != "output":
            copies[node] = graph.node_copy(node, here)
    ends: fx.node.Argument = tuple(copies[node] for node in results)
    last = group[-1]
    graph.output(fx.map_arg(last.args[0], here) if last.op == "output" else ends)
    graph.lint()
    return Piece(
        LazyModule(module, graph),
        tuple(n.name for n in values),
        tuple(str(n.target) for n in inputs),
        tuple(n.name for n in results),
    )


def copied(module: fx.GraphModule) -> fx.Graph:
    graph = fx.Graph()
    graph.output(graph.graph_copy(module.graph, {}))
    return graph
