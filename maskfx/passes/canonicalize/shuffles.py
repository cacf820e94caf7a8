"""Rewrites pixel shuffles, and folds of patches that don't overlap, to views and a permute."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from maskfx.ir.geometry.lanes import int_hint
from maskfx.passes.context import PassContext, argument, aten, op_name
from maskfx.passes.spelling import Speller


def canonicalize_shuffles(graph: fx.Graph, ctx: PassContext) -> int:
    """Rewrite pixel shuffles and folds to views and a permute.

    Before  y = pixel_unshuffle(x, 2)
    After   y = reshape(permute(view(x, [b, c, h/2, 2, w/2, 2]), ...), [b, 4c, h/2, w/2])
    and     y = col2im(x, [h, w], [2, 2], [1, 1], [0, 0], [2, 2])    (x is [b, 4c, h/2 * w/2])
    becomes y = reshape(permute(view(x, [b, c, 2, 2, h/2, w/2]), ...), [b, c, h, w])
    Keeps   shuffles of values that aren't [b, c, h, w], folds of patches that overlap.
    """
    count = 0
    for node in list(graph.nodes):
        name = op_name(node)
        if name == "col2im":
            count += fold(graph, node)
            continue
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


def fold(graph: fx.Graph, node: fx.Node) -> bool:
    """Replace a fold; return False if its patches overlap or don't cover the picture."""
    arguments: tuple[Any, ...] = node.args
    source, size, (ky, kx), dilation, padding, stride = arguments
    apart = list(stride) == [ky, kx] and list(dilation) == [1, 1] and list(padding) == [0, 0]
    value = node.meta["val"]
    if not apart or not isinstance(source, fx.Node) or value.dim() != 4:
        return False
    if not all(covers(n, k) for n, k in zip(size, (ky, kx), strict=True)):
        return False
    write = Speller(graph, node)
    h, w = size
    rows, columns = (
        write.emit(operator.floordiv, n, k) if isinstance(n, fx.Node) else n // k
        for n, k in ((h, ky), (w, kx))
    )
    channels = value.shape[1]
    shape = [write.size(source, 0), channels, ky, kx, rows, columns]
    wide = write.emit(aten.reshape.default, source, shape)
    moved = write.emit(aten.permute.default, wide, [0, 1, 4, 2, 5, 3])
    write.replace(write.emit(aten.reshape.default, moved, [shape[0], channels, h, w]))
    return True


def covers(size: fx.Node | int, patch: int) -> bool:
    """Return True if patches cover an axis, at the size of the capture."""
    number = size.meta["val"] if isinstance(size, fx.Node) else size
    return int_hint(number) % patch == 0


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
