"""Passes complex values between graphs as pairs of real numbers, which every format has.

A side graph returns the rotations of a position embedding, say, and the masked graph reads them.
"""

from __future__ import annotations

from collections.abc import Set
from dataclasses import replace

import torch
from torch import Tensor, fx

from maskfx.compiler.compile import Compilation
from maskfx.ir.geometry.lanes import Feature, Lane
from maskfx.ir.modules.lazy_module import LazyModule
from maskfx.ir.programs.program import Program, SideGraph
from maskfx.ir.programs.sources import Given, Source

aten = torch.ops.aten


def with_real_inputs(compilation: Compilation) -> Compilation:
    """Return the compilation with each complex value of a side graph as pairs: (..., 2)."""
    program, sides = compilation.program, (compilation.request, compilation.dense)
    if program is None:
        return compilation
    request, dense = (set() if side is None else complex_results(side) for side in sides)
    if not request and not dense:
        return compilation
    return replace(
        compilation,
        program=reading_pairs(program, {"request": request, "dense": dense}),
        request=compilation.request and returning_pairs(compilation.request, request),
        dense=compilation.dense and returning_pairs(compilation.dense, dense),
    )


def results_of(module: fx.GraphModule) -> tuple[fx.Node, ...]:
    results: tuple[fx.Node, ...] = tuple(module.graph.output_node().args[0])  # type: ignore[arg-type]
    return results


def complex_results(side: SideGraph) -> set[int]:
    """Return the numbers of the side graph's complex results."""
    found = enumerate(results_of(side.module))
    return {index for index, node in found if is_complex(node.meta.get("val"))}


def is_complex(value: object) -> bool:
    return isinstance(value, Tensor) and value.is_complex()


def paired(lane: Lane) -> Lane:
    return Lane((*lane.dims, (Feature(2),)))


def returning_pairs(side: SideGraph, indices: Set[int]) -> SideGraph:
    """Return a copy of a side graph that returns these results as pairs."""
    graph = fx.Graph()
    values: dict[fx.Node, fx.Node] = {}
    graph.graph_copy(side.module.graph, values)
    results = [values[node] for node in results_of(side.module)]
    for index in indices:
        pair = graph.call_function(aten.view_as_real.default, (results[index],))
        pair.meta["val"] = torch.view_as_real(results[index].meta["val"])
        results[index] = pair
    graph.output(tuple(results))
    lanes = [paired(lane) if i in indices else lane for i, lane in enumerate(side.lanes)]
    return replace(side, module=LazyModule(side.module, graph), lanes=lanes)


def reading_pairs(program: Program, indices: dict[str, set[int]]) -> Program:
    """Return the program, whose graphs are changed in place, with pairs for these inputs."""
    inputs: dict[str, Source] = {}
    names = set()
    for name, source in program.interface.inputs.items():
        inputs[name] = source
        if isinstance(source, Given) and source.index in indices.get(source.origin, ()):
            inputs[name] = replace(source, lane=paired(source.lane))
            names.add(name)
    for module in (program.module, program.recording):
        for node in module.graph.find_nodes(op="placeholder"):
            if str(node.target) in names:
                read_pair(node)
        module.recompile()
    return replace(program, interface=replace(program.interface, inputs=inputs))


def read_pair(place: fx.Node) -> None:
    """Let an input be pairs, and its readers read complex numbers made from them."""
    graph, value = place.graph, place.meta["val"]
    last = graph.find_nodes(op="placeholder")[-1]
    with graph.inserting_after(last):
        made = graph.call_function(aten.view_as_complex.default, (place,))
    place.replace_all_uses_with(made, delete_user_cb=lambda user: user is not made)
    made.meta = dict(place.meta)
    place.meta["val"] = torch.view_as_real(value)
