"""Spells complex numbers as pairs of real ones, in an axis behind the others.

ONNX has a type for complex numbers and no operators for it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx
from torch._ops import OpOverload
from torch.export import ExportedProgram
from torch.fx.node import map_arg

from maskfx.errors import CompileError

aten = torch.ops.aten
# operators whose axes shift by none when an axis follows behind
MOVES = {
    *(
        aten.unsqueeze.default,
        aten.squeeze.dim,
        aten.squeeze.dims,
        aten.select.int,
        aten.slice.Tensor,
    ),
    *(aten.index_select.default, aten.cat.default, aten.stack.default, aten.split.Tensor),
    *(aten.split_with_sizes.default, aten.chunk.default, aten.unbind.int, aten.transpose.int),
    *(aten.flatten.using_ints, aten.unflatten.int, aten.sym_size.int),
    *(aten.select_scatter.default, aten.slice_scatter.default),
}
NEW_AXIS = {aten.unsqueeze.default, aten.stack.default}
SHAPES = {aten.reshape.default, aten.view.default, aten.expand.default, aten._unsafe_view.default}
SAME = {
    *(aten.clone.default, aten.contiguous.default, aten.alias.default, aten.neg.default),
    *(aten.add.Tensor, aten.sub.Tensor, aten.index.Tensor, aten.pad_sequence.default),
    aten.expand_as.default,
}
PADS = {aten.constant_pad_nd.default, aten.pad.default}
FILLS = ("constant", None, 0)  # with zeros
CASTS = {
    *(aten._to_copy.default, aten.to.dtype, aten.to.device, aten.to.dtype_layout),
    *(aten.detach.default, aten.lift_fresh_copy.default, aten.detach_.default),
}
CHECKS = {aten._assert_tensor_metadata.default}
AXES = ("dim", "dim0", "dim1", "start_dim", "end_dim")
Rule = Callable[["ComplexPairs", fx.Node], None]


def spell_complex(program: ExportedProgram) -> None:
    """Replace complex values, constants among them, in an exported program."""
    nodes = list(program.graph.nodes)
    if not any(is_complex(node) for node in nodes):
        return
    pairs = ComplexPairs(program)
    for node in nodes:
        pairs.spell(node)
    program.graph.lint()
    program.graph_module.recompile()


def is_complex(node: fx.Node) -> bool:
    value = node.meta.get("val")
    values = value if isinstance(value, list | tuple) else [value]
    return any(isinstance(each, Tensor) and each.is_complex() for each in values)


class ComplexPairs:
    """Rewrites the nodes of a graph in order.

    Attributes:
        graph: the graph.
        ranks: by node that is pairs now, the rank that it had.
    """

    def __init__(self, program: ExportedProgram) -> None:
        self.program, self.graph = program, program.graph
        self.ranks: dict[fx.Node, int] = {}
        signature = program.graph_signature
        self._weights = {**signature.inputs_to_parameters, **signature.inputs_to_buffers}
        self._weights |= signature.inputs_to_lifted_tensor_constants

    def spell(self, node: fx.Node) -> None:
        if node.op == "placeholder":
            if is_complex(node):
                self._spell_weight(node)
            return
        if node.op == "output" or not (self._reads_pairs(node) or is_complex(node)):
            return
        source = node.args[0]
        cast = node.target in CASTS and source in self.ranks and is_complex(node)
        if node.target in CHECKS:
            self.graph.erase_node(node)
        elif cast or node.target in (aten.view_as_complex.default, aten.view_as_real.default):
            with self.graph.inserting_before(node):  # whether readers see pairs depends on this
                self._replace(node, self._call(aten.alias.default, source))
        elif node.target is aten.mul.Tensor:
            self._multiply(node)
        elif getattr(node.target, "__name__", "") == "getitem" or node.target in SAME:
            if node.target in (aten.add.Tensor, aten.sub.Tensor) and not all(
                arg in self.ranks for arg in node.args
            ):
                self._refuse(node)
            self._keep(node)
        elif node.target in MOVES:
            self._name_axes(node)
            self._keep(node)
        elif node.target in SHAPES:
            node.args = (node.args[0], [*node.args[1], 2])  # type: ignore[misc]
            self._keep(node)
        elif node.target is aten.repeat.default:
            node.args = (node.args[0], [*node.args[1], 1])  # type: ignore[misc]
            self._keep(node)
        elif node.target in PADS and all(each in FILLS for each in node.args[2:]):
            node.args = (node.args[0], [0, 0, *node.args[1]], *node.args[2:])  # type: ignore[misc]
            self._keep(node)
        elif node.target is aten.gather.default:
            self._gather(node)
        elif node.target is aten.where.self and all(arg in self.ranks for arg in node.args[1:]):
            with self.graph.inserting_before(node):
                each = self._call(aten.unsqueeze.default, node.args[0], -1)
            node.args = (each, *node.args[1:])
            self._keep(node)
        elif node.target is aten.permute.default:
            rank = self.ranks[node.args[0]]  # type: ignore[index]
            axes = [int(axis) % rank for axis in node.args[1]]  # type: ignore[union-attr, arg-type]
            node.args = (node.args[0], [*axes, rank])
            self._keep(node)
        elif node.target is aten.zeros.default:
            node.args = ([*node.args[0], 2],)  # type: ignore[misc]
            node.kwargs = {**node.kwargs, "dtype": node.meta["val"].real.dtype}
            self._keep(node)
        elif node.target in (aten.polar.default, aten.complex.default):
            self._combine(node)
        else:
            self._refuse(node)

    def _reads_pairs(self, node: fx.Node) -> bool:
        return any(each in self.ranks for each in node.all_input_nodes)

    def _refuse(self, node: fx.Node) -> None:
        raise CompileError(
            f"export: complex numbers in {node.target}, which has no translation to ONNX; export "
            "the denoiser as aoti or pt2"
        )

    def _spell_weight(self, node: fx.Node) -> None:
        name = self._weights.get(str(node.target))
        if name is None:
            raise CompileError(
                f"export: the input {node.target} is complex, which ONNX has no operators for; "
                "export the denoiser as aoti or pt2"
            )
        for table in (self.program.state_dict, self.program.constants):
            if name in table:
                table[name] = torch.view_as_real(table[name]).contiguous()
        self._keep(node)

    def _keep(self, node: fx.Node) -> None:
        """Note that a node is pairs now; one whose result is real is left as it is."""
        if not is_complex(node):
            return
        value = node.meta["val"]
        first = value[0] if isinstance(value, list | tuple) else value
        self.ranks[node] = first.dim()
        node.meta["val"] = map_values(value)

    def _replace(self, node: fx.Node, by: fx.Node) -> None:
        node.replace_all_uses_with(by)
        if is_complex(node):
            self.ranks[by] = node.meta["val"].dim()
        self.graph.erase_node(node)

    def _name_axes(self, node: fx.Node) -> None:
        """Count axes from the front, since an axis follows behind."""
        source = node.args[0]
        source = source[0] if isinstance(source, list | tuple) else source
        rank = self.ranks[source] + (node.target in NEW_AXIS)  # type: ignore[index]
        schema = node.target._schema.arguments  # type: ignore[union-attr]
        given = dict(zip([a.name for a in schema], node.args, strict=False)) | dict(node.kwargs)
        for argument in schema:
            axis = given.get(argument.name, argument.default_value)
            if argument.name not in AXES:
                continue
            if isinstance(axis, int):
                given[argument.name] = axis % rank
            elif isinstance(axis, list | tuple):
                given[argument.name] = [each % rank for each in axis]
        places = [a.name for a in schema if a.name in given and not a.kwarg_only]
        node.args = tuple(given[a.name] for a in schema[: len(places)])
        node.kwargs = {a.name: given[a.name] for a in schema if a.kwarg_only and a.name in given}

    def _gather(self, node: fx.Node) -> None:
        """Let an index of numbers choose both parts of each."""
        source, axis, index = node.args[:3]
        with self.graph.inserting_before(node):
            each = self._call(aten.unsqueeze.default, index, -1)
            each = self._call(aten.expand.default, each, [*[-1] * node.meta["val"].dim(), 2])
        node.args = (source, int(axis) % self.ranks[source], each)  # type: ignore[index, arg-type]
        self._keep(node)

    def _multiply(self, node: fx.Node) -> None:
        a, b = node.args
        with self.graph.inserting_before(node):
            if a in self.ranks and b in self.ranks:
                (ar, ai), (br, bi) = self._parts(a), self._parts(b)
                real = self._call(aten.sub.Tensor, self._product(ar, br), self._product(ai, bi))
                other = self._call(aten.add.Tensor, self._product(ar, bi), self._product(ai, br))
                made = self._call(aten.stack.default, [real, other], -1)
            else:
                pair, scale = (a, b) if a in self.ranks else (b, a)
                if isinstance(scale, fx.Node) and isinstance(scale.meta["val"], Tensor):
                    scale = self._call(aten.unsqueeze.default, scale, -1)
                made = self._product(pair, scale)
        self._replace(node, made)

    def _combine(self, node: fx.Node) -> None:
        """Spell a complex number that is made from its parts, or from length and angle."""
        a, b = node.args
        with self.graph.inserting_before(node):
            if node.target is aten.polar.default:
                halves = [self._call(turn, b) for turn in (aten.cos.default, aten.sin.default)]
                a, b = (self._product(a, half) for half in halves)
            made = self._call(aten.stack.default, [a, b], -1)
        self._replace(node, made)

    def _parts(self, pair: fx.node.Argument) -> tuple[fx.Node, fx.Node]:
        return tuple(self._call(aten.select.int, pair, -1, half) for half in (0, 1))  # type: ignore[return-value]

    def _product(self, a: fx.node.Argument, b: fx.node.Argument) -> fx.Node:
        return self._call(aten.mul.Tensor, a, b)

    def _call(self, target: OpOverload, *args: fx.node.Argument) -> fx.Node:
        made: fx.Node = self.graph.call_function(target, args)
        made.meta["val"] = target(*map_arg(args, lambda node: node.meta["val"]))
        return made


def map_values(value: Any) -> object:
    """Return complex values as pairs."""
    if isinstance(value, list | tuple):
        return type(value)(map_values(each) for each in value)
    return torch.view_as_real(value) if value.is_complex() else value
