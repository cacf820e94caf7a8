"""Compares symbolic sizes with those of levels, at other sizes of the picture than the captured."""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from math import prod

import torch
from torch.types import IntLikeType

from maskfx.ir.lanes import X, Y, int_hint
from maskfx.ir.other_sizes import SizeExpr, assignments, valued
from maskfx.ir.pyramid import Level
from maskfx.passes.context import PassContext

Value = tuple[tuple[int, int], int | None]  # of a size, and the size of the picture


def is_size_of(
    ctx: PassContext, size: object, level: Level, axes: Iterable[int], admitted: bool = False
) -> bool:
    """Return True if a size is that of a level's axes, 0 and 1, whatever the size of the picture.

    `admitted`: of the sizes that the guards of the capture admit; they exclude too many. Only a
    symbolic size is compared: a number is known to be that of the captured picture.
    """
    if not isinstance(size, torch.SymInt):
        return True
    axes = tuple(axes)
    for base, found in values_at(ctx, size, admitted):
        if prod(ctx.pyramid.size_at(level, base)[i] for i in axes) != found:
            return False
    return True


def is_same_size(
    ctx: PassContext, one: IntLikeType, other: IntLikeType, admitted: bool = False
) -> bool:
    """Return True if two sizes are equal, whatever the size of the picture."""
    if int_hint(one) != int_hint(other):
        return False
    if isinstance(one, torch.SymInt) and isinstance(other, torch.SymInt):
        return values_at(ctx, one, admitted) == values_at(ctx, other, admitted)
    return True


def has_remainder(size: object) -> bool:
    """Return True if a size is computed with a remainder, as a padding to a multiple is."""
    return isinstance(size, torch.SymInt) and "Mod" in str(size.node.expr)


def axes_of(
    ctx: PassContext, size: torch.SymInt, roles: set[str], admitted: bool
) -> tuple[Y | X, ...] | None:
    """Return the axes of the picture that have a size of these roles, or None."""
    pyramid, hint = ctx.pyramid, int_hint(size)
    for number, level in enumerate(pyramid.levels):
        h, w = pyramid.hints[number]
        for found, named, axes in ((h * w, "yx", (0, 1)), (h, "y", (0,)), (w, "x", (1,))):
            if hint != found or roles != set(named):
                continue
            if is_size_of(ctx, size, level, axes, admitted):
                return tuple((Y, X)[axis](number) for axis in axes)
    return None


def numbers_in(size: torch.SymInt) -> list[int]:
    """Return the numbers in a size that it may be a multiple of, the greatest first."""
    return sorted({int(n) for n in size.node.expr.atoms() if n.is_Integer and n > 1}, reverse=True)


def constant_of(ctx: PassContext, size: object) -> int | None:
    """Return the number that a size is, whatever the size of the picture; None if it varies."""
    if not isinstance(size, torch.SymInt):
        return size if isinstance(size, int) else None
    values = {value for _, value in values_at(ctx, size)}
    return values.pop() if values == {int_hint(size)} else None


def values_at(ctx: PassContext, size: torch.SymInt, admitted: bool = False) -> list[Value]:
    """Return other sizes of the picture, and the value of a size there; None without one."""
    found = values_of(size.node.expr, ctx.symbols.get("y"), ctx.symbols.get("x"))
    others = ctx.pyramid.others
    return [(base, value) for base, value in found if not admitted or base in others]


@lru_cache(maxsize=4096)
def values_of(expr: SizeExpr, y: SizeExpr | None, x: SizeExpr | None) -> tuple[Value, ...]:
    return tuple((base, valued(expr, said)) for said, base in assignments(y, x))
