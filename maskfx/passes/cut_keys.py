"""Cuts the graph before the keys and values of attentions over sites, so that a plan may choose.

Keys and values of inactive sites can be loaded, or projected again from the recorded input of the
projection. The choice is run-time data: the nodes behind the cut have a separate row set, and those
of its rows that the row set before the cut lacks are loaded.
"""

from __future__ import annotations

from math import inf, prod

import networkx as nx
from torch import fx

from maskfx.ir.geometry.lanes import Feature, NotLaned, is_image, lane_of, lanes_of, set_lane
from maskfx.ir.geometry.pyramid import in_region
from maskfx.ir.nodes import module_path
from maskfx.ir.programs.program import KEYS, Region
from maskfx.ir.programs.sources import Given
from maskfx.passes.context import PassContext, enter_rows, need_lane, op_name
from maskfx.passes.lane_rules.mixing import is_within_rows
from maskfx.passes.mark_stages import STEP, stage_of
from maskfx.passes.operators import NORMS, POINTWISE, VIEWS
from maskfx.passes.row_form import is_rows

# Operators whose result at a site depends on the input at that site alone, in any layout.
BY_SITE = POINTWISE | VIEWS | NORMS | {"linear", "cat", "getitem", "chunk", "split", "unbind"}
BY_SITE |= {"split_with_sizes", "slice", "select", "permute", "transpose", "expand", "stack", "t"}
BY_SITE |= {"movedim", "mean", "repeat_interleave", "view_as_complex", "view_as_real"}


def cut_keys(graph: fx.Graph, ctx: PassContext) -> int:
    """Compute the keys and values of each attention over sites on a separate row set.

    Before  attention(q, linear(y, wk), linear(y, wv))
    After   z = enter_rows(y); attention(q, linear(z, wk), linear(z, wv))
    Keeps   attention whose keys and values are computed directly from an operator that mixes sites
            or from a value of the step, or whose input is no smaller than the keys and values.
    """
    if not ctx.plans or ctx.interface.regions_of(KEYS):
        return 0
    count = 0
    for node in list(graph.nodes):
        if op_name(node) != "scaled_dot_product_attention" or not is_rows(node):
            continue
        keys, values = node.args[1], node.args[2]
        if not (has_image(keys) and has_image(values)) or is_position(keys):
            continue
        if is_within_rows(*map(need_lane, node.args[:3])):  # a row attends to itself
            continue
        cut = smallest_cut(keys, values)
        if cut is None:
            continue
        inside = ctx.pyramid.region_in(need_lane(keys).segments)
        ctx.interface.regions.append(Region(KEYS, module_path(node), inside))
        rewrite(graph, ctx, node, cut, len(ctx.interface.regions))
        count += 1
    return count


def has_image(node: object) -> bool:
    """Return True if the node holds image rows (one tensor, or several).

    A mask of queries and keys doesn't: it has two site axes and is passed in full.
    """
    if not isinstance(node, fx.Node):
        return False
    lanes = lanes_of(node) or (lane_of(node),)
    try:
        return any(lane is not None and any(map(is_image, lane.segments)) for lane in lanes)
    except NotLaned:
        return False


def by_site(node: fx.Node) -> bool:
    """Return True if the node may stand behind a cut: it reads its site only, no step value."""
    if node.op != "call_function" or op_name(node) not in BY_SITE or stage_of(node) != STEP:
        return False
    for source in node.all_input_nodes:
        lanes = lanes_of(source) or (lane_of(source),)
        if any(lane is None for lane in lanes) and "val" in source.meta:
            return not hasattr(source.meta["val"], "shape")
        kinds = {lane.kind for lane in lanes if lane is not None}
        if "sample" in kinds and stage_of(source) == STEP:
            return False
    return True


def smallest_cut(keys: fx.Node, values: fx.Node) -> list[fx.Node] | None:
    """Return the nodes with the fewest bytes that determine keys and values by site, or None."""
    network = nx.DiGraph()
    stack, seen = [keys, values], set[fx.Node]()
    for node in stack:
        network.add_edge((node, "out"), "end", capacity=inf)
    while stack:
        node = stack.pop()
        if node in seen:
            continue
        seen.add(node)
        network.add_edge((node, "in"), (node, "out"), capacity=width(node))
        sources = [n for n in node.all_input_nodes if has_image(n)]
        movable = [n for n in sources if not is_position(n)]
        if not by_site(node) or not movable:
            network.add_edge("start", (node, "in"), capacity=inf)
            continue
        for source in movable:
            network.add_edge((source, "out"), (node, "in"), capacity=inf)
            stack.append(source)
    bytes_, (_, last) = nx.minimum_cut(network, "start", "end")
    if bytes_ == inf or bytes_ >= width(keys) + width(values):
        return None
    # of several smallest cuts this is the last one, which leaves the least to compute
    return [n for n in seen if (n, "out") in last and (n, "in") not in last]


def width(node: fx.Node) -> float:
    """Return the bytes per site; a node with several tensors can't be cut and returns inf."""
    lane, value = lane_of(node), node.meta.get("val")
    if lane is None or value is None or not hasattr(value, "dtype"):
        return inf
    return float(prod(a.size for a in lane.atoms() if isinstance(a, Feature)) * value.itemsize)


def is_position(node: fx.Node) -> bool:
    """Return True for a value of the request, which the frame provides for any row set."""
    return node.op == "placeholder" and stage_of(node) != STEP


def rewrite(
    graph: fx.Graph, ctx: PassContext, attention: fx.Node, cut: list[fx.Node], region: int
) -> None:
    """Compute keys and values again from the cut, on the region's rows."""
    copies: dict[fx.Node, fx.Node] = {}
    pyramid = ctx.pyramid

    def relabel(node: fx.Node, like: fx.Node) -> fx.Node:
        node.meta = dict(like.meta)
        node.meta.setdefault("origin", like.name)
        lanes = lanes_of(like)
        if lanes is not None:
            set_lane(node, tuple(in_region(x, region, pyramid) if x else x for x in lanes))
        else:
            set_lane(node, in_region(need_lane(like), region, pyramid))
        return node

    def again(node: fx.Node) -> fx.Node:
        if not has_image(node):
            return node
        if node not in copies:
            if node in cut:
                with graph.inserting_before(attention):
                    new = graph.call_function(enter_rows, (node,))
            elif is_position(node):
                new = position_input(graph, ctx, node, region)
            else:
                for source in node.all_input_nodes:
                    again(source)
                with graph.inserting_before(attention):
                    new = graph.node_copy(node, again)
            copies[node] = relabel(new, node)
        return copies[node]

    query, keys, values, *rest = attention.args
    attention.args = (query, again(keys), again(values), *rest)  # type: ignore[arg-type]


def position_input(graph: fx.Graph, ctx: PassContext, node: fx.Node, region: int) -> fx.Node:
    """Return an input with the same value of the request at the region's rows."""
    given = ctx.interface.inputs[str(node.target)]
    assert isinstance(given, Given)
    name = f"{node.target}_region{region}"
    last = [n for n in graph.nodes if n.op == "placeholder"][-1]
    with graph.inserting_after(last):
        new = graph.placeholder(name)
    lane = in_region(need_lane(node), region, ctx.pyramid)
    ctx.interface.inputs[name] = Given(given.origin, given.index, lane)
    return new
