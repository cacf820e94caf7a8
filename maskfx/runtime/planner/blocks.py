"""Blocks: a graph as stretches between its loads, and how many FLOPs each takes for a mask.

A block begins where the graph asks for loaded rows. FLOPs per active row follow from shapes alone;
of a request's sizes they are counted once, a mask then only multiplies.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from maskfx import ops
from maskfx.ir.program import Halo, Loaded, Program, Rest
from maskfx.runtime.backends.eager import first_uses
from maskfx.runtime.batch.flops import RowSet, count_rows
from maskfx.runtime.sites.active import ActiveSites

PerRow = dict[RowSet, float]
KINDS = 2  # what a block's FLOPs are told apart by: products with weights, and attention


@dataclass
class GraphBlock:
    """One stretch: the loaded inputs it reads, the region whose plan it obeys (0: none)."""

    region: int = 0
    names: list[str] = field(default_factory=list)
    flops: tuple[PerRow, PerRow] = field(default_factory=lambda: ({}, {}))  # by kind

    def work(self, sites: ActiveSites, batch: int) -> NDArray[np.float64]:
        """FLOPs for one request, by kind."""
        counts = (
            sum(each * count_of(sites, rows) for rows, each in kind.items()) for kind in self.flops
        )
        return batch * np.fromiter(counts, dtype=np.float64, count=KINDS)


def find_blocks(program: Program, sites: ActiveSites) -> list[GraphBlock]:
    """The blocks of a program for requests of these sizes; the first one reads nothing."""
    counted = count_rows(program, sites, 1).by_node
    blocks = [GraphBlock()]
    of_region: dict[int, GraphBlock] = {}
    for node, names in first_uses(program.module.graph):
        loaded = [n for n in names if isinstance(program.interface.inputs[n], Halo | Rest | Loaded)]
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
            each = blocks[-1].flops[node.target is ops.attend]
            each[rows] = each.get(rows, 0.0) + flops / max(count_of(sites, rows), 1)
    return blocks


def count_of(sites: ActiveSites, rows: RowSet) -> int:
    """Active rows; what has none belongs to the request as a whole."""
    return sum(map(sites.active_count, rows)) if rows else 1
