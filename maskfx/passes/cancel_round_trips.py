"""Removes the marks that narrowing leaves: pairs cancel, the rest become inputs and outputs."""

from __future__ import annotations

import dataclasses

from torch import fx

from maskfx.ir.geometry.lanes import lane_of
from maskfx.ir.programs.sources import Tapped
from maskfx.passes.context import PassContext, Unsupported, from_rows, to_rows


def cancel_round_trips(graph: fx.Graph, ctx: PassContext) -> int:
    """Cancel pairs of marks, so that rows flow from inputs to outputs.

    Before  y = to_rows(from_rows(rows)); z = to_rows(placeholder)
    After   y = rows;                     z = placeholder (which now holds rows)
    Keeps   nothing: a full value that is still used has no rule, and is refused by name.
    """
    count = 0
    if not any(node.target in (to_rows, from_rows) for node in graph.nodes):
        return 0
    for node in list(graph.nodes):
        if node.target is not to_rows:
            continue
        source = node.args[0]
        assert isinstance(source, fx.Node)
        rows = source.args[0] if source.target is from_rows else source
        assert isinstance(rows, fx.Node)
        if source.target is not from_rows and source.op != "placeholder":
            raise Unsupported(source, f"no rule narrows {source.target}")
        move_taps(node, rows, ctx)
        node.replace_all_uses_with(rows)
        graph.erase_node(node)
        count += 1
    output = next(n for n in graph.nodes if n.op == "output")
    flat = []
    for node in flatten_output(output):
        lane = lane_of(node)
        ctx.interface.outputs.append(lane)
        if node.target is from_rows:
            flat.append(node.args[0])
        elif lane is not None and not lane.has_sites:
            flat.append(node)
        else:
            raise Unsupported(node, f"no rule narrows {node.target}")
    output.args = (tuple(flat),)
    for node in reversed(list(graph.nodes)):
        if node.target is from_rows:
            if node.users:
                user = next(iter(node.users))
                raise Unsupported(user, f"no rule narrows {user.target}")
            graph.erase_node(node)
            count += 1
    return count


def move_taps(mark: fx.Node, rows: fx.Node, ctx: PassContext) -> None:
    """Move the taps of a mark to the rows that it stood for, each recorded once."""
    for key in [k for k in mark.meta if str(k).startswith("tap")]:
        name = mark.meta[key]
        kept = rows.meta.setdefault(key, name)
        if kept == name:
            continue
        del ctx.interface.taps[name]
        for given, source in ctx.interface.inputs.items():
            if isinstance(source, Tapped) and source.tap == name:
                ctx.interface.inputs[given] = dataclasses.replace(source, tap=kept)


def flatten_output(output: fx.Node) -> list[fx.Node]:
    found: list[fx.Node] = []
    fx.map_arg(output.args, lambda n: found.append(n))
    return found
