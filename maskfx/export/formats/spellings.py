"""Spells operators of an exported graph as the translation to ONNX knows them.

An operator that it doesn't know is decomposed with all others, which traces the graph again.
"""

from __future__ import annotations

import operator
from dataclasses import replace
from typing import Any

import torch
from torch import fx
from torch.export import ExportedProgram

from maskfx.export.formats.complex_numbers import spell_complex
from maskfx.export.formats.regions import inline_regions
from maskfx.export.formats.sized import spell_groups, spell_pools
from maskfx.ir.geometry.lanes import int_hint

aten = torch.ops.aten
ATTENTION = aten.scaled_dot_product_attention.default
squeeze, unsqueeze = aten.squeeze.dim, aten.unsqueeze.default
SQUEEZES = (squeeze, aten.squeeze.dims, aten.squeeze.default)

Number = int | fx.Node  # a size: known, or a node that computes it


def spell(program: ExportedProgram) -> None:
    """Change a program's graph in place; it computes the same."""
    graph = program.graph_module.graph
    inline_regions(program.graph_module)
    drop_idle_squeezes(graph)
    spell_attention(program.graph_module)
    spell_copies(graph)
    spell_complex(program)
    widen_indices(graph)
    spell_casts(graph)
    cast_joined(graph)
    widen_einsums(graph)
    spell_outer_products(graph)
    spell_splits(graph)
    spell_repeats(graph)
    spell_rolls(graph)
    spell_pools(graph)
    spell_groups(graph)
    name_results(program)


def name_results(program: ExportedProgram) -> None:
    """Give the signature the names of the nodes that are the results now."""
    [output] = program.graph_module.graph.find_nodes(op="output")
    results: Any = output.args[0]
    for spec, node in zip(program.graph_signature.output_specs, results, strict=True):
        if isinstance(node, fx.Node):
            spec.arg = replace(spec.arg, name=node.name)


def drop_idle_squeezes(graph: fx.Graph) -> None:
    """Remove squeezes of axes that aren't one, which do nothing in PyTorch and fail in ONNX."""
    for node in list(graph.nodes):
        if node.op == "call_function" and node.target in SQUEEZES:
            before = node.args[0]
            if before.meta["val"].dim() == node.meta["val"].dim():
                node.replace_all_uses_with(before)
                graph.erase_node(node)


def spell_casts(graph: fx.Graph) -> None:
    """Spell casts as the translation to ONNX knows them without a decomposition."""
    for target in (aten.to.dtype, aten.to.dtype_layout):
        for node in graph.find_nodes(op="call_function", target=target):
            node.target, node.args = aten._to_copy.default, node.args[:1]
            node.kwargs = {"dtype": node.meta["val"].dtype}


def cast(value: fx.Node, dtype: torch.dtype, reader: fx.Node) -> fx.Node:
    """Return a value in another type, before an operator that reads it."""
    with reader.graph.inserting_before(reader):
        found = reader.graph.call_function(aten._to_copy.default, (value,), {"dtype": dtype})
    found.meta["val"] = value.meta["val"].to(dtype)
    return found


def cast_joined(graph: fx.Graph) -> None:
    """Cast values that are joined to the type of the result, as ONNX joins one type only."""
    for target in (aten.cat.default, aten.concat.default, aten.stack.default):
        for node in graph.find_nodes(op="call_function", target=target):
            wanted = node.meta["val"].dtype
            for part in dict.fromkeys(node.all_input_nodes):
                value = part.meta["val"]
                if not isinstance(value, torch.Tensor) or value.dtype == wanted:
                    continue
                node.replace_input_with(part, cast(part, wanted, node))


def spell_copies(graph: fx.Graph) -> None:
    """Spell copies into a value as what is copied, of the value's shape and type."""
    for node in graph.find_nodes(op="call_function", target=aten.copy.default):
        place, source = node.args[:2]
        into, value = place.meta["val"], source.meta["val"]
        if value.dtype != into.dtype:
            source = cast(source, into.dtype, node)
        node.target, node.args, node.kwargs = aten.expand_as.default, (source, place), {}


def widen_einsums(graph: fx.Graph) -> None:
    """Compute einsums of bfloat16, which ONNX doesn't have, in float32."""
    for node in graph.find_nodes(op="call_function", target=aten.einsum.default):
        value = node.meta["val"]
        if value.dtype != torch.bfloat16:
            continue
        for part in dict.fromkeys(node.all_input_nodes):
            node.replace_input_with(part, cast(part, torch.float32, node))
        node.meta["val"] = value.float()
        with graph.inserting_after(node):
            narrow = graph.call_function(aten._to_copy.default, (), {"dtype": value.dtype})
        narrow.meta["val"] = value
        node.replace_all_uses_with(narrow)
        narrow.args = (node,)


def widen_indices(graph: fx.Graph) -> None:
    """Give an indexed value numbers of 64 bits, the only ones that ONNX takes there."""
    for node in graph.find_nodes(op="call_function", target=aten.index.Tensor):
        for number in dict.fromkeys(node.all_input_nodes[1:]):
            value = number.meta["val"]
            if value.dtype in (torch.int64, torch.bool):
                continue
            node.replace_input_with(number, cast(number, torch.int64, node))


def spell_attention(module: fx.GraphModule) -> None:
    """Spell attention as the translation to ONNX accepts it.

    It wants four axes, a mask with all queries, and grouped heads where queries have more heads
    than keys and only there.
    """
    graph = module.graph
    for node in graph.find_nodes(op="call_function", target=ATTENTION):
        q, k = (value.meta["val"] for value in node.args[:2])
        if q.dim() == 4 and q.shape[1] == k.shape[1] and "enable_gqa" in node.kwargs:
            node.kwargs = {n: v for n, v in node.kwargs.items() if n != "enable_gqa"}
        elif q.dim() == 4 and q.shape[1] != k.shape[1]:  # one head of keys for all
            node.kwargs = {**node.kwargs, "enable_gqa": True}
        widen_mask(node)
        if q.dim() == 3:
            with graph.inserting_before(node):
                wide = [graph.call_function(unsqueeze, (value, 0)) for value in node.args[:3]]
            for value, old in zip(wide, node.args, strict=False):
                value.meta["val"] = old.meta["val"].unsqueeze(0)
            node.args = (*wide, *node.args[3:])
            with graph.inserting_after(node):
                narrow = graph.call_function(squeeze, (node, 0))
            narrow.meta["val"] = node.meta["val"]
            node.replace_all_uses_with(narrow)
            narrow.args = (node, 0)
            node.meta["val"] = node.meta["val"].unsqueeze(0)
        elif q.dim() > 4 and len(node.args) == 3 and "attn_mask" not in node.kwargs:
            merge_heads(graph, node)
    module.recompile()


def merge_heads(graph: fx.Graph, node: fx.Node) -> None:
    """Make one axis of all axes between the batch and the queries of an attention."""
    value = node.meta["val"]
    last = value.dim() - 3
    apart: list[Any] = list(value.shape[1 : last + 1])
    unknown = [axis for axis, size in enumerate(apart) if not isinstance(size, int)]
    with graph.inserting_before(node):
        merged = []
        sources: Any = node.args[:3]
        for old in sources:
            merged.append(graph.call_function(aten.flatten.using_ints, (old, 1, last)))
            merged[-1].meta["val"] = old.meta["val"].flatten(1, last)
        for axis in unknown[1:]:
            size = graph.call_function(aten.sym_size.int, (node.args[0], axis + 1))
            size.meta["val"] = apart[axis]
            apart[axis] = size
    if unknown:
        apart[unknown[0]] = -1
    node.args = tuple(merged)
    node.meta["val"] = value.flatten(1, last)
    with graph.inserting_after(node):
        whole = graph.call_function(aten.unflatten.int, (node, 1, apart))
    whole.meta["val"] = value
    node.replace_all_uses_with(whole)
    whole.args = (node, 1, apart)


def widen_mask(node: fx.Node) -> None:
    """Repeat an attention's mask for each query, if it has one row for all."""
    mask = node.args[3] if len(node.args) > 3 else node.kwargs.get("attn_mask")
    if not isinstance(mask, fx.Node):
        return
    queries: Any = node.args[0]
    value, asked = mask.meta["val"], queries.meta["val"]
    one = isinstance(value.shape[-2], int) and value.shape[-2] == 1
    if not one or isinstance(asked.shape[-2], int) and asked.shape[-2] == 1:
        return
    graph, outer = node.graph, [-1] * (value.dim() - 2)
    with graph.inserting_before(node):
        rows = graph.call_function(aten.sym_size.int, (queries, asked.dim() - 2))
        rows.meta["val"] = asked.shape[-2]
        wide = graph.call_function(aten.expand.default, (mask, [*outer, rows, -1]))
        wide.meta["val"] = value.expand([*outer, asked.shape[-2], -1])
    node.replace_input_with(mask, wide)


def spell_outer_products(graph: fx.Graph) -> None:
    """Spell outer products of vectors as products of a column and a row."""
    for node in graph.find_nodes(op="call_function", target=aten.outer.default):
        column: Any = node.args[0]
        with graph.inserting_before(node):
            made = graph.call_function(unsqueeze, (column, 1))
        made.meta["val"] = column.meta["val"].unsqueeze(1)
        node.target, node.args = aten.mul.Tensor, (made, node.args[1])


def spell_repeats(graph: fx.Graph) -> None:
    """Spell repeats by a size of the picture, which the translation to ONNX gets wrong.

    Before  y = repeat_interleave(x, n, 0)                                      (x is [b, c])
    After   y = reshape(expand(unsqueeze(x, 1), [-1, n, -1]), [-1, c])
    Keeps   repeats of a fixed number.
    """
    for node in graph.find_nodes(op="call_function", target=aten.repeat_interleave.self_int):
        value: Any = node.args[0]
        times, axis = node.args[1], (list(node.args) + [None] * 3)[2]
        rest = value.meta["val"].shape[1:]
        if not isinstance(times, fx.Node) or axis != 0 or not all(type(n) is int for n in rest):
            continue
        with graph.inserting_before(node):
            apart = graph.call_function(unsqueeze, (value, 1))
            sizes: list[Number] = [-1, times, *[-1] * len(rest)]
            wide = graph.call_function(aten.expand.default, (apart, sizes))
        apart.meta["val"] = value.meta["val"].unsqueeze(1)
        wide.meta["val"] = apart.meta["val"].expand([-1, times.meta["val"], *[-1] * len(rest)])
        node.target, node.args, node.kwargs = aten.reshape.default, (wide, [-1, *rest]), {}


def spell_splits(graph: fx.Graph) -> None:
    """Replace each part of a split by a slice.

    Before  parts = split_with_sizes(x, [2, n], 1); a = parts[0]; b = parts[1]
    After   a = slice(x, 1, 0, 2); b = slice(x, 1, 2, 2 + n)
    and     parts = chunk(x, 2, 1)                              (x has n columns)
    becomes a = slice(x, 1, 0, (n + 1) // 2); b = slice(x, 1, (n + 1) // 2, ...)
    Keeps   a split whose parts are passed on together.
    """
    for target in (aten.split_with_sizes.default, aten.split.Tensor, aten.chunk.default):
        for node in graph.find_nodes(op="call_function", target=target):
            if all(user.target is operator.getitem for user in node.users):
                spell_split(graph, node)


def spell_split(graph: fx.Graph, node: fx.Node) -> None:
    places: list[Any] = [*node.args, 0]
    value, sizes, axis = places[:3]
    if node.target is not aten.split_with_sizes.default:
        parts = node.meta["val"]
        if all(isinstance(part.shape[axis], int) for part in parts):
            sizes = [part.shape[axis] for part in parts]
        elif node.target is aten.chunk.default:
            sizes = [chunk_size(graph, node, value, sizes, axis)] * len(parts)
        else:
            sizes = [sizes] * len(parts)
    bounds: list[Number] = [0]
    with graph.inserting_before(node):
        for size in sizes:
            bounds.append(added(graph, bounds[-1], size))
    for part in list(node.users):
        number: Any = part.args[1]
        with graph.inserting_before(part):
            place = (value, axis, bounds[number], bounds[number + 1])
            made = graph.call_function(aten.slice.Tensor, place)
        made.meta = dict(part.meta)
        part.replace_all_uses_with(made)
        graph.erase_node(part)
    graph.erase_node(node)


def chunk_size(graph: fx.Graph, node: fx.Node, value: fx.Node, chunks: int, axis: int) -> fx.Node:
    """Return the size of each chunk but the last, which is symbolic."""
    with graph.inserting_before(node):
        whole = graph.call_function(aten.sym_size.int, (value, axis))
        whole.meta["val"] = value.meta["val"].shape[axis]
        size = graph.call_function(operator.floordiv, (added(graph, whole, chunks - 1), chunks))
    size.meta["val"] = node.meta["val"][0].shape[axis]
    return size


def spell_rolls(graph: fx.Graph) -> None:
    """Spell rolls by a part of the size of the picture as joins of two slices.

    Before  y = roll(x, [n], [2])
    After   y = cat([slice(x, 2, size - n, size), slice(x, 2, 0, size - n)], 2)
    Keeps   rolls by fixed numbers.
    """
    for node in graph.find_nodes(op="call_function", target=aten.roll.default):
        value, shifts, axes = ([*node.args, []])[:3]
        if not any(isinstance(shift, fx.Node) for shift in shifts) or not axes:
            continue
        with graph.inserting_before(node):
            for shift, axis in zip(shifts, axes, strict=True):
                value = rolled(graph, value, shift, axis)
        node.replace_all_uses_with(value)
        graph.erase_node(node)


def rolled(graph: fx.Graph, value: fx.Node, shift: Number, axis: int) -> fx.Node:
    """Return a value whose places are moved on by at most its size, which all its rolls do."""
    whole = graph.call_function(aten.sym_size.int, (value, axis))
    whole.meta["val"] = value.meta["val"].shape[axis]
    number = shift.meta["val"] if isinstance(shift, fx.Node) else shift
    forward = int_hint(number) >= 0
    first = graph.call_function(operator.sub, (whole if forward else 0, shift))
    first.meta["val"] = (whole.meta["val"] if forward else 0) - number
    parts = []
    for start, end in ((first, whole), (0, first)):
        parts.append(graph.call_function(aten.slice.Tensor, (value, axis, start, end)))
        low, high = (n.meta["val"] if isinstance(n, fx.Node) else n for n in (start, end))
        parts[-1].meta["val"] = value.meta["val"].narrow(axis, low, high - low)
    found = graph.call_function(aten.cat.default, (parts, axis))
    found.meta["val"] = value.meta["val"]
    return found


def added(graph: fx.Graph, one: Number, other: Number) -> Number:
    """Return the sum of two sizes."""
    if isinstance(one, int) and isinstance(other, int):
        return one + other
    if one == 0:
        return other
    made = graph.call_function(operator.add, (one, other))
    numbers = (n.meta["val"] if isinstance(n, fx.Node) else n for n in (one, other))
    made.meta["val"] = operator.add(*numbers)
    return made
