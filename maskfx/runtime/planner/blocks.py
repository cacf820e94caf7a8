"""Blocks: split a graph at its loads, and count the FLOPs of each block for a mask.

A block begins where the graph reads loaded rows. FLOPs per active row follow from shapes alone:
they are counted once for a request's sizes and multiplied by a mask's row counts.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import NDArray
from torch import fx

from maskfx import ops
from maskfx.ir.programs.program import Program
from maskfx.ir.programs.sources import Cached
from maskfx.runtime.backends.eager import first_uses
from maskfx.runtime.batch.flops import RowSet, count_rows
from maskfx.runtime.sites.active import ActiveSites

PerRow = dict[RowSet, float]
Sizes = tuple[tuple[str, int], ...]
FLOPS = 2  # kinds of a block's FLOPs: products with weights, and attention
KINDS = FLOPS + 1  # of its work: FLOPs, and batch elements, for what each of them takes by itself


@dataclass
class GraphBlock:
    """One block: the loaded inputs that it reads, and the region whose plan it has (0: none)."""

    region: int = 0
    names: list[str] = field(default_factory=list)
    flops: tuple[PerRow, PerRow] = field(default_factory=lambda: ({}, {}))  # by kind

    def work(self, sites: ActiveSites, batch: int) -> NDArray[np.float64]:
        """Return the work for one request, by kind."""
        counts = [
            sum(each * count_of(sites, rows) for rows, each in kind.items()) for kind in self.flops
        ]
        return batch * np.array([*counts, 1.0])


# by graph, and by the sizes of requests; counting the FLOPs of a graph takes longer than a plan
_known: WeakKeyDictionary[fx.GraphModule, dict[Sizes, list[GraphBlock]]] = WeakKeyDictionary()


def find_blocks(program: Program, sites: ActiveSites) -> list[GraphBlock]:
    """Return the blocks of a program for requests of these sizes; the first one loads nothing.

    They are the same objects for every planner, and aren't changed.
    """
    found = _known.setdefault(program.module, {})
    key = tuple(sorted(sites.sizes.items()))
    if key not in found:
        found[key] = counted_blocks(program, sites)
    return found[key]


def counted_blocks(program: Program, sites: ActiveSites) -> list[GraphBlock]:
    counted = count_rows(program, sites, 1).by_node
    blocks = [GraphBlock()]
    of_region: dict[int, GraphBlock] = {}
    for node, names in first_uses(program.module.graph):
        loaded = [n for n in names if isinstance(program.interface.inputs[n], Cached)]
        if loaded:
            region = program.interface.region_of(program.interface.inputs[loaded[0]])
            block = of_region.get(region) if region else None
            if block is None:
                block = GraphBlock(region)
                blocks.append(block)
                of_region[region] = block
            block.names += loaded
        if node in counted:
            rows, flops = counted[node]
            each = blocks[-1].flops[node.target in (ops.attend, ops.site_pair_sum)]
            each[rows] = each.get(rows, 0.0) + flops / max(count_of(sites, rows), 1)
    return blocks


def count_of(sites: ActiveSites, rows: RowSet) -> int:
    """Return the number of active rows; 1 for a node without row sets (per request)."""
    return sum(map(sites.active_count, rows)) if rows else 1
