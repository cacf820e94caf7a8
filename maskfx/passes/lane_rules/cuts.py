"""Cuts of tokens at places that follow from sizes: the parts become segments.

A rule that has to cut through a segment of packed tokens, or of a text, notes the place. The next
round of marking gives the arguments the parts as segments, so that each operator that cuts or joins
them does so between segments.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

import sympy
import torch
from torch import fx
from torch.types import IntLikeType

from maskfx.ir.geometry.cuts import NUMBER, Cut, piece_of, role_of
from maskfx.ir.geometry.lanes import (
    Dim,
    Lane,
    Tokens,
    filled,
    filling_segment,
    fixed_count,
    int_hint,
    is_image,
)
from maskfx.ir.geometry.other_sizes import SizeExpr
from maskfx.ir.geometry.pyramid import Pyramid
from maskfx.passes.context import PassContext
from maskfx.passes.symbolic_sizes import numbers_in

Numbers = Mapping[str, torch.SymInt]  # integers among the arguments, by role
MOST = 8  # cuts of one sequence
SIZES = (*range(24, 64), 97, 128, 200, 255)  # of a sequence, at which places are compared


def parted(lane: Lane | None, pyramid: Pyramid) -> Lane | None:
    """Return the lane of an argument, with the parts of sequences that are cut."""
    if lane is None or not pyramid.cuts.places:
        return lane

    def own(dim: Dim) -> Dim:
        if len(dim) != 1 or not isinstance(dim[0], Tokens):
            return dim
        return (Tokens(tuple(p for s in dim[0].segments for p in pyramid.cuts.parts(s))),)

    return Lane(tuple(map(own, lane.dims)))


def number_of(node: fx.Node) -> dict[str, torch.SymInt]:
    """Return an integer among the arguments by its role."""
    value, leaf = node.meta.get("val"), node.meta.get("leaf")
    if leaf is None or not isinstance(value, torch.SymInt):
        return {}
    return {f"{NUMBER}{leaf.path}": value}


def note_cut(
    ctx: PassContext,
    numbers: Numbers,
    segments: Sequence[str],
    number: int,
    place: IntLikeType,
) -> bool:
    """Cut one of a row of segments at a place; return False if that isn't possible.

    Args:
        ctx: the compilation, whose pyramid holds the cuts.
        numbers: by role, the integers among the arguments.
        segments: the segments of a token axis.
        number: which of them is cut.
        place: where, counted from the beginning of the axis.
    """
    segment, pyramid = segments[number], ctx.pyramid
    whole, part = piece_of(segment) or (segment, 0)
    if role_of(whole) not in ctx.symbols or whole.partition("@")[1]:
        return False
    if not is_image(whole) and ctx.pyramid.frames > 1:
        return False  # each frame may have a text of its own
    before = [size_expr(ctx, numbers, s) for s in segments[:number]]
    if any(size is None for size in before):
        return False
    found: SizeExpr = expr_of(place) - sum(size for size in before if size is not None)
    if part:
        start = pyramid.cuts.piece(whole, part).start
        assert start is not None, segment
        found = found + place_expr(ctx, numbers, start)
    cut = cut_of(ctx, numbers, found)
    sizes = pyramid.roles
    if cut is None or is_image(whole) and cut.role.startswith("text:"):
        return False
    if cut.role.startswith(NUMBER):
        pyramid.segments[cut.role] = sizes[cut.role] = int_hint(numbers[cut.role])
    if cut.role and cut.role not in sizes:
        return False
    return len(pyramid.cuts.places.get(whole, ())) < MOST and pyramid.cuts.add(whole, cut, sizes)


def expr_of(size: IntLikeType) -> SizeExpr:
    return size.node.expr if isinstance(size, torch.SymInt) else int(size)


def size_expr(ctx: PassContext, numbers: Numbers, segment: str) -> SizeExpr | None:
    """Return the size of a segment as an expression of symbols, or None."""
    fixed, part = fixed_count(segment), piece_of(segment)
    if fixed is not None or part is None:
        return fixed if fixed is not None else ctx.symbols.get(role_of(segment))
    piece, whole = ctx.pyramid.cuts.piece(*part), ctx.symbols[role_of(part[0])]
    start = 0 if piece.start is None else place_expr(ctx, numbers, piece.start)
    return (whole if piece.stop is None else place_expr(ctx, numbers, piece.stop)) - start


def place_expr(ctx: PassContext, numbers: Numbers, cut: Cut) -> SizeExpr:
    """Return a place as an expression of symbols."""
    if not cut.role:
        return cut.more
    size = ctx.symbols[cut.role] if cut.role in ctx.symbols else expr_of(numbers[cut.role])
    return sympy.floor((cut.times * size + cut.more) / sympy.Integer(cut.over))


def cut_of(ctx: PassContext, numbers: Numbers, place: SizeExpr) -> Cut | None:
    """Return the cut at a place, or None if it follows from several sizes or in another way."""
    place = sympy.expand(place)
    if place.is_Integer:
        return Cut(more=int(place))
    symbols = place.free_symbols
    named = {role: expr_of(number) for role, number in numbers.items()}
    for role, size in (*ctx.symbols.items(), *named.items()):
        if isinstance(size, int) or len(symbols) != 1 or size.free_symbols != symbols:
            continue
        pairs = list(values_of(place, size))
        found = fitted(role, pairs)
        if found is not None:
            return found
    return None


def values_of(place: sympy.Expr, size: sympy.Expr) -> Iterator[tuple[int, int]]:
    """Yield values of a size and of a place, in the one symbol that both have."""
    [symbol] = size.free_symbols
    for value in SIZES:
        own, at = size.subs(symbol, value), place.subs(symbol, value)
        if own.is_Integer and at.is_Integer:
            yield int(own), int(at)


def fitted(role: str, pairs: Sequence[tuple[int, int]]) -> Cut | None:
    """Return the cut that lies at these places for these sizes, or None."""
    if len(pairs) < 2:
        return None
    (small, first), (large, last) = pairs[0], pairs[-1]
    for over in range(1, 17):
        times = round((last - first) * over / (large - small))
        least = max(place * over - times * size for size, place in pairs)
        most = min(place * over - times * size for size, place in pairs) + over - 1
        if times > 0 and least <= most:
            return Cut(role, times, least, over)
    return None


def part_of_size(ctx: PassContext, size: torch.SymInt, numbers: Numbers) -> str | None:
    """Return the part of a sequence that has a size, whatever the sizes of a call; or None."""
    for whole in ctx.pyramid.cuts.places:
        for part in ctx.pyramid.cuts.parts(whole):
            own = size_expr(ctx, numbers, part)
            if own is not None and is_equal(own, size.node.expr):
                return part
    return None


def filling_of_size(
    ctx: PassContext, size: torch.SymInt, numbers: Numbers, joints: Iterable[Dim]
) -> str | None:
    """Return the segment that fills others up to a multiple and has this size, or None."""
    multiples, hint = numbers_in(size), int_hint(size)
    if not multiples or size.node.expr.is_Symbol:
        return None
    wholes = ("image", *(s for s in ctx.pyramid.segments if s.startswith("text:")))
    single = [(part,) for whole in wholes for part in ctx.pyramid.cuts.parts(whole)]
    several = [a.segments for dim in joints for a in dim if isinstance(a, Tokens)]
    for segments in dict.fromkeys((*single, *several)):
        sizes = [size_expr(ctx, numbers, s) for s in segments]
        known = [s for s in sizes if s is not None]
        if len(known) < len(sizes) or filled(segments[-1]) is not None:
            continue
        total = sympy.Integer(0) + sum(known)
        for multiple in multiples:
            found = filling_segment(multiple, "+".join(segments))
            if ctx.pyramid.segment_size(found) == hint and is_filling(
                total, size.node.expr, multiple
            ):
                return found
    return None


def is_filling(total: sympy.Expr, size: sympy.Expr, multiple: int) -> bool:
    """Return True if a size is what is missing to a multiple, for many values of the symbols."""
    symbols = total.free_symbols | size.free_symbols
    pairs = [(total.subs(values), size.subs(values)) for values in values_for(symbols)]
    return bool(symbols) and all(-int(one) % multiple == other for one, other in pairs)


def values_for(symbols: Collection[sympy.Symbol]) -> list[dict[sympy.Symbol, int]]:
    """Return many values of symbols."""
    order = sorted(symbols, key=str)
    return [{s: n + 7 * i for i, s in enumerate(order)} for n in SIZES]


def is_equal(one: SizeExpr, other: sympy.Expr) -> bool:
    """Return True if two sizes are equal for many values of their symbols."""
    if not isinstance(one, sympy.Basic) or not one.free_symbols:
        return False
    tried = values_for(one.free_symbols | other.free_symbols)
    return all(one.subs(values) == other.subs(values) for values in tried)
