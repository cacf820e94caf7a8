"""Rewrites joins of frames that were computed alike, but with other numbers, to one computation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from maskfx.ir.geometry.other_sizes import SizeExpr
from maskfx.passes.canonicalize.rolls import JOINS, piece_of
from maskfx.passes.canonicalize.writes import equal, expression
from maskfx.passes.context import PassContext, argument, aten, op_name
from maskfx.passes.operators import POINTWISE
from maskfx.passes.spelling import Speller

SAME = object()  # of arguments that can't be joined


def canonicalize_parts(graph: fx.Graph, ctx: PassContext) -> int:
    """Rewrite a join of a video's frames, each computed by the same pointwise operators.

    Before  y = cat([slice(x, 1, 0, n) * a, slice(x, 1, n, end) * b], 1)    (a, b: [batch, 1, 8])
    After   y = x * where(arange(size(x, 1))[:, None] < n, a, b)
    Keeps   joins whose parts differ otherwise, leave out or repeat a part, or aren't whole frames.
    """
    if ctx.pyramid.frames < 2:
        return 0
    count = 0
    for node in list(graph.nodes):
        if op_name(node) not in JOINS or len(node.args[0]) < 2:
            continue
        value = node.meta["val"]
        axis = int(argument(node, 1, "dim", 0)) % value.dim()
        parts: Sequence[fx.Node] = node.args[0]
        if not are_frames(parts, axis, ctx):
            continue
        spell = Speller(graph, node)
        new = Joined(spell, parts, axis - value.dim()).of(parts)
        if not isinstance(new, fx.Node) or not is_alike(new.meta["val"], value):
            spell.drop()
            continue
        if new in parts:
            continue
        spell.replace(new)
        count += 1
    return count


def are_frames(parts: Sequence[fx.Node], axis: int, ctx: PassContext) -> bool:
    """Return True if the parts of a video's sites meet between two frames, text beside them or not.

    Sizes of the rows and columns show it: what lies beside the frames doesn't depend on them.
    """
    sizes = [expression(part.meta["val"].shape[axis]) for part in parts]
    frames, whole, lines = ctx.pyramid.frames, sum(sizes), symbols_of(ctx)
    ends = [sum(sizes[:number]) for number in range(1, len(sizes))]

    def follow_frames(size: SizeExpr) -> bool:
        if isinstance(size, int) and isinstance(whole, int):
            return whole > 0 and size * frames % whole == 0
        if not lines & getattr(size, "free_symbols", set()):
            return False
        rests: list[Any] = [whole * count - size * frames for count in range(1, frames)]
        return any(not lines & rest.expand().free_symbols for rest in rests)

    return all(follow_frames(end) or follow_frames(whole - end) for end in ends)


def symbols_of(ctx: PassContext) -> set[object]:
    """Return the symbols of the picture's rows and columns."""
    sizes = [ctx.symbols.get(role) for role in ("y", "x")]
    return set().union(*(getattr(size, "free_symbols", set()) for size in sizes))


def is_alike(one: torch.Tensor, other: torch.Tensor) -> bool:
    if one.dim() != other.dim() or one.dtype != other.dtype:
        return False
    sizes = zip(one.shape, other.shape, strict=True)
    return all(equal(expression(a), expression(b)) for a, b in sizes)


class Joined:
    """Joins what the parts are computed from.

    Args:
        spell: writes operators before the join.
        parts: what the join joins.
        axis: where it does, counted from the last axis: -1.
    """

    def __init__(self, spell: Speller, parts: Sequence[fx.Node], axis: int) -> None:
        self.spell, self.parts, self.axis = spell, parts, axis
        self._known: dict[tuple[object, ...], Any] = {}
        self._before: dict[int, fx.Node] = {}  # whether a place lies before the end of a part

    def of(self, values: Sequence[Any]) -> Any:
        """Return one value for those that stand at the same place in each part, or SAME."""
        first = values[0]
        if not all(isinstance(v, fx.Node) for v in values):
            return first if all(type(v) is type(first) and v == first for v in values) else SAME
        key = tuple(values)
        if key not in self._known:
            self._known[key] = self._join(values)
        return self._known[key]

    def _join(self, values: Sequence[fx.Node]) -> Any:
        if not all(isinstance(v.meta.get("val"), torch.Tensor) for v in values):
            return values[0] if len(set(values)) == 1 else SAME
        if all(map(self._is_spread, values)):
            return values[0] if len(set(values)) == 1 else self._chosen(values)
        whole = self._whole(values)
        return self._computed(values) if whole is None else whole

    def _is_spread(self, value: fx.Node) -> bool:
        """Return True for a value that is the same at all places."""
        shape = value.meta["val"].shape
        return len(shape) < -self.axis or equal(expression(shape[self.axis]), 1)

    def _whole(self, values: Sequence[fx.Node]) -> fx.Node | None:
        """Return the value that was cut into these."""
        source, at = None, 0 * self._size(self.parts[0])
        for value, part in zip(values, self.parts, strict=True):
            rank = value.meta["val"].dim()
            piece = piece_of(value, rank + self.axis) if rank >= -self.axis else None
            if piece is None or source not in (None, piece[0]) or not equal(piece[1], at):
                return None
            source, at = piece[0], at + self._size(part)
            if not equal(piece[2], at):
                return None
        assert source is not None
        return source if equal(at, self._size(source)) else None

    def _computed(self, values: Sequence[fx.Node]) -> Any:
        """Return what an operator computes from the joined arguments."""
        first = values[0]
        alike = all(
            v.target == first.target and v.kwargs == first.kwargs and len(v.args) == len(first.args)
            for v in values
        )
        if not alike or first.op != "call_function" or op_name(first) not in POINTWISE:
            return SAME
        if any(isinstance(v, fx.Node) for v in first.kwargs.values()):
            return SAME
        columns = zip(*(v.args for v in values), strict=True)
        args = [self.of(column) for column in columns]
        if any(arg is SAME for arg in args):
            return SAME
        return self.spell.emit(first.target, *args, **first.kwargs)  # type: ignore[arg-type]

    def _chosen(self, values: Sequence[fx.Node]) -> Any:
        """Return each place's own value among values without places."""
        if len({v.meta["val"].dtype for v in values}) > 1:
            return SAME
        found = values[-1]
        for number in range(len(values) - 2, -1, -1):
            before = self._places(number)
            if before is None:
                return SAME
            found = self.spell.emit(aten.where.self, before, values[number], found)
        return found

    def _places(self, number: int) -> fx.Node | None:
        """Return which places lie in a part or in one before it."""
        if number not in self._before:
            stop = self.spell.number(sum(self._size(part) for part in self.parts[: number + 1]))
            whole = self.spell.number(sum(map(self._size, self.parts)))
            if stop is None or whole is None:
                return None
            device = self.parts[0].meta["val"].device
            places = self.spell.emit(aten.arange.default, whole, device=device, pin_memory=False)
            shape = [-1, *[1] * (-1 - self.axis)]
            shaped = self.spell.emit(aten.reshape.default, places, shape)
            target = aten.lt.Scalar
            self._before[number] = self.spell.emit(target, shaped, stop)
        return self._before[number]

    def _size(self, value: fx.Node) -> SizeExpr:
        return expression(value.meta["val"].shape[self.axis])
