"""Graphs for devices with kernels: steps that a kernel computes together are one operator."""

from __future__ import annotations

from torch import fx

from maskfx.compiler.pieces import copied
from maskfx.passes.fuse_kernels import fuse_kernels


def fused(module: fx.GraphModule, pointwise: bool = True) -> fx.GraphModule:
    """Return a copy of a graph with fused operators.

    Args:
        module: The graph.
        pointwise: Whether to fuse steps without products too, which Inductor does by itself.
    """
    graph = copied(module)
    fuse_kernels(graph, pointwise)
    return fx.GraphModule(module, graph)
