"""Cuts the graph between blocks, so that a stretch may compute more sites than the mask.

A stretch is a run of consecutive blocks with separate row sets, whose sites are data. Where a value
crosses from one stretch to another, the rows that the later stretch lacks are loaded as recorded,
and the rows that it doesn't need are dropped. The places of the cuts follow from which values are
live at each node.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from math import inf, prod

import networkx as nx
import numpy as np
import torch
from numpy.typing import NDArray
from torch import fx

from maskfx.ir.geometry.lanes import NotLaned, lane_of, lanes_of, node_shape, set_lane
from maskfx.ir.geometry.pyramid import in_region
from maskfx.ir.nodes import module_path
from maskfx.ir.programs.program import STRETCH, Region
from maskfx.passes.context import PassContext, enter_rows, need_lane, op_name
from maskfx.passes.cut_keys import BY_SITE, has_image, position_input
from maskfx.passes.geometry import window_geometry
from maskfx.passes.operators import WINDOWS

Span = tuple[int, int]


def cut_stretches(graph: fx.Graph, ctx: PassContext) -> int:
    """Compute every stretch of blocks on separate row sets.

    Before  x = add(x, attention(...)); y = mlp(norm(x)); ...
    After   x = add(x, attention(...)); y = mlp(norm(enter_rows(x))); ...
    Keeps   the nodes behind the last operator that mixes sites: they compute the masked sites.
    """
    if not ctx.stretches or ctx.interface.regions:
        return 0
    rows = [n for n in graph.nodes if on_rows(n)]
    cuts = find_cuts(rows)
    places = stretch_places(rows, cuts)
    ctx.interface.regions += [Region(STRETCH, place) for place in places]
    ends = [*cuts, len(rows)]
    of_node = {n: int(np.searchsorted(ends, i)) + 1 for i, n in enumerate(rows)}
    of_node = {n: r if r <= len(cuts) else 0 for n, r in of_node.items()}
    output = next(n for n in graph.nodes if n.op == "output")
    return split_rows(graph, ctx, rows, {**of_node, output: 0})


def on_rows(node: fx.Node) -> bool:
    """Return True if the node is computed on image rows, or from image rows."""
    value = node.meta.get("val")
    return (
        node.op == "call_function"
        and isinstance(value, (torch.Tensor, tuple, list))
        and (has_image(node) or any(map(has_image, node.all_input_nodes)))
    )


def mixes(node: fx.Node) -> bool:
    """Return True if a site's result depends on other sites by more than a norm's statistics."""
    name = op_name(node)
    if name == "scaled_dot_product_attention":
        return has_image(node.args[1])
    if name in WINDOWS:
        try:
            return not window_geometry(node, need_lane).pointwise
        except NotLaned:
            return True
    return not has_image(node) and (name not in BY_SITE or name == "mean")


# Choosing the cuts.


def find_cuts(rows: Sequence[fx.Node]) -> list[int]:
    """Return nodes to cut behind: between site-mixing operators, with the fewest live numbers.

    No cut falls into a branch that is joined again with its source, unless whole blocks are in the
    branch (a UNet's skips pass by). Cuts with more live data than both neighbours are dropped. Of
    equal places the first one is best, as no unused rows are computed. So behind the last
    site-mixing operator the cut is the first place with no more live data than between blocks.
    """
    place = {node: i for i, node in enumerate(rows)}
    live = live_numbers(rows, place)
    mixing = [i for i, node in enumerate(rows) if mixes(node)]
    closed = np.zeros(len(rows), dtype=int)
    for first, last in branches(rows, place, mixing):
        closed[first + 1 : last] += 1
    found: list[int] = []
    for begin, end in pairwise([*mixing, len(rows)]):
        open_ = [i for i in range(begin, end) if not closed[i] and live[i] < inf]
        least = min((live[i] for i in open_), default=inf)
        if end == len(rows) and found:
            least = max(least, live[found[-1]])
        found += [i for i in open_ if live[i] <= least][:1]
    return [
        cut
        for n, cut in enumerate(found)
        if n in (0, len(found) - 1) or live[cut] <= max(live[found[n - 1]], live[found[n + 1]])
    ]


def live_numbers(rows: Sequence[fx.Node], place: dict[fx.Node, int]) -> NDArray[np.float64]:
    """Return how many numbers on sites are live behind each node."""
    live = np.zeros(len(rows))
    for node in rows:
        users = [place.get(u, len(rows)) for u in node.users if u in place or u.op == "output"]
        if users and has_image(node):
            size = prod(node_shape(node)) if lane_of(node) is not None else inf
            live[place[node] : max(users)] += size
    return live


def branches(
    rows: Sequence[fx.Node], place: dict[fx.Node, int], mixing: Sequence[int]
) -> list[Span]:
    """Return the innermost spans from a fork to a join with site mixing in one of the branches."""
    flow: nx.DiGraph[fx.Node | str] = nx.DiGraph()
    joins = []
    for node in rows:
        sources = [n for n in node.all_input_nodes if n in place and has_image(n)]
        flow.add_edges_from((source, node) for source in sources)
        if not sources:
            flow.add_edge("start", node)
        if len(sources) > 1:
            joins.append(node)
    parted = nx.immediate_dominators(flow, "start") if joins else {}
    spans = [(place.get(parted[join], -1), place[join]) for join in joins]
    before = np.searchsorted(mixing, range(len(rows) + 1))  # site-mixing nodes before each node
    spans = [(a, b) for a, b in spans if before[b] > before[a + 1]]
    return [s for s in spans if not any(s != t and s[0] <= t[0] and t[1] <= s[1] for t in spans)]


def stretch_places(rows: Sequence[fx.Node], cuts: Sequence[int]) -> Iterator[str]:
    """Yield for each stretch the module of its last operator that mixes sites."""
    for begin, end in pairwise([-1, *cuts]):
        last = [n for n in rows[begin + 1 : end + 1] if mixes(n)][-1]
        yield module_path(last)


# Applying the cuts.


def split_rows(
    graph: fx.Graph, ctx: PassContext, rows: Sequence[fx.Node], stretch: dict[fx.Node, int]
) -> int:
    """Move every node to the row sets of its stretch; insert a cut where a value crosses."""
    lanes = {node: node.meta.get("lane") for node in rows}
    moved: dict[tuple[fx.Node, int], fx.Node] = {}
    count = 0
    for node, region in stretch.items():
        for source in node.all_input_nodes:
            if not has_image(source) or stretch.get(source, 0) == region:
                continue
            if (source, region) not in moved:
                if source.op == "placeholder":
                    new = position_input(graph, ctx, source, region)
                    new.meta = dict(source.meta)
                else:
                    with graph.inserting_before(node):
                        new = graph.call_function(enter_rows, (source,))
                    new.meta = {**source.meta, "origin": source.name}
                    count += 1
                set_lane(new, lanes.get(source, lane_of(source)))
                move(new, region, ctx)
                moved[source, region] = new
            node.replace_input_with(source, moved[source, region])
    for node in rows:
        if has_image(node):
            move(node, stretch[node], ctx)
    return count


def move(node: fx.Node, region: int, ctx: PassContext) -> None:
    """Set a node's lanes to the region's row sets."""
    if not region:
        return
    lanes = lanes_of(node)
    if lanes is not None:
        set_lane(node, tuple(in_region(x, region, ctx.pyramid) if x else x for x in lanes))
    else:
        set_lane(node, in_region(need_lane(node), region, ctx.pyramid))
