"""Exports a program's graph by torch.export, with a number of rows of each input left free.

What is compiled or saved outside of this process begins here: Inductor's code, and every format of
`maskfx.export`. Masks, sizes and numbers of requests are data of the exported graph.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, fx
from torch.export import Dim, ExportedProgram
from torch.fx.experimental import _config as symbol_config

from maskfx.compiler.source_dtypes import dtype_of
from maskfx.ir.geometry.lanes import is_image, shape_hint
from maskfx.ir.programs.program import Program
from maskfx.ir.programs.source_sizes import (
    AnyCount,
    HaloRows,
    KeptRows,
    KeyRows,
    LineCount,
    LoadedRows,
    PairEntries,
    PerRequest,
    ReadRows,
    RestRows,
    Rows,
    RowUnits,
    Size,
    TwinSize,
    sizes_of,
)

REQUESTS = 3  # of the example; a number that is no special case


def export_rows(
    program: Program, graph: fx.GraphModule, inputs: Mapping[str, Tensor]
) -> ExportedProgram:
    """Export a program's graph with a separate symbol for each number of rows.

    Args:
        program: the program.
        graph: its graph, or one with the same inputs.
        inputs: an example of each input of the graph, in their order.
    """
    sources, taps = program.interface.inputs, program.interface.taps
    sizes = {name: sizes_of(sources[name], taps, own.shape) for name, own in inputs.items()}
    example = {n: stand_in(i, inputs[n], own) for i, (n, own) in enumerate(sizes.items())}
    shapes = {name: dict.fromkeys(free_axes(own), Dim.AUTO) for name, own in sizes.items()}
    with torch.no_grad(), symbol_config.patch(use_duck_shape=False):  # type: ignore[attr-defined]
        return torch.export.export(graph, (), example, dynamic_shapes=shapes, strict=False)


def blank_inputs(program: Program) -> dict[str, Tensor]:
    """Return an example of each input, of zeros: shapes and dtypes are known from the program."""
    found, taps = {}, program.interface.taps
    for node in program.module.graph.find_nodes(op="placeholder"):
        source, value = program.interface.inputs[str(node.target)], node.meta.get("val")
        known = shape_hint(value) if isinstance(value, Tensor) else None
        shape = [smallest(size) for size in sizes_of(source, taps, known)]
        found[str(node.target)] = torch.zeros(shape, dtype=dtype_of(source, taps, value))
    return found


def smallest(size: Size) -> int:
    """Return a size for one request, and 1 row of each kind."""
    match size:
        case int():
            return size
        case PerRequest(times):
            return times
    return 1


def free_axes(sizes: Sequence[Size]) -> tuple[int, ...]:
    """Return the axes whose size changes from batch to batch."""
    return tuple(axis for axis, size in enumerate(sizes) if not isinstance(size, int))


def stand_in(index: int, value: Tensor, sizes: Sequence[Size]) -> Tensor:
    """Return an input of the same kind with numbers of rows that are no special case (0 or 1)."""
    shape = list(value.shape)
    for axis in free_axes(sizes):
        shape[axis] = example_size(index, sizes[axis])
    return value.new_zeros(shape)


def example_size(index: int, size: Size) -> int:
    """Return an example of a size; sizes that are equal in every batch are equal."""
    match size:
        case Rows(segments):
            return rows_of(segments)
        case RestRows(segments):
            return rest_of(segments)
        case KeyRows(segments):
            images = tuple(filter(is_image, segments))
            return rows_of(segments) + (rest_of(images) if images else 0)
        case HaloRows(window):
            return 1000 + 7 * (sum(map(ord, window.name)) % 97)
        case LoadedRows() | KeptRows() | PairEntries() | LineCount() | AnyCount():
            return 1000 + 7 * index
        case PerRequest(times):
            return REQUESTS * times
        case ReadRows():
            return 3000 + 7 * (sum(map(ord, repr(size))) % 97)
        case RowUnits(segments, heads):
            return heads * rows_of(segments)
        case TwinSize():
            return REQUESTS
    return size


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
