"""The sizes of a manifest's dimensions in a batch, and the least and greatest that they can be."""

from __future__ import annotations

from math import prod

from maskfx.errors import InputError
from maskfx.export.host.arguments import scaled_size
from maskfx.export.host.layout import Axis, tupled
from maskfx.export.host.rows import axis_size
from maskfx.export.host.sites import Sites
from maskfx.export.host.tables import BatchTables
from maskfx.ir.json_values import Document


def dimension_size(dimension: Document, tables: BatchTables) -> int:
    """Return the size of a dimension of rows, tables or requests in a batch."""
    layout = tables.layout
    match dimension["kind"]:
        case "requests":
            return tables.requests * int(dimension["times"])
        case "rows":
            return sum(sum(tables.counts(name)) for name in dimension["segments"])
        case "rest":
            return sum(tables.rest_counts(dimension["segments"]))
        case "keys":
            rest = tables.rest_counts(layout.images(dimension["segments"]))
            return sum(sum(tables.counts(name)) for name in dimension["segments"]) + sum(rest)
        case "halo":
            return sum(len(sites.window(dimension["window"])[1]) for sites in tables.each())
        case "loaded":
            cut = dimension["before"], dimension["after"]
            return sum(len(sites.missing(*cut)) for sites in tables.each())
        case "lines":
            (name,), axis = dimension["segments"], dimension["axis"]
            return sum(sites.numbered(name, axis)[1] for sites in tables.each())
        case "pairs":
            return sum(pairs_of(dimension, sites) for sites in tables.each())
    raise InputError(f"a dimension of kind {dimension['kind']!r} has no size in a batch")


def pairs_of(dimension: Document, sites: Sites) -> int:
    """Return the entries of one request's attention mask."""
    queries = sum(map(sites.active_count, dimension["queries"])) if dimension["queries"] else 1
    return int(dimension["heads"]) * queries * sum(map(sites.count, dimension["keys"]))


def call_size(dimension: Document, sites: Sites, batch: int) -> int | None:
    """Return the size of a dimension of one call's full values; None if only a graph knows it."""
    match dimension["kind"]:
        case "role":
            role, sizes = dimension["role"], sites.sizes
            return sizes[role] if role in sizes else scaled_size(role, sizes)
        case "axes":
            axes = [Axis(**tupled(axis)) for axis in dimension["axes"]]
            return prod(axis_size(axis, sites, batch) for axis in axes)
        case "requests":
            return batch * int(dimension["times"])
    return None
