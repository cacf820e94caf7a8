"""Lane rules for operators on each site alone: elementwise, linear layers, feature norms."""

from __future__ import annotations

import torch
from torch import fx

from maskfx.ir.geometry.lanes import Batch, Feature, Lane, NotLaned, is_image, node_shape
from maskfx.passes.context import argument, op_name
from maskfx.passes.lane_rules.frames import is_by_frame
from maskfx.passes.lane_rules.marker import Marker, Rules, need_constant, same_part
from maskfx.passes.operators import NORMS, POINTWISE, SCATTERS, SITE_SOFTMAXES, SOFTMAXES

rule = Rules()


@rule(*POINTWISE)
def pointwise(m: Marker, node: fx.Node) -> Lane:
    if not isinstance(node.meta["val"], torch.Tensor):
        raise NotLaned(f"no rule covers {node.target} of one tensor")  # `where` that lists indices
    return Lane(tuple(m.unify(node.all_input_nodes, node_shape(node), to=node)))


@rule("linear")
def linear(m: Marker, node: fx.Node) -> Lane:
    lane = m.need(node.args[0])
    need_constant(m, node.args[1:])
    if not lane.is_feature_dim(-1):
        raise NotLaned(f"it multiplies along {lane.dims[-1]}")
    size = node_shape(node)[-1]
    return Lane((*lane.dims[:-1], (Feature(size),) if size != 1 else ()))


@rule("embedding")
def embedding(m: Marker, node: fx.Node) -> Lane:
    need_constant(m, node.args[:1])
    size = node_shape(node)[-1]
    return Lane((*m.need(node.args[1]).dims, (Feature(size),) if size != 1 else ()))


@rule(*NORMS)
def feature_norm(m: Marker, node: fx.Node) -> Lane:
    lane = m.need(node.args[0])
    count = len(argument(node, 1, "normalized_shape"))
    if not all(lane.is_feature_dim(-1 - i) for i in range(count)):
        raise NotLaned(f"it normalises over {lane}")
    need_constant(m, node.all_input_nodes[1:])
    return lane


@rule(*SOFTMAXES)
def softmax(m: Marker, node: fx.Node) -> Lane:
    lane, axis = m.need(node.args[0]), argument(node, 1, "dim")
    if "stable" in node.kwargs:
        raise NotLaned("it keeps the order of equal numbers")
    over_sites = op_name(node) in SITE_SOFTMAXES and same_part(lane.dims[axis], lane)
    if not lane.is_feature_dim(axis) and not over_sites:
        raise NotLaned(f"it runs along a site axis of {lane}")
    if over_sites and not all(map(is_image, lane.segments)):
        raise NotLaned(f"it runs along {lane.segments}")
    return lane


@rule(*SCATTERS)
def scatter(m: Marker, node: fx.Node) -> Lane:
    """Write to features that values give the numbers of."""
    out, axis = node_shape(node), argument(node, 1, "dim")
    values = node.all_input_nodes
    shapes = [node_shape(value) for value in values]
    axis %= len(out)
    if any(
        len(s) != len(out) or s[:axis] + s[axis + 1 :] != out[:axis] + out[axis + 1 :]
        for s in shapes
    ):
        raise NotLaned("it writes to a part of the sites")
    dims = m.unify(values, out, free=axis, to=node)
    if not all(m.need(value).is_feature_dim(axis) for value in values):
        raise NotLaned(f"it writes along sites of {m.need(values[0])}")
    dims[axis] = (Feature(out[axis]),) if out[axis] != 1 else ()
    return Lane(tuple(dims))


@rule("group_norm")
def group_norm(m: Marker, node: fx.Node) -> Lane:
    lane = m.need(node.args[0])
    need_constant(m, node.all_input_nodes[1:])
    alone = lane.dims[0] == (Batch(),) or is_by_frame(lane)
    apart = not lane.has_sites and lane.dims[0][:1] == (Batch(),)
    if not lane.is_feature_dim(1) or not (alone or apart):
        raise NotLaned(f"it normalises {lane}")
    if lane.has_sites and any(lane.features(i) > 1 for i in range(2, len(lane.dims))):
        raise NotLaned(f"it normalises {lane}")
    return lane


@rule("batch_norm")
def batch_norm(m: Marker, node: fx.Node) -> Lane:
    lane = m.need(node.args[0])
    if not lane.is_feature_dim(1) or argument(node, 5, "training", False):
        raise NotLaned(f"it normalises {lane}")
    return lane
