"""Rewrites the resizing of a fixed number of values to the size of the picture to a product."""

from __future__ import annotations

from math import prod

import torch
from torch import fx

from maskfx.passes.context import PassContext, argument, aten, node_value, op_name
from maskfx.passes.operators import RESAMPLINGS
from maskfx.passes.spelling import Speller

MOST = 64  # values whose weights are worth a product


def canonicalize_resizes(graph: fx.Graph, ctx: PassContext) -> int:
    """Rewrite what resizes a fixed grid, such as that of a pool, to a picture of any size.

    Before  y = upsample_bilinear2d(x, [h, w], False)           (x is [b, c, 1, 1])
    After   y = expand(x, [b, c, h, w])
    and     y = upsample_bilinear2d(x, [h, w], False)           (x is [b, c, 2, 2])
    becomes weights = upsample_bilinear2d(eye(4).reshape(1, 4, 2, 2), [h, w], False)
            y = reshape(matmul(reshape(x, [b, c, 4]), reshape(weights, [4, h * w])), [b, c, h, w])
    Keeps   pictures, whose sizes are symbols, and grids of more than 64 values.
    """
    count = 0
    for node in list(graph.nodes):
        source = node.args[0] if node.args else None
        if op_name(node) not in RESAMPLINGS or not isinstance(source, fx.Node):
            continue
        have, size = node_value(source).shape, node.meta["val"].shape
        if len(have) != 4 or not is_fixed(have) or is_fixed(size) or prod(have[2:]) > MOST:
            continue
        if any(op_name(one) == "eye" for one in source.all_input_nodes):
            continue  # weights that were written before
        spell = Speller(graph, node)
        if prod(have[2:]) == 1:
            sizes = argument(node, 1, "output_size")
            spell.replace(spell.emit(aten.expand.default, source, [-1, -1, *sizes]))
        else:
            spell.replace(weighed(spell, node, source))
        count += 1
    return count


def is_fixed(shape: torch.Size) -> bool:
    """Return True if rows and columns have one size for all pictures."""
    return all(isinstance(size, int) for size in shape[2:])


def weighed(spell: Speller, node: fx.Node, source: fx.Node) -> fx.Node:
    """Return the values, times what each has for a weight at each site."""
    value = node_value(source)
    many = int(prod(value.shape[2:]))
    kind = {"dtype": value.dtype, "device": value.device, "pin_memory": False}
    each = spell.emit(aten.eye.default, many, **kind)
    grid = spell.emit(aten.reshape.default, each, [1, many, *map(int, value.shape[2:])])
    weights = spell.emit(node.target, grid, *node.args[1:], **node.kwargs)  # type: ignore[arg-type]
    table = spell.emit(aten.flatten.using_ints, weights, 2, 3)
    table = spell.emit(aten.squeeze.dims, table, [0])
    flat = spell.emit(aten.flatten.using_ints, source, 2, 3)
    mixed = spell.emit(aten.matmul.default, flat, table)
    return spell.emit(aten.unflatten.int, mixed, 2, argument(node, 1, "output_size"))
