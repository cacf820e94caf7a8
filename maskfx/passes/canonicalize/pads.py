"""Rewrites pads of axes of size one to choices between a value and a constant."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from maskfx.passes.context import PassContext, argument, aten, node_at, op_name
from maskfx.passes.spelling import Speller

VALUES = {"pad": 3, "constant_pad_nd": 2}  # by operator: the place of the constant


def canonicalize_pads(graph: fx.Graph, ctx: PassContext) -> int:
    """Rewrite a pad by a constant that widens axes of size one only.

    Before  y = pad(x, [0, 1])                  (x is [2, 12, 1])
    After   y = where(arange(2) == 0, x, 0)
    Keeps   pads of larger axes, pads that cut, and other modes.
    """
    count = 0
    for node in list(graph.nodes):
        if op_name(node) not in VALUES:
            continue
        added = widened(node)
        if not added:
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
        filler = argument(node, VALUES[op_name(node)], "value") or 0
        filler = float(filler) if value.is_floating_point() else int(filler)
        spell.replace(spell.emit(aten.where.ScalarOther, kept, node_at(node, 0), filler))
        count += 1
    return count


def widened(node: fx.Node) -> dict[int, tuple[int, int]]:
    """Return by axis what a pad adds before and after; {} unless these axes have size one."""
    mode = argument(node, 2, "mode", "constant") if op_name(node) == "pad" else "constant"
    shape = node_at(node, 0).meta["val"].shape
    amounts: Any = argument(node, 1, "pad")
    plain = all(isinstance(n, int) and n >= 0 for n in amounts)
    value = node.meta["val"]
    if mode != "constant" or not plain or value.is_complex() or value.dtype == torch.bool:
        return {}
    pairs = zip(amounts[::2], amounts[1::2], strict=True)
    added = {len(shape) - 1 - i: pair for i, pair in enumerate(pairs) if any(pair)}
    ones = all(isinstance(shape[axis], int) and shape[axis] == 1 for axis in added)
    return dict(sorted(added.items())) if ones else {}
