"""Cuts a graph into one piece per stretch, so that each one's sites may be chosen before it runs.

A value belongs to the last stretch whose row sets it depends on. What depends on none runs where it
is first read. What follows the last stretch runs with it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import fx

from maskfx.compiler.pieces import Piece, copied, cut
from maskfx.ir.geometry.lanes import grid_segment, is_image, padded
from maskfx.ir.modules.lazy_module import LazyModule
from maskfx.ir.programs.program import STRETCH, Interface
from maskfx.ir.programs.sources import (
    Enter,
    Exchanged,
    Given,
    Halo,
    Loaded,
    Neighbours,
    Pairs,
    PairTable,
    Parents,
    Reader,
    ReadLines,
    ReadOwner,
    RestShare,
    SameLines,
    Source,
    Subsites,
    Weights,
)


def stretch_pieces(module: fx.GraphModule, interface: Interface) -> list[Piece]:
    """Return the pieces of a graph, one per stretch.

    Args:
        module: A graph of a program, the one that records or not.
        interface: The program's.
    """
    graph = copied(module)
    own = stretches_of(graph, interface)
    calls = sorted(own, key=own.__getitem__)  # sorting is stable, and no value precedes its inputs
    output = graph.output_node()
    for node in calls:
        output.prepend(node)
    graph.lint()
    first = {number: node for node, number in reversed([(n, own[n]) for n in calls])}
    names = {node.name for node in first.values()}
    return cut(LazyModule(module, graph), lambda node: node.name in names)


def stretches_of(graph: fx.Graph, interface: Interface) -> dict[fx.Node, int]:
    """Return the stretch that computes each operator of a graph, from 1."""
    last = len(interface.regions_of(STRETCH))
    found: dict[fx.Node, int] = {}
    for node in graph.nodes:
        if node.op == "placeholder":
            source = interface.inputs[str(node.target)]
            found[node] = max(row_set_stretches(source, interface, last), default=0)
        elif node.op != "output":
            found[node] = max((found[n] for n in node.all_input_nodes), default=0)
    for node in reversed(graph.nodes):
        if node in found and not found[node]:
            found[node] = min((found.get(user, last) for user in node.users), default=last)
    return {n: max(1, number) for n, number in found.items() if n.op == "call_function"}


def row_set_stretches(source: Source, interface: Interface, last: int) -> Iterator[int]:
    """Yield the stretches whose sites an input depends on; the mask's sites are the last one's."""
    for segment in filter(is_image, segments_read(source)):
        if padded(segment) is None:
            yield interface.stretch_of((segment,)) or last


def segments_read(source: Source | Reader) -> Sequence[str]:
    """Return the segments whose active sites an input depends on."""
    match source:
        case Exchanged() | ReadOwner() | RestShare():
            more = () if source.reader is None else segments_read(source.reader)
            return *source.segments, *more
        case ReadLines(lines, reader):
            return *lines.segments, *(() if reader is None else segments_read(reader))
        case SameLines(_, before, after):
            return before, after
        case Given(_, _, lane):
            return lane.segments
        case Neighbours(window) | Weights(window) | Halo(_, window):
            return grid_segment(window.source), grid_segment(window.target)
        case Parents(coarse, fine) | Subsites(coarse, fine, _):
            return grid_segment(coarse), grid_segment(fine)
        case Enter(before, after) | Loaded(_, before, after):
            return *before, *after
        case Pairs(value, queries, keys) | PairTable(value, queries, keys):
            return *value.lane.segments, *queries, *keys
    found: Sequence[str] = getattr(source, "segments", ())
    return tuple(found)
