"""Keeps the exchanges of a graph in order in compiled code."""

from __future__ import annotations

import operator

from torch import Tensor, fx

from maskfx import ops
from maskfx.compiler.rank_twins import names_of

ON_HOST = ("counts", "peers")  # arguments that are small tables on the host


def exchanges_in(graph: fx.Graph) -> list[fx.Node]:
    """Return the exchanges of a graph, in order."""
    return [node for node in graph.nodes if "number" in names_of(node)]


def order_exchanges(graph: fx.Graph) -> None:
    """Let each exchange read a result of the one before it.

    A compiler may run operators that don't read each other in any order, and drop one of which no
    number is read. The ranks of a step make the same exchanges in the same order, whether they run
    compiled code or the operators of the graph.

    Before  a = exchange(x, ..., counts, ...); b = exchange(y, ..., others, ...); return c
    After   a = exchange(x, ..., counts, ...); b = exchange(y, ..., after(others, a[0]), ...)
            return after(c, b[0])
    """
    last: fx.Node | None = None
    for node in exchanges_in(graph):
        if last is not None:
            names = names_of(node)
            place = next(names.index(name) for name in ON_HOST if name in names)
            with graph.inserting_before(node):
                table = graph.call_function(ops.after, (node.args[place], last))
            node.update_arg(place, table)
        last = result_of(graph, node)
    if last is not None:
        output = graph.output_node()
        results = (n for n in output.all_input_nodes if isinstance(n.meta.get("val"), Tensor))
        first = next(results, output.all_input_nodes[0])
        with graph.inserting_before(output):
            late = graph.call_function(ops.after, (first, last))
        late.meta = dict(first.meta)
        output.args = fx.map_arg(output.args, lambda n: late if n is first else n)
    graph.lint()


def result_of(graph: fx.Graph, node: fx.Node) -> fx.Node:
    """Return a tensor that an exchange returns."""
    (*more,) = node.target._schema.returns  # type: ignore[union-attr]
    if len(more) == 1 and str(more[0].type) == "Tensor":
        return node
    with graph.inserting_after(node):
        return graph.call_function(operator.getitem, (node, 0))
