"""Compares symbolic sizes with those of levels, at other sizes of the picture than the captured."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache
from math import prod

import torch
from torch.types import IntLikeType

from maskfx.ir.geometry.grids import front_of, part_of
from maskfx.ir.geometry.lanes import Dim, int_hint
from maskfx.ir.geometry.other_sizes import SizeExpr, assignments, valued
from maskfx.ir.geometry.pyramid import Level, Shift
from maskfx.passes.context import PassContext

Pair = tuple[int | None, int | None]  # the values of two sizes
Value = tuple[tuple[int, int], int | None]  # of a size, and the size of the picture


def is_size_of(
    ctx: PassContext,
    size: object,
    level: Level,
    axes: Iterable[int],
    admitted: bool = False,
    frames: int = 1,
) -> bool:
    """Return True if a size is that of a level's axes, 0 and 1, whatever the size of the picture.

    `frames`: how many times that size it is. `admitted`: of the sizes that the guards of the
    capture admit; they exclude too many. Only a symbolic size is compared: a number is known to be
    that of the captured picture.
    """
    if not isinstance(size, torch.SymInt):
        return True
    axes = tuple(axes)
    for base, found in values_at(ctx, size, admitted):
        if frames * prod(ctx.pyramid.size_at(level, base)[i] for i in axes) != found:
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


def axes_of(ctx: PassContext, size: torch.SymInt, roles: set[str], admitted: bool) -> Dim | None:
    """Return the axes of the picture that have a size of these roles, or None."""
    pyramid, hint = ctx.pyramid, int_hint(size)
    for number, level in enumerate(pyramid.levels):
        h, w = pyramid.hints[number]
        y, x = pyramid.y(number), pyramid.x(number)
        for times, axes, dim in (
            (1, (0, 1), (y, x)),
            (1, (0,), (y,)),
            (1, (1,), (x,)),
            (pyramid.frames, (0, 1), pyramid.axes(number)),
        ):
            found = times * prod((h, w)[axis] for axis in axes)
            if hint != found or roles != {"yx"[axis] for axis in axes}:
                continue
            if is_size_of(ctx, size, level, axes, admitted, times):
                return dim
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


def shift_of(ctx: PassContext, number: object, size: object) -> Shift | None:
    """Return how far a roll along an axis of this size moves, whatever the size of the picture."""
    constant = constant_of(ctx, number)
    if constant is not None:
        return constant, 0
    if not isinstance(number, torch.SymInt) or not isinstance(size, torch.SymInt):
        return None
    for admitted in (False, True):
        found = shift_at(number, size, pairs_at(ctx, number, size, admitted))
        if found is not None:
            return found
    return None


def shift_at(number: torch.SymInt, size: torch.SymInt, pairs: Sequence[Pair]) -> Shift | None:
    """Return the shift that a number is at these values of the number and the size."""
    hint = int_hint(number) % int_hint(size)
    if not pairs or any(moved is None or not whole for moved, whole in pairs):
        return None
    ratio = int_hint(size) // max(abs(int_hint(number)), 1)
    divisors = {*numbers_in(number), *numbers_in(size), ratio} - {0}
    parts = [part for divisor in sorted(divisors) for part in (divisor, -divisor)]
    shifts = [(hint, 0), (hint - int_hint(size), 0), *[(0, part) for part in parts]]
    for shift, part in shifts:
        if all((a - shift - part_of(b, part)) % b == 0 for a, b in pairs if a is not None and b):
            return shift, part
    return None


def front_in(
    ctx: PassContext,
    number: object,
    size: object,
    level: Level,
    i: int,
    kinds: Iterable[int] = (2, -2, 1),
) -> int | None:
    """Return the `Level.fill_front` by which a level's size along axis `i` has this many in front.

    `size`: that of the axis before it is filled up.
    """
    if not isinstance(number, torch.SymInt) or not isinstance(size, torch.SymInt):
        return None
    filled = [ctx.pyramid.size_at(level, base)[i] for base, _ in values_at(ctx, size)]
    found = list(zip(pairs_at(ctx, number, size), filled, strict=True))
    for kind in kinds:
        if all(b is not None and a == front_of(full - b, kind) for (a, b), full in found):
            return kind
    return None


def pairs_at(
    ctx: PassContext, one: torch.SymInt, other: torch.SymInt, admitted: bool = False
) -> list[Pair]:
    """Return the values of two sizes at other sizes of the picture."""
    pairs = zip(values_at(ctx, one, admitted), values_at(ctx, other, admitted), strict=True)
    return [(a, b) for (_, a), (_, b) in pairs]


def values_at(ctx: PassContext, size: torch.SymInt, admitted: bool = False) -> list[Value]:
    """Return other sizes of the picture, and the value of a size there; None without one."""
    found = values_of(size.node.expr, ctx.symbols.get("y"), ctx.symbols.get("x"))
    others = ctx.pyramid.others
    return [(base, value) for base, value in found if not admitted or base in others]


@lru_cache(maxsize=4096)
def values_of(expr: SizeExpr, y: SizeExpr | None, x: SizeExpr | None) -> tuple[Value, ...]:
    return tuple((base, valued(expr, said)) for said, base in assignments(y, x))
