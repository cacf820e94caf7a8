"""Narrows values of a request without sites: their batch becomes the number of requests."""

from __future__ import annotations

import torch
from torch import fx

from maskfx.ir.geometry.lanes import Batch, lane_of, node_shape
from maskfx.passes.context import Editor, PassContext, Unsupported, aten, need_lane, op_name
from maskfx.passes.operators import VIEWS


def narrow_samples(graph: fx.Graph, ctx: PassContext) -> int:
    """Replace the captured batch size in operators without sites.

    Before  y = view(x, [batch, heads, d])      (batch is a size of the captured image)
    After   y = view(x, [-1, heads, d])
    Keeps   operators that don't mention sizes.
    """
    count = 0
    for node in list(graph.nodes):
        lane = lane_of(node)
        if node.op != "call_function" or lane is None or lane.has_sites or "val" not in node.meta:
            continue
        if "origin" in node.meta:  # rewritten already
            continue
        if any(lane_of(n) is not None and need_lane(n).has_sites for n in node.all_input_nodes):
            continue  # another pass makes it of rows
        name = op_name(node)
        symbolic = any(is_size(n) for n in node.all_input_nodes)
        edit = Editor(graph, ctx, node)
        if name in VIEWS and lane.has_batch:
            edit.replace_plain(edit.emit(aten.reshape.default, node.args[0], sizes(node)))
        elif name in ("expand", "broadcast_to", "expand_as") and lane.has_batch:
            edit.replace_plain(expand(edit, node))
        elif symbolic:
            raise Unsupported(node, "it computes with the size of the picture or the batch")
        else:
            continue
        count += 1
    return count


def is_size(node: fx.Node) -> bool:
    return isinstance(node.meta.get("val"), (torch.SymInt, torch.SymFloat, torch.SymBool))


def sizes(node: fx.Node) -> list[int]:
    lane, shape = lane_of(node), node_shape(node)
    assert lane is not None
    return [
        -1 if any(isinstance(a, Batch) for a in d) else s
        for d, s in zip(lane.dims, shape, strict=True)
    ]


def expand(edit: Editor, node: fx.Node) -> fx.Node:
    lane, source = lane_of(node), lane_of(node.args[0])
    assert lane is not None
    assert source is not None
    want: list[fx.Node | int] = list(sizes(node))
    if not source.has_batch:
        at = want.index(-1)
        want[at] = requests(edit)
    return edit.emit(aten.expand.default, node.args[0], want)


def requests(edit: Editor) -> fx.Node:
    """Return the number of requests in the batch, the size of a value with one row per request."""
    for node in edit.graph.nodes:
        if node.op != "placeholder":
            break
        lane = lane_of(node)
        if lane is not None and lane.kind == "sample" and lane.dims[0] == (Batch(),):
            return edit.emit(aten.sym_size.int, node, 0)
    return edit.emit(aten.sym_size.int, edit.spans(()), 0)
