"""Reads from a size what an axis means, where no rule determines it."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch.types import IntLikeType

from maskfx.ir.geometry.lanes import Batch, Dim, Feature, Tokens, int_hint
from maskfx.passes.context import PassContext
from maskfx.passes.lane_rules.cuts import Numbers, filling_of_size, part_of_size
from maskfx.passes.symbolic_sizes import axes_of, has_remainder


def dim_of_size(
    ctx: PassContext,
    size: IntLikeType,
    first: bool,
    numbers: Numbers,
    joints: Iterable[Dim],
) -> Dim | None:
    """Return the dimension that a size stands for, or None.

    Args:
        ctx: the compilation.
        size: the size.
        first: whether it is that of a first axis.
        numbers: by role, the integers among the arguments.
        joints: the known axes of several segments.
    """
    hint, symbols, pyramid = int_hint(size), ctx.symbols, ctx.pyramid
    if hint == 1:
        return ()
    if not isinstance(size, torch.SymInt):
        fixed, batch = isinstance(symbols.get("batch", 0), int), pyramid.batch
        if first and fixed and hint == batch:
            return (Batch(),)
        if first and fixed and hint % batch == 0 and batch != 1:
            return None  # batch times heads, or features
        return (Feature(hint),)
    role = {str(e): r for r, e in symbols.items() if not isinstance(e, int)}
    roles = {role.get(str(s), "?") for s in size.node.expr.free_symbols}
    square = "y" in symbols and symbols["y"] == symbols["x"]
    if roles and roles <= {"y", "x"} and square:  # one symbol: which axis isn't known
        roles = {"y", "x"}
    if roles == {"batch"} and hint == pyramid.batch:
        return (Batch(),)
    whole = "image" if roles == {"tokens"} else min(roles, default="")
    if len(roles) == 1 and hint == pyramid.segments.get(whole):
        return (Tokens(pyramid.cuts.parts(whole)),)
    part = part_of_size(ctx, size, numbers) or filling_of_size(ctx, size, numbers, joints)
    if part is not None:
        return (Tokens((part,)),)
    for admitted in (False,) if has_remainder(size) else (False, True):
        found = axes_of(ctx, size, roles, admitted)
        if found is not None:
            return found
    return None
