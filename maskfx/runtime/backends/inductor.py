"""Compiles a rewritten graph with Inductor, once for all batches.

The graph is exported with a separate symbol for each input's first dimension and compiled for
these symbols, without guards: masks, sizes and numbers of requests are data.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch._inductor as inductor
import torch._inductor.config as inductor_config
from torch import Tensor, fx, nn
from torch.export import Dim
from torch.fx.experimental import _config as symbol_config

from maskfx import ops
from maskfx.config import Settings
from maskfx.ir.program import (
    Enter,
    Given,
    Halo,
    Loaded,
    Owner,
    Pairs,
    Parents,
    Program,
    Rest,
    Spans,
    Subsites,
)
from maskfx.runtime.backends.eager import Fetch

aten = torch.ops.aten
compiles = 0


class Rows(nn.Module):
    """Wraps the graph as a module whose inputs are positional."""

    def __init__(self, graph: fx.GraphModule) -> None:
        super().__init__()
        self.graph_module = graph

    def forward(self, *inputs: Tensor) -> Any:
        return self.graph_module(*inputs)


def compile_rows(
    program: Program, settings: Settings, inputs: Sequence[Tensor]
) -> Callable[[Fetch], Sequence[Tensor]]:
    """Compile a program; the result fetches its inputs by name and accepts any number of rows."""
    global compiles
    compiles += 1
    example = [stand_in(i, t, program) for i, t in enumerate(inputs)]
    dims = tuple({0: Dim.AUTO} if varies(s) else {} for s in program.interface.inputs.values())
    with (
        torch.no_grad(),
        symbol_config.patch(use_duck_shape=False),  # type: ignore[attr-defined]
        inductor_config.patch(freezing=settings.prepack),
    ):
        rows = Rows(with_fusible_norms(program.module))
        exported = torch.export.export(rows, tuple(example), dynamic_shapes=(dims,), strict=False)
        module = exported.module(check_guards=False)
        assert isinstance(module, fx.GraphModule)
        fakes = [n.meta["val"] for n in module.graph.nodes if n.op == "placeholder"]
        artifact = inductor.standalone_compile(module, fakes, dynamic_shapes="from_graph")

    names = list(program.interface.inputs)

    def run(fetch: Fetch) -> Sequence[Tensor]:
        with torch.no_grad():
            result: Sequence[Tensor] = artifact(*map(fetch, names))
        return result

    return run


def with_fusible_norms(module: fx.GraphModule) -> fx.GraphModule:
    """Expand the second half of each group norm, so that Inductor fuses it with what follows."""
    graph = fx.Graph()
    graph.output(graph.graph_copy(module.graph, {}))
    for node in graph.find_nodes(op="call_function", target=ops.scale_shift):
        rows, scales, owner = node.args
        with graph.inserting_before(node):
            halves = [graph.call_function(aten.select.int, (scales, 1, i)) for i in (0, 1)]
            scale, shift = (graph.call_function(aten.index_select, (h, 0, owner)) for h in halves)
            wide = graph.call_function(aten.addcmul.default, (shift, rows, scale))
            narrow = graph.call_function(aten.type_as.default, (wide, rows))
        node.replace_all_uses_with(narrow)
        graph.erase_node(node)
    return fx.GraphModule(module, graph)


def varies(source: Any) -> bool:
    """Return True if the first dimension of this input changes from batch to batch."""
    return not (isinstance(source, Given) and source.lane.kind == "const")


def stand_in(index: int, value: Tensor, program: Program) -> Tensor:
    """Return an input of the same kind with a number of rows that is no special case (0 or 1)."""
    source = list(program.interface.inputs.values())[index]
    if not varies(source):
        return value
    requests = 3
    match source:
        case Given(_, _, lane) if lane.kind == "rows":
            count = rows_of(lane.segments)
        case Owner(segments) | Enter(_, segments):
            count = rows_of(segments)
        case Parents(_, target):
            count = rows_of((f"grid{target}",))
        case Subsites(_, fine, _):
            count = rows_of((f"grid{fine}",))
        case Halo() | Rest() | Loaded() | Pairs():
            count = 1000 + 7 * index
        case Spans() | Given():
            count = requests
        case _ if value.dim() == 2 and hasattr(source, "window"):
            count = rows_of((f"grid{source.window.target}",))
        case _:
            count = requests
    return value.new_zeros((count, *value.shape[1:]))


def rows_of(segments: tuple[str, ...]) -> int:
    """Return a distinct number of rows for each segment, and the sum for joined segments."""
    total = 0
    for segment in segments:
        if segment.startswith("fixed"):
            total += 3 * int(segment[5:])
        elif segment.startswith("grid"):
            total += 611 + 36 * int(segment[4:])
        else:
            name, _, region = segment.partition("@")
            total += 301 + 2 * (sum(map(ord, name)) % 97) + 200 * int(region or 0)
    return total
