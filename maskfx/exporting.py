"""Exporting: torch.export of a module, quietly, and the spelling that the passes count on."""

from __future__ import annotations

import contextlib
import logging
import operator
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import fx
from torch.export import Dim
from torch.utils import _pytree as pytree

from maskfx.decisions import answers_of, going_by
from maskfx.numbers import few_numbers, symbolic_numbers
from maskfx.roles import Leaf
from maskfx.values import copy_of, has_meta


def export_as_answered(
    module: torch.nn.Module, inputs: Any, leaves: Sequence[Leaf], symbolic: bool
) -> tuple[torch.export.ExportedProgram, list[bool]]:
    """An export; where Python asks a tensor, it goes by the answers of a plain run."""
    if not has_meta(module, pytree.tree_leaves(inputs)):
        answers = answers_of(module, pytree.tree_map(copy_of, inputs))
        if answers:
            with going_by(module, answers):
                found = export(module, inputs, leaves, symbolic)
            if found.call_spec.out_spec.children()[1].num_leaves == len(answers):
                return found, answers
    return export(module, inputs, leaves, symbolic), []  # nothing is asked under export


def export(
    module: torch.nn.Module, inputs: Any, leaves: Sequence[Leaf], symbolic: bool
) -> torch.export.ExportedProgram:
    """torch.export with every dimension that has a role left to `Dim.AUTO`.

    So are whole numbers among the arguments: the picture's sizes, for models that make positions
    of them. Those that Python branches on are fixed by the export.
    """

    def dims(leaf: Leaf, value: Any) -> Any:
        if not leaf.tensor:
            return Dim.AUTO if symbolic and type(value) is int and value > 1 else None
        return {i: Dim.AUTO for i, r in enumerate(leaf.roles) if r and symbolic}

    values, spec = pytree.tree_flatten(inputs)
    shapes = pytree.tree_unflatten([dims(*pair) for pair in zip(leaves, values, strict=True)], spec)
    with torch.no_grad(), symbolic_numbers(module), few_numbers():
        program = torch.export.export(module, (), dict(inputs), dynamic_shapes=shapes, strict=False)
        if any(is_write(n) for g in graphs(program.graph_module) for n in g.nodes):
            program = program.run_decompositions({})
    return program


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Without torch's own reports of an attempt that fails: the notes keep the reason."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(before)


def is_write(node: fx.Node) -> bool:
    """Does the operator write into one of its inputs?"""
    target = node.target
    return isinstance(target, torch._ops.OpOverload) and bool(target._schema.is_mutable)


def graphs(module: torch.nn.Module) -> Iterator[fx.Graph]:
    """The graph of a module and of the regions it wraps."""
    for part in module.modules():
        if isinstance(part, fx.GraphModule):
            yield part.graph


def spell_views(module: torch.nn.Module) -> None:
    """view as reshape: the strides that a view counts on change when writes are taken out."""
    aten = torch.ops.aten
    for part in module.modules():
        if isinstance(part, fx.GraphModule):
            for node in part.graph.nodes:
                if node.target in (aten.view.default, aten._unsafe_view.default):
                    node.target = aten.reshape.default
            part.recompile()


def drop_refills(graph: fx.Graph) -> None:
    """Leave alone the buffers that a forward fills anew each time and never reads before."""
    for node in list(graph.nodes):
        if node.target is torch.ops.aten.copy_.default and not node.users:
            buffer = node.args[0]
            if buffer.op == "get_attr" and len(buffer.users) == 1:
                graph.erase_node(node)
                graph.erase_node(buffer)


def is_symbol_arithmetic(node: fx.Node) -> bool:
    """Sizes and arithmetic on them, which carry no data of a request."""
    return node.op == "call_function" and (
        node.target is torch.ops.aten.sym_size.int
        or (getattr(node.target, "__module__", "") in ("_operator", "math", "torch"))
        and node.target is not operator.getitem
        and not isinstance(node.meta.get("val"), (torch.Tensor, list, tuple))
    )
