"""A captured graph annotated with lanes and stages, with nothing rewritten to rows."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass

from torch import fx

from maskfx.compiler.capture.captured import Capture
from maskfx.ir.geometry.pyramid import Pyramid
from maskfx.ir.modules.lazy_module import LazyModule
from maskfx.ir.programs.program import Interface
from maskfx.passes.context import PassContext
from maskfx.passes.lift_side_graphs import dense_closure
from maskfx.passes.mark_lanes import mark_lanes
from maskfx.passes.mark_stages import CONST, STEP, stage_of
from maskfx.passes.pipeline import PIPELINE, run_passes


@dataclass(frozen=True)
class MarkedGraph:
    """A captured graph with annotations, for running edits in full.

    Args:
        rows: nodes that a program computes on rows, or from rows; all other nodes run in full.
        constant: nodes that no input changes.
        last: for each node, the values that it is the last to read.
    """

    capture: Capture
    module: fx.GraphModule
    pyramid: Pyramid
    rows: frozenset[fx.Node]
    constant: frozenset[fx.Node]
    last: Mapping[fx.Node, list[fx.Node]]


def mark_graph(capture: Capture, dense: Mapping[str, str]) -> MarkedGraph:
    """Run the passes that annotate; `dense` names the nodes that no rule narrows."""
    assert capture.module is not None, "there is a graph"
    module = fresh_copy(capture.module)
    interface = Interface(pyramid=copy.deepcopy(capture.pyramid))
    ctx = PassContext(interface=interface, symbols=capture.symbols, dense=dict(dense))
    last = next(i for i, step in enumerate(PIPELINE) if step.run is mark_lanes)
    run_passes(module.graph, ctx, PIPELINE[: last + 1])
    capture.read_numbers(interface.pyramid)
    in_full = dense_closure(module.graph, ctx)
    called = [node for node in module.graph.nodes if node.op == "call_function"]
    return MarkedGraph(
        capture,
        module,
        interface.pyramid,
        frozenset(n for n in called if stage_of(n) == STEP and n not in in_full),
        frozenset(n for n in called if stage_of(n) == CONST),
        last_uses(module.graph),
    )


def fresh_copy(module: fx.GraphModule) -> fx.GraphModule:
    """Copy the graph over the same weights, with its metadata, so that it can be rewritten."""
    graph = fx.Graph()
    env: dict[fx.Node, fx.Node] = {}
    for node in module.graph.nodes:
        env[node] = graph.node_copy(node, lambda n: env[n])
        env[node].name = node.name
        env[node].meta = dict(node.meta)
    return LazyModule(module, graph)


def last_uses(graph: fx.Graph) -> dict[fx.Node, list[fx.Node]]:
    """Return, for each node, the values that no later node reads."""
    found: dict[fx.Node, list[fx.Node]] = {}
    seen: set[fx.Node] = set()
    for node in reversed(graph.nodes):
        for source in (node, *node.all_input_nodes):
            if source not in seen:
                seen.add(source)
                found.setdefault(node, []).append(source)
    return found
