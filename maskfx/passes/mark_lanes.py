"""Follow the axes of every value through the graph.

One rule per kind of operator says what becomes of the atoms. What no rule covers, or what a rule
refuses, is marked to run dense, with the reason.
"""

from __future__ import annotations

from torch import fx

from maskfx.passes.context import PassContext
from maskfx.passes.lane_rules import joins, layers, mixing, views, windows
from maskfx.passes.lane_rules.marker import Marker, Rule

RULES: dict[str, Rule] = {
    **layers.rule,
    **views.rule,
    **joins.rule,
    **windows.rule,
    **mixing.rule,
}


def mark_lanes(graph: fx.Graph, ctx: PassContext) -> int:
    """Give every value its lane, and find what has to run dense."""
    marker, refused = Marker(ctx, RULES), dict(ctx.dense)
    for node in graph.nodes:
        marker.mark(node)
    if marker.missed & marker.joints.keys():  # the size of an axis that is joined further down
        ctx.dense.clear()
        ctx.dense.update(refused)
        for node in graph.nodes:
            marker.mark(node)
    return 0
