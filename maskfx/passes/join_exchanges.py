"""Sends the border rows of a window in one message with the moments of the norm before it.

This pass runs on copies of finished graphs, after `add_exchanges`. The rows that a window reads of
other ranks can't be normalised before all moments are known, so they travel as they are before the
norm, and the rank that reads them normalises them.
"""

from __future__ import annotations

import operator

from torch import fx

from maskfx.ir.programs.sources import Exchanged, Neighbours, Owner, ReadOwner
from maskfx.passes.add_exchanges import name_of
from maskfx.passes.context import Editor, PassContext, aten, op_name, ops
from maskfx.passes.operators import POINTWISE

CASTS = {"to", "_to_copy", "clone", "contiguous"}


def join_exchanges(graph: fx.Graph, ctx: PassContext) -> int:
    """Exchange a norm's input rows and its moments together, before the norm.

    Before  s = group_scale(x, peer_moments(x, rest, ...), ...)
            y = gather(exchange([silu(scale_shift(x, s, owner))]), halo, table)
    After   rows, moments = exchange_normed(x, rest, ...); s = group_scale(x, moments, ...)
            y = gather(silu(scale_shift(rows, s, read_owner)), halo, table)
    Keeps   windows whose rows are made of more than a norm and operators on each number alone, and
            norms whose moments travel with another window already.
    """
    count = 0
    for node in list(graph.find_nodes(op="call_function", target=ops.exchange)):
        source = ctx.interface.inputs.get(str(node.args[1].target))
        if len(node.args[0]) != 1 or not isinstance(source, Exchanged):
            continue
        if isinstance(source.reader, Neighbours) and (steps := steps_after_norm(node, ctx)):
            join(graph, ctx, node, source, steps)
            count += 1
    return count


def steps_after_norm(node: fx.Node, ctx: PassContext) -> list[fx.Node]:
    """Return the operators from a norm to an exchange of its rows; [] if there are others."""
    steps: list[fx.Node] = []
    value = node.args[0][0]  # type: ignore[index]
    while isinstance(value, fx.Node) and value.op == "call_function":
        steps.insert(0, value)
        if value.target is ops.scale_shift:
            return steps if joins(value, ctx) else []
        if op_name(value) not in POINTWISE | CASTS:
            return []
        others = [n for n in value.all_input_nodes if n is not value.args[0]]
        if not all(by_request(n, ctx) or n.op == "get_attr" for n in others):
            return []
        value = value.args[0]
    return []


def joins(norm: fx.Node, ctx: PassContext) -> bool:
    """Return True if a norm's moments are those of the rows that it scales, and sent alone."""
    rows, scales, owner = norm.args
    assert isinstance(scales, fx.Node)
    if scales.target is not ops.group_scale or owner_of(owner, ctx) is None:
        return False
    moments = scales.args[1]
    if not isinstance(moments, fx.Node) or moments.target is not ops.peer_moments:
        return False
    return moments.args[0] is rows and scales.args[0] is rows


def owner_of(node: object, ctx: PassContext) -> Owner | None:
    if not isinstance(node, fx.Node) or node.op != "placeholder":
        return None
    source = ctx.interface.inputs.get(str(node.target))
    return source if isinstance(source, Owner) else None


def by_request(node: fx.Node, ctx: PassContext) -> bool:
    """Return True for a value of each request, picked for each row."""
    if node.target is not aten.index_select.default or node.args[1] != 0:
        return False
    return owner_of(node.args[2], ctx) is not None


def join(
    graph: fx.Graph, ctx: PassContext, node: fx.Node, sent: Exchanged, steps: list[fx.Node]
) -> None:
    norm = steps[0]
    moments: fx.Node = norm.args[1].args[1]  # type: ignore[union-attr, assignment]
    before = Editor(graph, ctx, moments)
    *given, number = moments.args
    both = before.emit(ops.exchange_normed, *given, *node.args[1:4], number)
    rows, merged = (before.emit(operator.getitem, both, i) for i in (0, 1))
    moments.replace_all_uses_with(merged)
    graph.erase_node(moments)
    edit = Editor(graph, ctx, node)
    name = f"read_owner_{name_of(sent.segments, sent.reader)}"
    owner = edit.input(name, ReadOwner(sent.segments, sent.reader))
    known = {norm.args[0]: rows}
    for step in steps:
        for other in step.all_input_nodes:
            if other not in known and by_request(other, ctx):
                known[other] = edit.emit(aten.index_select.default, other.args[0], 0, owner)
            elif owner_of(other, ctx) is not None:
                known[other] = owner
        args, kwargs = fx.map_arg((step.args, dict(step.kwargs)), lambda n: known.get(n, n))
        known[step] = edit.emit(step.target, *args, **kwargs)  # type: ignore[arg-type]
    for user in list(node.users):
        user.replace_all_uses_with(known[steps[-1]])
        graph.erase_node(user)
    graph.erase_node(node)
