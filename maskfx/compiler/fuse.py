"""Graphs in which steps that are quicker together are one operator."""

from __future__ import annotations

from collections.abc import Collection

from torch import fx

from maskfx.compiler.pieces import copied
from maskfx.ir.modules.lazy_module import over_same
from maskfx.passes.fuse_kernels import fuse_kernels
from maskfx.passes.read_packed_keys import SCALES, STEPS, read_packed_keys


def fused(
    module: fx.GraphModule, packed: Collection[str] = (), pointwise: bool = True
) -> fx.GraphModule:
    """Return a copy of a graph with fused operators.

    Args:
        module: The graph.
        packed: Inputs with cached rows that attention reads in 8 or 4 bits, as they are stored.
        pointwise: Whether to fuse steps without products too, for devices with kernels for them.
            Inductor fuses such steps by itself.
    """
    graph = copied(module)
    fuse_kernels(graph, pointwise)
    read_packed_keys(graph, packed)
    return over_same(module, graph)


__all__ = ["SCALES", "STEPS", "fused"]
