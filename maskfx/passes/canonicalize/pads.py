"""Rewrites pads of axes of size one, and those that add keys, to choices and joins."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from maskfx.passes.context import PassContext, argument, aten, node_at, node_value, op_name
from maskfx.passes.spelling import Speller

VALUES = {"pad": 3, "constant_pad_nd": 2}  # by operator: the place of the constant
PASSED = frozenset(  # what keys pass through on their way to a product
    {"transpose", "permute", "mT", "contiguous", "clone", "to", "_to_copy", "mul", "div", "expand"}
)


def canonicalize_pads(graph: fx.Graph, ctx: PassContext) -> int:
    """Rewrite a pad by a constant that widens axes of size one only, or that adds keys.

    Before  y = pad(x, [0, 1])                  (x is [2, 12, 1])
    After   y = where(arange(2) == 0, x, 0)
    and     z = attention(q, pad(k, [0, 0, 0, 1]), v)                 (k is [b, 2, n, 8])
    becomes z = attention(q, cat([k, expand(full([1, 1, 1, 1], 0), [b, 2, 1, 8])], 2), v)
    Keeps   pads of other axes that are larger, pads that cut, and other modes.
    """
    count = 0
    for node in list(graph.nodes):
        if op_name(node) not in VALUES:
            continue
        amounts = padded(node)
        added = widened(node, amounts)
        if not added:
            count += join_keys(Speller(graph, node), amounts)
            continue
        spell, kept = Speller(graph, node), None
        value, rank = node.meta["val"], node.meta["val"].dim()
        for axis, (before, after) in added.items():
            places = spell.emit(
                aten.arange.default, before + 1 + after, device=value.device, pin_memory=False
            )
            own = spell.emit(aten.eq.Scalar, places, before)
            shaped = spell.emit(aten.reshape.default, own, [-1, *[1] * (rank - 1 - axis)])
            kept = shaped if kept is None else spell.emit(aten.logical_and.default, kept, shaped)
        spell.replace(spell.emit(aten.where.ScalarOther, kept, node_at(node, 0), filler(node)))
        count += 1
    return count


def filler(node: fx.Node) -> float | int:
    """Return the constant that a pad adds."""
    found = argument(node, VALUES[op_name(node)], "value") or 0
    return float(found) if node_value(node).is_floating_point() else int(found)


def padded(node: fx.Node) -> dict[int, tuple[int, int]]:
    """Return by axis what a pad adds before and after; {} if it isn't a plain one by a constant."""
    mode = argument(node, 2, "mode", "constant") if op_name(node) == "pad" else "constant"
    shape = node_at(node, 0).meta["val"].shape
    amounts: Any = argument(node, 1, "pad")
    plain = all(isinstance(n, int) and n >= 0 for n in amounts)
    value = node.meta["val"]
    if mode != "constant" or not plain or value.is_complex() or value.dtype == torch.bool:
        return {}
    pairs = zip(amounts[::2], amounts[1::2], strict=True)
    added = {len(shape) - 1 - i: pair for i, pair in enumerate(pairs) if any(pair)}
    return dict(sorted(added.items()))


def widened(node: fx.Node, added: dict[int, tuple[int, int]]) -> dict[int, tuple[int, int]]:
    """Return what a pad adds if all axes that it widens have size one, else {}."""
    shape = node_value(node_at(node, 0)).shape
    ones = all(isinstance(shape[axis], int) and shape[axis] == 1 for axis in added)
    return added if ones else {}


def join_keys(spell: Speller, added: dict[int, tuple[int, int]]) -> bool:
    """Replace a pad by a join if it adds keys or values of attention; return whether it does."""
    node = spell.node
    value, own = node_at(node, 0), node_value(node)
    axis = own.dim() - 2
    if list(added) != [axis] or not node.users or not all(is_key(u, node) for u in node.users):
        return False
    parts = [value]
    for place, count in zip((0, 1), added[axis], strict=True):
        if not count:
            continue
        one = [1] * own.dim()
        one[axis] = count
        like = {"dtype": own.dtype, "device": own.device, "pin_memory": False}
        full = spell.emit(aten.full.default, one, filler(node), **like)
        sizes = [count if i == axis else spell.size(value, i) for i in range(own.dim())]
        wide = spell.emit(aten.expand.default, full, sizes)
        parts = [*parts, wide] if place else [wide, *parts]
    spell.replace(spell.emit(aten.cat.default, parts, axis))
    return True


def is_key(user: fx.Node, value: fx.Node) -> bool:
    """Return True if the user reads the value as keys or values of attention, or passes it on."""
    name = op_name(user)
    if name == "scaled_dot_product_attention":
        return value in user.args[1:3] and value is not user.args[0]
    if name in ("matmul", "bmm"):
        return user.args[1] is value and user.args[0] is not value
    passes = name in PASSED and user.args[0] is value and bool(user.users)
    return passes and all(is_key(each, user) for each in user.users)
