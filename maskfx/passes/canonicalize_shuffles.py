"""Rewrites pixel_shuffle and pixel_unshuffle to views and a permute."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from maskfx.passes.context import PassContext, argument, aten, op_name


def canonicalize_shuffles(graph: fx.Graph, ctx: PassContext) -> int:
    """Rewrite pixel shuffles to views and a permute.

    Before  y = pixel_unshuffle(x, 2)
    After   y = reshape(permute(view(x, [b, c, h/2, 2, w/2, 2]), ...), [b, 4c, h/2, w/2])
    Keeps   shuffles of values that aren't [b, c, h, w].
    """
    count = 0
    for node in list(graph.nodes):
        name = op_name(node)
        source = node.args[0] if node.args else None
        if name not in ("pixel_shuffle", "pixel_unshuffle") or not isinstance(source, fx.Node):
            continue
        value = source.meta.get("val")
        if not isinstance(value, torch.Tensor) or value.dim() != 4:
            continue
        r = int(argument(node, 1, "factor"))
        spell(graph, node, source, r, shuffle=name == "pixel_shuffle")
        count += 1
    return count


def spell(graph: fx.Graph, node: fx.Node, source: fx.Node, r: int, shuffle: bool) -> None:
    value = source.meta["val"]
    channels = int(value.shape[1])

    def emit(target: Callable[..., Any], *args: fx.node.Argument) -> fx.Node:
        with graph.inserting_before(node):
            new = graph.call_function(target, args)
        new.meta = {k: v for k, v in node.meta.items() if k != "val"}
        return new

    sizes = [emit(aten.sym_size.int, source, i) for i in range(4)]
    for i, size in enumerate(sizes):
        size.meta["val"] = value.shape[i]
    b, _, h, w = (s.meta["val"] for s in sizes)
    if shuffle:
        shape: list[Any] = [sizes[0], channels // (r * r), r, r, sizes[2], sizes[3]]
        wide_val = value.reshape(b, channels // (r * r), r, r, h, w)
        order = [0, 1, 4, 2, 5, 3]
    else:
        shape = [sizes[0], channels, -1, r, emit(operator.floordiv, sizes[3], r), r]
        shape[4].meta["val"] = w // r
        wide_val = value.reshape(b, channels, h // r, r, w // r, r)
        order = [0, 1, 3, 5, 2, 4]
    wide = emit(aten.reshape.default, source, shape)
    wide.meta["val"] = wide_val
    moved = emit(aten.permute.default, wide, order)
    moved.meta["val"] = wide_val.permute(order)
    out: list[Any] = [sizes[0], channels // (r * r) if shuffle else channels * r * r, -1]
    last = emit(operator.mul, sizes[3], r) if shuffle else shape[4]
    if shuffle:
        last.meta["val"] = w * r
    result = emit(aten.reshape.default, moved, [*out, last])
    result.meta["val"] = node.meta["val"]
    node.replace_all_uses_with(result)
    graph.erase_node(node)
