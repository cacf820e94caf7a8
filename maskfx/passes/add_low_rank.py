"""Adds the low-rank terms and the own parameters of adapters to a program's graph.

This pass isn't in the pipeline: it runs when the first members with adapters come, on a copy of a
finished graph, and on that of a program read from a file.
"""

from __future__ import annotations

import re
from collections.abc import Collection

from torch import fx

from maskfx import ops
from maskfx.ir.programs.program import Interface, Product
from maskfx.ir.programs.sources import (
    Down,
    OwnBiases,
    OwnGroups,
    OwnWeights,
    RankGroups,
    Source,
    Up,
    Updated,
)
from maskfx.passes.context import slug


def add_low_rank(
    graph: fx.Graph,
    interface: Interface,
    weights: Collection[str],
    own: Collection[str] = (),
) -> set[str]:
    """Add a term to each linear layer on rows whose weight adapters change.

    Before  y = linear(rows, w)
    After   y = add_low_rank(linear(rows, w), rows, down, up, groups)
    and     own_linear(rows, w, b, weights, biases, groups) where w or b is in `own`
    and     any other use of w or b becomes a use of an input, w or b with its update
    Keeps   layers that are in neither.

    Args:
        graph: A graph of the program; its names of nodes are those in `interface.products`.
        interface: A copy of the program's interface; it gets the new inputs.
        weights: Names of weights in the graph that have low-rank updates.
        own: Names of parameters in the graph that have full differences.

    Returns:
        The parameters with other uses. All members of a batch must have one update of these.
    """
    inputs = GraphInputs(graph, interface)
    derived = {item.name: item for item in interface.derived}
    whole: set[str] = set()
    for node in list(graph.nodes):
        product = interface.products.get(node.name)
        if node.op != "call_function" or product is None:
            continue
        if product.weight in own or bias_of(node, interface) in own:
            make_own(inputs, node, product)
        if product.weight in weights:
            add_term(graph, inputs, node, product)
    for node in list(graph.find_nodes(op="get_attr")):
        item = derived.get(str(node.target))
        weight = str(node.target) if item is None else item.origin
        users = [user for user in node.users if not serves(user, node, interface)]
        if not (weight in weights or weight in own) or not users:
            continue
        whole.add(weight)
        changed = Updated(weight) if item is None else Updated(weight, item.order, item.shape)
        value = inputs.find(f"updated_{node.target}", changed)
        node.replace_all_uses_with(value, delete_user_cb=users.__contains__)
    graph.eliminate_dead_code()
    graph.lint()
    return whole


def serves(user: fx.Node, parameter: fx.Node, interface: Interface) -> bool:
    """Return True if a parameter is the weight or the bias of a layer that terms are added to."""
    if user.name not in interface.products:
        return False
    return user.args[1] is parameter or bias_of(user, interface) == str(parameter.target)


def bias_of(node: fx.Node, interface: Interface) -> str | None:
    """Return the name of a layer's bias, if it is a parameter as the module has it."""
    bias = node.args[2] if len(node.args) > 2 else node.kwargs.get("bias")
    if not isinstance(bias, fx.Node) or bias.op != "get_attr":
        return None
    name = str(bias.target)
    return None if any(item.name == name for item in interface.derived) else name


def make_own(inputs: GraphInputs, node: fx.Node, product: Product) -> None:
    """Let the rows of some requests be multiplied by a weight of their own."""
    rows, weight = node.args[:2]
    bias = node.args[2] if len(node.args) > 2 else node.kwargs.get("bias")
    name, interface = bias_of(node, inputs.interface), inputs.interface
    assert isinstance(weight, fx.Node), "a parameter"
    item = next((d for d in interface.derived if d.name == str(weight.target)), None)
    own = OwnWeights(product.weight)
    if item is not None:
        own = OwnWeights(product.weight, item.order, item.shape)
    groups = OwnGroups(product.weight, name, product.segments)
    biases = own if name is None else OwnBiases(name)
    node.args = (
        rows,
        weight,
        bias,
        inputs.find(f"own_{weight.target}", own),
        inputs.find(f"own_{name or weight.target}", biases),
        inputs.find(f"owners_{product.weight}_{slug(product.segments)}", groups),
    )
    node.kwargs = {}
    node.target = ops.own_linear


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
