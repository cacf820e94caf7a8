"""Pictures of one size whose sites lie elsewhere: where they meet, one is read at the other's."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from torch import fx

from maskfx.ir.geometry.lanes import Lane, X, Y, lane_of
from maskfx.ir.geometry.pyramid import NO_SHIFT, Pyramid, Shift, added, is_near
from maskfx.passes.context import PassContext, argument, op_name
from maskfx.passes.mark_stages import STEP, stage_of
from maskfx.passes.symbolic_sizes import shift_of


def level_to_meet(ctx: PassContext, nodes: Sequence[fx.Node], node: fx.Node) -> int | None:
    """Return the level of the result of pictures that lie apart; None if they don't.

    It is the one that is moved least, or whose sites are rolled back after `node`.
    """
    pyramid = ctx.pyramid
    lanes = [lane_of(n) for n in nodes if stage_of(n) == STEP]
    levels = sorted({level for lane in lanes if lane and (level := whole_level(lane)) is not None})
    if len(levels) < 2 or any(pyramid.levels[n].region for n in levels):
        return None
    first = pyramid.levels[levels[0]]
    for level in levels[1:]:
        alike = pyramid.hints[level] == pyramid.hints[levels[0]]
        if not alike or not pyramid.is_as_large(first, pyramid.levels[level]):
            return None
    for level in levels:
        rolled = pyramid.rolled_by(level)
        if any(s != NO_SHIFT for s in rolled) and is_rolled_back(ctx, node, rolled):
            return level
    return min(levels, key=pyramid.distance)


def results_elsewhere(pyramid: Pyramid, output: fx.Node) -> Iterator[fx.Node]:
    """Yield results that are rolled, or as large as the picture and not at its place."""
    for node in output.all_input_nodes:
        lane = lane_of(node)
        level = whole_level(lane) if lane is not None else None
        if level is None:
            continue
        first, own = (pyramid.place(pyramid.levels[n]) for n in (0, level))
        moved = pyramid.hints[level] == pyramid.hints[0] and not is_near(first, own)
        if moved or pyramid.is_rolled(level):
            yield node


def whole_level(lane: Lane) -> int | None:
    """Return the level of a value with both axes of a picture, each once; None for others."""
    found: dict[type, list[int]] = {Y: [], X: []}
    for atom in lane.atoms():
        if isinstance(atom, (Y, X)):
            found[type(atom)].append(atom.level)
    return found[Y][0] if len(found[Y]) == 1 and found[Y] == found[X] else None


def is_rolled_back(ctx: PassContext, node: fx.Node, shifts: tuple[Shift, Shift]) -> bool:
    """Return True if rolls that follow each other after `node` move sites back together."""
    wanted = sorted((-number, -part) for number, part in shifts if number or part)
    for start in rolls_after(node):
        total: dict[int, Shift] = {}
        user: fx.Node | None = start
        while user is not None and op_name(user) == "roll":
            for axis, shift in shifts_by_axis(ctx, user):
                moved = None if shift is None else added(total.get(axis, NO_SHIFT), shift)
                if moved is None:
                    return False
                total[axis] = moved
            if sorted(s for s in total.values() if s != NO_SHIFT) == wanted:
                return True
            user = next(iter(user.users), None)
    return False


def shifts_by_axis(ctx: PassContext, node: fx.Node) -> Iterator[tuple[int, Shift | None]]:
    """Yield the axes that a roll moves, and how far; None if that is no part of their size."""
    shape = node.meta["val"].shape
    numbers, dims = argument(node, 1, "shifts"), argument(node, 2, "dims", [])
    for number, dim in zip(listed(numbers), listed(dims), strict=False):
        axis = dim % len(shape)
        moved = number.meta["val"] if isinstance(number, fx.Node) else number
        yield axis, shift_of(ctx, moved, shape[axis])


def rolls_after(node: fx.Node) -> Iterator[fx.Node]:
    """Yield the rolls of what is computed from a node."""
    seen, stack = {node}, list(node.users)
    while stack:
        user = stack.pop()
        if user in seen:
            continue
        seen.add(user)
        if op_name(user) == "roll":
            yield user
        stack.extend(user.users)


def listed(value: object) -> list[Any]:
    return list(value) if isinstance(value, (list, tuple)) else [value]
