"""Pads of tokens: what fills a sequence up, and what stands before and behind it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import fx
from torch.types import IntLikeType

from maskfx.ir.geometry.lanes import (
    SITES,
    Dim,
    Feature,
    Lane,
    NotLaned,
    Tokens,
    filling_segment,
    fixed_segment,
    int_hint,
    is_image,
    lane_of,
    node_shape,
    pad_segment,
    set_lane,
)
from maskfx.passes.geometry import edge_of, value_of
from maskfx.passes.lane_rules.marker import Marker, same_part
from maskfx.passes.mark_stages import STEP, stage_of

Ends = tuple[IntLikeType, IntLikeType]  # what a padding adds before and after an axis


def fill_up(m: Marker, node: fx.Node, nodes: Sequence[fx.Node], axis: int) -> None:
    """Mark the inputs joined to tokens as tokens, too: a padding segment or a fixed number."""
    held = [lane for n in nodes if (lane := lane_of(n)) is not None and has_site(lane.dims[axis])]
    for other in nodes:
        lane = lane_of(other)
        if not held or lane is not None and (lane.has_sites or lane.has_batch):
            continue
        shape, size = node_shape(other), other.meta["val"].shape[axis]
        segment = fixed_segment(shape[axis]) if isinstance(size, int) else None
        if segment is None and len(held[0].segments) == 1:
            whole = node.meta["val"].shape[axis]
            segment = filling_of(m, held[0].segments[0], shape[axis], whole)
        if segment is not None:
            dims: list[Dim] = [(Feature(s),) if s != 1 else () for s in shape]
            dims[axis] = (Tokens((segment,)),)
            set_lane(other, Lane(tuple(dims)))


def filling_of(m: Marker, segment: str, size: int, whole: object) -> str | None:
    """Return the segment of `size` rows that pads another to a multiple, read from `whole`."""
    if not isinstance(whole, torch.SymInt):
        return None
    numbers = {int(n) for n in whole.node.expr.atoms() if n.is_Integer and n > 1}
    for multiple in sorted(numbers, reverse=True):
        filling = filling_segment(multiple, segment)
        if m.ctx.pyramid.segment_size(filling) == size and int_hint(whole) % multiple == 0:
            return filling
    return None


def padded_tokens(m: Marker, node: fx.Node, lane: Lane, ends: Ends) -> tuple[str, ...]:
    """Return the segments of tokens with others before and behind them, which a pad adds."""
    found: list[tuple[str, ...]] = []
    if edge_of(node) or not isinstance(value_of(node), (int, float)):
        raise NotLaned(f"it pads a site axis of {lane}")
    for end in ends:
        if isinstance(end, int):
            dim: Dim | None = (Tokens((fixed_segment(end),)),) if end > 0 else ()
        else:
            dim = m.read_dim(end, False)
        if dim is None or isinstance(end, int) and end < 0:
            raise NotLaned(f"it pads a site axis of {lane} by {end}")
        if not all(isinstance(atom, Tokens) for atom in dim):
            raise NotLaned(f"it pads a site axis of {lane} by {end}")
        found.append(tuple(s for atom in dim if isinstance(atom, Tokens) for s in atom.segments))
    return (*found[0], *lane.segments, *found[1])


def surrounded(m: Marker, node: fx.Node, axis: int, start: int) -> Lane:
    """Return the lane of a fixed number of tokens, into which sites are written at `start`."""
    around, written = node.args[:2]
    source, whole = m.need(written), node.meta["val"].shape[axis]
    if stage_of(around) == STEP or not same_part(source.dims[axis], source):  # type: ignore[arg-type]
        raise NotLaned(f"it writes {source} along dimension {axis} of {lane_of(around)}")
    if isinstance(whole, torch.SymInt) or len(source.segments) != 1:
        raise NotLaned(f"it writes {source} into {whole} tokens")
    segment = source.segments[0]
    segments: tuple[str, ...] = (fixed_segment(start),) if start else ()
    segments += (segment,)
    if start + m.ctx.pyramid.segment_size(segment) < whole:
        if not is_image(segment):
            raise NotLaned(f"it pads {source} to {whole} tokens")
        segments += (pad_segment(whole - start, segment),)
    return Lane((*source.dims[:axis], (Tokens(segments),), *source.dims[axis + 1 :]))


def has_site(dim: Dim) -> bool:
    return any(isinstance(a, SITES) for a in dim)
