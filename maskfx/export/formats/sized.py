"""Spells operators that ONNX has for fixed sizes only: adaptive pools, and groups that are samples.

A size that is free in the graph, such as the picture's or the batch's, becomes a bound of a slice
or a dimension of a product.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from itertools import product
from typing import Any, cast

import torch
from torch import fx
from torch._dispatch.python import enable_python_dispatcher

aten = torch.ops.aten
POOLS = {
    **dict.fromkeys(
        (aten.adaptive_avg_pool1d.default, aten.adaptive_avg_pool2d.default), aten.mean.dim
    ),
    **dict.fromkeys(
        (aten.adaptive_max_pool1d.default, aten.adaptive_max_pool2d.default), aten.amax.default
    ),
}
CONVOLUTIONS = {aten.conv1d.default: 1, aten.conv2d.default: 2, aten.conv3d.default: 3}
END = 2**63 - 1


class Before:
    """Inserts operators before a node, each with its value at export."""

    def __init__(self, node: fx.Node) -> None:
        self.node, self.graph = node, node.graph

    def emit(self, target: Any, *args: Any) -> fx.Node:
        with self.graph.inserting_before(self.node):
            made = self.graph.call_function(target, args)
        with enable_python_dispatcher():  # which leaves sizes free
            made.meta["val"] = target(*fx.map_arg(args, lambda node: node.meta["val"]))
        return made

    def size(self, value: fx.Node, axis: int) -> Any:
        """Return a size: a number, or the node of a free one."""
        found = value.meta["val"].shape[axis]
        return found if isinstance(found, int) else self.emit(aten.sym_size.int, value, axis)

    def replace(self, by: fx.Node) -> None:
        by.meta = {**self.node.meta, **by.meta}
        self.node.replace_all_uses_with(by)
        self.graph.erase_node(self.node)


def spell_pools(graph: fx.Graph) -> None:
    """Spell pools to a few parts, which the translation to ONNX makes of equal size.

    Before  y = adaptive_avg_pool1d(x, [2])                                       (x has n columns)
    After   y = cat([mean(slice(x, 2, 0, (n + 1) // 2), 2), mean(slice(x, 2, n // 2, n), 2)], 2)
    Keeps   a pool to a size of the picture, and maxima whose places are read.
    """
    for target, reduce in POOLS.items():
        for node in graph.find_nodes(op="call_function", target=target):
            source, parts = cast(tuple[fx.Node, list[int]], node.args)
            read = list(node.users) if reduce is aten.amax.default else []
            if not all(type(n) is int for n in parts) or any(place(user) for user in read):
                continue
            write = Before(node)
            rank = source.meta["val"].dim()
            for axis, count in enumerate(parts, rank - len(parts)):
                source = write_parts(write, source, axis, count, reduce)
            for user in read:
                user.replace_all_uses_with(source)
                graph.erase_node(user)
            write.replace(source)


def place(user: fx.Node) -> bool:
    """Return True unless the first result of several is read."""
    return user.target is not operator.getitem or user.args[1:] != (0,)


def write_parts(write: Before, source: fx.Node, axis: int, count: int, reduce: Any) -> fx.Node:
    """Reduce each of the parts of an axis to one value; parts overlap by one where they must."""
    size, parts = write.size(source, axis), []
    for number in range(count):
        start, end = times(write, number, size), times(write, number + 1, size)
        start, end = divided(write, start, count, 0), divided(write, end, count, count - 1)
        part = write.emit(aten.slice.Tensor, source, axis, start, end) if count > 1 else source
        parts.append(write.emit(reduce, part, [axis], True))
    return parts[0] if count == 1 else write.emit(aten.cat.default, parts, axis)


def times(write: Before, number: int, size: Any) -> Any:
    if number == 0 or isinstance(size, int):
        return number * size if isinstance(size, int) else 0
    return size if number == 1 else write.emit(operator.mul, size, number)


def divided(write: Before, size: Any, count: int, more: int) -> Any:
    """Return (size + more) // count."""
    if isinstance(size, int):
        return (size + more) // count
    size = write.emit(operator.add, size, more) if more else size
    return size if count == 1 else write.emit(operator.floordiv, size, count)


def spell_groups(graph: fx.Graph) -> None:
    """Spell convolutions with a free number of groups as products.

    Before  y = conv2d(x, w, None, [1, 1], [1, 1], [1, 1], b)      (b samples of i channels in x)
    After   y = reshape(matmul(reshape(w, [b, -1, i * 9]), patches of x [1, b, i * 9, -1]), ...)
    Keeps   a fixed number of groups.
    """
    for target, axes in CONVOLUTIONS.items():
        for node in graph.find_nodes(op="call_function", target=target):
            groups = node.args[6] if len(node.args) > 6 else node.kwargs.get("groups", 1)
            if isinstance(groups, fx.Node):
                write_groups(Before(node), axes, groups)


def write_groups(write: Before, axes: int, groups: fx.Node) -> None:
    x, weight, *others = cast(tuple[fx.Node, ...], write.node.args)
    names = ("bias", "stride", "padding", "dilation")
    given = {**dict(zip(names, others, strict=False)), **write.node.kwargs}
    stride, padding, dilation = (
        spread(given.get(name, default), axes)
        for name, default in zip(names[1:], (1, 0, 1), strict=True)
    )
    if any(padding):
        pads = [n for side in reversed(padding) for n in (side, side)]
        x = write.emit(aten.constant_pad_nd.default, x, pads)
    _, inner, *kernel = weight.meta["val"].shape
    pieces = []
    for where in product(*map(range, kernel)):
        piece = x
        for axis, at in enumerate(where):
            first, left = at * dilation[axis], (kernel[axis] - 1 - at) * dilation[axis]
            bounds = (first, -left if left else END, stride[axis])
            piece = write.emit(aten.slice.Tensor, piece, axis + 2, *bounds)
        pieces.append(piece)
    samples, sides = write.size(x, 0), [write.size(pieces[0], axis + 2) for axis in range(axes)]
    stacked = write.emit(aten.stack.default, pieces, 2)
    length = inner * len(pieces)
    patches = write.emit(aten.reshape.default, stacked, [samples, groups, length, -1])
    weights = write.emit(aten.reshape.default, weight, [groups, -1, length])
    result = write.emit(aten.matmul.default, weights, patches)
    result = write.emit(aten.reshape.default, result, [samples, -1, *sides])
    if given.get("bias") is not None:
        bias = write.emit(aten.reshape.default, given["bias"], [1, -1, *[1] * axes])
        result = write.emit(aten.add.Tensor, result, bias)
    write.replace(result)


def spread(value: Any, axes: int) -> Sequence[int]:
    return [value] * axes if isinstance(value, int) else [*value] * (axes // len(value))
