"""Lane rule for modules that stay whole: they compute each token by itself."""

from __future__ import annotations

from torch import fx

from maskfx.ir.geometry.lanes import Feature, Lane, NotLaned, node_shape
from maskfx.passes.context import nodes_at
from maskfx.passes.lane_rules.marker import Marker, Rules

rule = Rules()


@rule("run_whole")
def run_whole(m: Marker, node: fx.Node) -> Lane:
    values = nodes_at(node, 1)
    for value in values:
        lane = m.need(value)
        if not lane.is_feature_dim(-1):
            raise NotLaned(f"it runs along {lane.dims[-1]} of {lane}")
    out = node_shape(node)
    dims = m.unify(values, out, free=len(out) - 1)
    return Lane((*dims[:-1], (Feature(out[-1]),)))
