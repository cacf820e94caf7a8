"""Assigns a lane to every value of the graph.

One rule per kind of operator determines how the atoms pass through it. Operators without a rule,
or refused by their rule, are marked to run dense, with the reason.
"""

from __future__ import annotations

from torch import fx

from maskfx.passes.context import PassContext
from maskfx.passes.lane_rules import choices, joins, layers, mixing, views, whole, windows
from maskfx.passes.lane_rules.marker import Marker, Rule

RULES: dict[str, Rule] = {
    **layers.rule,
    **views.rule,
    **joins.rule,
    **windows.rule,
    **mixing.rule,
    **whole.rule,
    **choices.rule,
}


def mark_lanes(graph: fx.Graph, ctx: PassContext) -> int:
    """Assign every value its lane, and mark the nodes that have to run dense."""
    marker, refused, left = Marker(ctx, RULES), dict(ctx.dense), 1
    for node in graph.nodes:
        marker.mark(node)
    # the size of an axis joined, or a level or a sequence cut, further down
    while marker.unfinished and (left or marker.learned):
        left = 1 if marker.learned else left - 1
        ctx.dense.clear()
        ctx.dense.update(refused)
        marker.begin_again()
        for node in graph.nodes:
            marker.mark(node)
    return 0
