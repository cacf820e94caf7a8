"""Exports a program's graph by torch.export, with a number of rows of each input left free.

What is compiled or saved outside of this process begins here: Inductor's code, and every format of
`maskfx.export`. Masks, sizes and numbers of requests are data of the exported graph.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod

import torch
from torch import Tensor, fx
from torch.export import Dim, ExportedProgram
from torch.fx.experimental import _config as symbol_config

from maskfx.ir.lanes import Batch, Lane, is_image, shape_hint
from maskfx.ir.program import Interface, Program
from maskfx.ir.sources import (
    Enter,
    Given,
    Halo,
    Kept,
    Loaded,
    Neighbours,
    Owner,
    Pairs,
    PairTable,
    Parents,
    Rest,
    RestOwner,
    RestSpans,
    RestStats,
    RestSum,
    Source,
    Spans,
    Subsites,
)
from maskfx.ops import wide

REQUESTS = 3  # of the example; a number that is no special case


def export_rows(
    program: Program, graph: fx.GraphModule, inputs: Mapping[str, Tensor]
) -> ExportedProgram:
    """Export a program's graph with a separate symbol for each number of rows.

    Args:
        program: the program.
        graph: its graph, or one with the same inputs.
        inputs: an example of each input, in their order.
    """
    sources = program.interface.inputs
    example = {n: stand_in(i, inputs[n], s) for i, (n, s) in enumerate(sources.items())}
    shapes = {name: dict.fromkeys(free_axes(s), Dim.AUTO) for name, s in sources.items()}
    with torch.no_grad(), symbol_config.patch(use_duck_shape=False):  # type: ignore[attr-defined]
        return torch.export.export(graph, (), example, dynamic_shapes=shapes, strict=False)


def blank_inputs(program: Program) -> dict[str, Tensor]:
    """Return an example of each input, of zeros: shapes and dtypes are known from the program."""
    found = {}
    for node in program.module.graph.find_nodes(op="placeholder"):
        source = program.interface.inputs[str(node.target)]
        shape, dtype = blank(source, program.interface, node.meta.get("val"))
        found[str(node.target)] = torch.zeros(shape, dtype=dtype)
    return found


def blank(
    source: Source, interface: Interface, value: Tensor | None
) -> tuple[list[int], torch.dtype]:
    """Return the shape of an input, 1 for sizes that vary, and its dtype.

    Args:
        source: what the input is.
        interface: of the program.
        value: the full value at capture that the input is made from, if it is made from one.
    """
    taps = interface.taps
    match source:
        case Given(_, _, lane):
            assert value is not None, "an argument has a value at capture"
            if lane.kind == "const":
                return shape_hint(value), value.dtype
            sizes = [lane.features(i) for i in range(len(lane.dims))]
            return [1, *lane.row_shape()] if lane.kind == "rows" else sizes, value.dtype
        case Spans(segments) | RestSpans(segments):
            return [1, 2 * len(segments)], torch.long
        case Neighbours(window):
            return [1, 1 if window.rounding else prod(window.kernel)], torch.long
        case Halo(tap) | Rest(tap) | Loaded(tap) | Kept(tap):
            return [1, *taps[tap].shape], taps[tap].dtype
        case RestStats(tap):
            return [1, taps[tap].stats, 3], wide(taps[tap].dtype)
        case RestSum(tap):
            return [1, prod(taps[tap].shape) + 1], wide(taps[tap].dtype)
        case PairTable(_, _, _, heads, dtype):
            return [heads, 1, 1], dtype
        case Pairs():
            assert value is not None, "a mask has a value at capture"
            return [1], value.dtype
    return [1], torch.long


def free_axes(source: Source) -> tuple[int, ...]:
    """Return the axes of an input whose size changes from batch to batch."""
    match source:
        case PairTable(_, queries):
            return (1, 2) if queries else (2,)
        case Given(_, _, lane) if lane.kind == "const":
            return ()
        case Given(_, _, lane) if lane.kind == "sample":
            return (batch_axis(lane),)
    return (0,)


def batch_axis(lane: Lane) -> int:
    return next(i for i, dim in enumerate(lane.dims) if Batch() in dim)


def stand_in(index: int, value: Tensor, source: Source) -> Tensor:
    """Return an input of the same kind with numbers of rows that are no special case (0 or 1)."""
    shape = list(value.shape)
    for axis, size in zip(free_axes(source), free_sizes(index, source), strict=True):
        shape[axis] = size
    return value.new_zeros(shape)


def free_sizes(index: int, source: Source) -> tuple[int, ...]:
    """Return the sizes of the free axes; those that are equal in every batch are equal."""
    match source:
        case Given(_, _, lane) if lane.kind == "const":
            return ()
        case Given(_, _, lane) if lane.kind == "rows":
            return (rows_of(lane.segments),)
        case Given(_, _, lane):
            return (REQUESTS * lane.features(batch_axis(lane)),)
        case Owner(segments) | Enter(_, segments):
            return (rows_of(segments),)
        case Parents(_, target):
            return (rows_of((f"grid{target}",)),)
        case Subsites(_, fine, _):
            return (rows_of((f"grid{fine}",)),)
        case Neighbours(window):
            return (rows_of((f"grid{window.target}",)),)
        case Rest(_, segments) | RestOwner(segments):
            return (rest_of(segments),)
        case PairTable(_, queries, keys):
            images = tuple(filter(is_image, keys))
            width = rows_of(keys) + (rest_of(images) if images else 0)
            return (rows_of(queries), width) if queries else (width,)
        case Halo() | Loaded() | Kept() | Pairs():
            return (1000 + 7 * index,)
    return (REQUESTS,)


def rows_of(segments: tuple[str, ...]) -> int:
    """Return a distinct number of rows for each segment, and the sum for joined segments."""
    total = 0
    for segment in segments:
        if segment.startswith("fixed"):
            total += REQUESTS * int(segment[5:])
        elif segment.startswith("grid"):
            total += 611 + 36 * int(segment[4:])
        else:
            name, _, region = segment.partition("@")
            total += 301 + 2 * (sum(map(ord, name)) % 97) + 200 * int(region or 0)
    return total


def rest_of(segments: tuple[str, ...]) -> int:
    """Return a distinct number of cached rows for each row set."""
    return 1009 + 2 * rows_of(segments)
