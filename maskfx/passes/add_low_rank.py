"""Adds the low-rank terms of adapters to a program's graph.

This pass isn't in the pipeline: it runs when the first members with adapters come, on a copy of a
finished graph, and on that of a program read from a file.
"""

from __future__ import annotations

import re
from collections.abc import Collection

from torch import fx

from maskfx import ops
from maskfx.ir.program import Interface, Product
from maskfx.ir.sources import Down, RankGroups, Source, Up, Updated
from maskfx.passes.context import slug


def add_low_rank(graph: fx.Graph, interface: Interface, weights: Collection[str]) -> set[str]:
    """Add a term to each linear layer on rows whose weight adapters change.

    Before  y = linear(rows, w)
    After   y = add_low_rank(linear(rows, w), rows, down, up, groups)
    and     any other use of w becomes a use of an input, w with its update
    Keeps   layers that aren't in `weights`.

    Args:
        graph: A graph of the program; its names of nodes are those in `interface.products`.
        interface: A copy of the program's interface; it gets the new inputs.
        weights: Names of weights in the graph.

    Returns:
        The weights with other uses. All members of a batch must have one update of these.
    """
    inputs = GraphInputs(graph, interface)
    derived = {item.name: item for item in interface.derived}
    whole: set[str] = set()
    for node in list(graph.nodes):
        product = interface.products.get(node.name)
        if node.op == "call_function" and product is not None and product.weight in weights:
            add_term(graph, inputs, node, product)
    for node in list(graph.find_nodes(op="get_attr")):
        item = derived.get(str(node.target))
        weight = str(node.target) if item is None else item.origin
        users = [user for user in node.users if user.name not in interface.products]
        if weight not in weights or not users:
            continue
        whole.add(weight)
        changed = Updated(weight) if item is None else Updated(weight, item.order, item.shape)
        value = inputs.find(f"updated_{node.target}", changed)
        node.replace_all_uses_with(value, delete_user_cb=users.__contains__)
    graph.eliminate_dead_code()
    graph.lint()
    return whole


def add_term(graph: fx.Graph, inputs: GraphInputs, node: fx.Node, product: Product) -> None:
    weight, order = product.weight, product.order
    places = [
        inputs.find("_".join(("down", weight, *map(str, order))), Down(weight, order)),
        inputs.find(f"up_{weight}", Up(weight)),
        inputs.find(
            f"ranks_{weight}_{slug(product.segments)}", RankGroups(weight, product.segments)
        ),
    ]
    with graph.inserting_after(node):
        term = graph.call_function(ops.add_low_rank, (node, node.args[0], *places))
    node.replace_all_uses_with(term, delete_user_cb=lambda user: user is not term)
    term.meta = {key: value for key, value in node.meta.items() if key != "val"}


class GraphInputs:
    """The inputs of a graph and its interface; new ones stand behind the others."""

    def __init__(self, graph: fx.Graph, interface: Interface) -> None:
        self.graph, self.interface = graph, interface
        self.last = list(graph.find_nodes(op="placeholder"))[-1]
        self.known: dict[Source, fx.Node] = {}

    def find(self, name: str, source: Source) -> fx.Node:
        """Return the placeholder of a source."""
        if source not in self.known:
            name = re.sub(r"\W", "_", name)
            while self.interface.inputs.get(name, source) != source:
                name += "_"
            with self.graph.inserting_after(self.last):
                self.last = self.known[source] = self.graph.placeholder(name)
            self.interface.inputs[name] = source
        return self.known[source]
