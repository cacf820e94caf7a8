"""Twins of a program for batches with adapters: the same graphs with low-rank terms.

A twin is made from a finished program, when the first members with adapters come; so programs that
were read from files have twins too, and batches without adapters pay nothing.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection
from dataclasses import dataclass, replace

from torch import Tensor, fx

from maskfx.compiler.artifact.graphs import place_of
from maskfx.ir.modules.lazy_module import LazyModule
from maskfx.ir.programs.program import Program, SideGraph
from maskfx.ops.whole_modules import Whole
from maskfx.passes.add_low_rank import add_low_rank
from maskfx.passes.context import get_attribute


@dataclass(frozen=True)
class LowRankTwin:
    """A program with low-rank terms.

    Args:
        program: the rewritten graphs, with further inputs.
        weights: names of the weights whose layers have terms.
        own: names of the parameters that requests may have of their own, by full differences.
        whole: those of both that are used in other ways too: all members of a batch must have the
            same updates of these.
    """

    program: Program
    weights: frozenset[str]
    own: frozenset[str]
    whole: frozenset[str]

    def covers(self, weights: Collection[str], own: Collection[str]) -> bool:
        """Return True if it serves updates of these weights and parameters."""
        return self.weights.issuperset(weights) and self.own.issuperset(own)


def make_twin(program: Program, weights: Collection[str], own: Collection[str] = ()) -> LowRankTwin:
    """Return a program with terms on the layers of these weights, and with own parameters."""
    interface = replace(program.interface, inputs=dict(program.interface.inputs))
    names = [node.name for node in program.module.graph.nodes]
    graphs, whole = [], set[str]()
    for module in (program.module, program.recording):
        graph = named_copy(module.graph, names)
        whole |= add_low_rank(graph, interface, weights, own)
        graphs.append(LazyModule(module, graph))
    named = "\n".join([*sorted(weights), "", *sorted(own)])
    layers = hashlib.sha256(named.encode()).hexdigest()
    code = f"{program.code} adapted {layers}"
    twin = Program(graphs[0], graphs[1], interface, code, program.origins)
    return LowRankTwin(twin, frozenset(weights), frozenset(own), frozenset(whole))


def named_copy(graph: fx.Graph, names: list[str]) -> fx.Graph:
    """Copy a graph; its nodes get these names."""
    copy = fx.Graph()
    env: dict[fx.Node, fx.Node] = {}
    for node, name in zip(graph.nodes, names, strict=True):
        env[node] = copy.node_copy(node, env.__getitem__)
        env[node].name = name
        env[node].meta = dict(node.meta)
    return copy


def weight_names(program: Program) -> dict[object, tuple[str, ...]]:
    """Return the names of each weight of the graph, by its place in memory (`place_of`).

    Several paths may lead to one weight.
    """
    found: dict[object, tuple[str, ...]] = {}
    for name, value in originals(program).items():
        key = place_of(value)
        found[key] = (*found.get(key, ()), name)
    return found


def inner_weights(program: Program) -> set[object]:
    """Return the weights of the modules that stay whole, by their place in memory (`place_of`)."""
    whole = (part for part in program.module.modules() if isinstance(part, Whole))
    return {place_of(weight) for one in whole for weight in one.parameters()}


def originals(program: Program) -> dict[str, Tensor]:
    """Return the weights of a graph by name, in the module's layout."""
    derived = {item.name for item in program.interface.derived}
    found = dict(program.origins)
    for node in program.module.graph.find_nodes(op="get_attr"):
        value = get_attribute(program.module, str(node.target))
        if str(node.target) not in derived and isinstance(value, Tensor):
            found[str(node.target)] = value
    return found


def reads(side: SideGraph, places: Collection[object]) -> bool:
    """Return True if values of a side graph that a whole batch shares depend on these weights.

    Args:
        side: the side graph.
        places: the weights, by their place in memory (`place_of`).
    """
    output = side.module.graph.output_node()
    shared = [
        node
        for node, lane in zip(output.args[0], side.lanes, strict=True)  # type: ignore[arg-type]
        if lane.kind == "const"
    ]
    seen: set[object] = set()
    while shared:
        node = shared.pop()
        if node in seen or not isinstance(node, fx.Node):
            continue
        seen.add(node)
        shared += node.all_input_nodes
        if node.op == "get_attr":
            value = get_attribute(side.module, str(node.target))
            if isinstance(value, Tensor) and place_of(value) in places:
                return True
    return False


__all__ = [
    "LowRankTwin",
    "inner_weights",
    "make_twin",
    "originals",
    "place_of",
    "reads",
    "weight_names",
]
