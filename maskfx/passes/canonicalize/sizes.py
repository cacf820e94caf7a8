"""Rewrites arithmetic with the size of the picture to arithmetic with a value of each request."""

from __future__ import annotations

import torch
from torch import fx

from maskfx.passes.context import PassContext, aten, node_value, op_name
from maskfx.passes.spelling import Speller

TARGETS = {name: getattr(aten, name).Tensor for name in ("add", "sub", "mul", "div")}


def canonicalize_sizes(graph: fx.Graph, ctx: PassContext) -> int:
    """Put sizes that a value is computed with into a tensor with one number per sample.

    Before  y = div(x, n)                         (n is a size, or a number that is made of sizes)
    After   y = div(x, full([b, 1, 1], n))        (b is the size of the first axis of x)
    Keeps   sizes in whole-number arithmetic, and those in other operators.
    """
    count = 0
    for node in list(graph.nodes):
        if op_name(node) not in TARGETS or len(node.args) != 2 or node.kwargs:
            continue
        value, number = node.args
        if not is_wide(value) or not is_size(number):
            continue
        spell = Speller(graph, node)
        shape = [spell.size(value, 0), *[1] * (node_value(value).dim() - 1)]
        own = node_value(value).dtype
        wide = torch.promote_types(own, torch.float32)  # half precision holds no large sizes
        kind = {"dtype": wide, "device": node_value(value).device}
        each = spell.emit(aten.full.default, shape, number, **kind)
        found = spell.emit(TARGETS[op_name(node)], value, each)
        spell.replace(found if own == wide else spell.emit(aten.to.dtype, found, own))
        count += 1
    return count


def is_wide(value: object) -> bool:
    """Return True for floating-point tensors with axes."""
    found = node_value(value) if isinstance(value, fx.Node) else None
    return isinstance(found, torch.Tensor) and found.dim() > 0 and found.is_floating_point()


def is_size(value: object) -> bool:
    number = value.meta.get("val") if isinstance(value, fx.Node) else None
    return isinstance(number, (torch.SymInt, torch.SymFloat))
