"""Lets attention read cached keys and values as they are stored, in 8 or 4 bits.

This pass isn't in the pipeline: it runs on copies of finished graphs, for devices with kernels.
"""

from __future__ import annotations

from collections.abc import Collection

from torch import fx

from maskfx import ops

STEPS, SCALES = "__steps", "__scales"  # what stands behind the name of an input


def read_packed_keys(graph: fx.Graph, packed: Collection[str]) -> int:
    """Replace inputs with cached keys and values by inputs with their steps and scales.

    Before  y = attend(q, k, v, rest_k, rest_v, ...)
    After   y = attend_packed(q, k, v, rest_k__steps, rest_k__scales, rest_v__steps, ...)
    Keeps   attention of which only keys or only values are packed.

    Args:
        graph: A graph of a program.
        packed: The names of inputs whose rows are packed.
    """
    places: dict[str, fx.Node] = {}
    last = [*graph.find_nodes(op="placeholder")][-1]
    count = 0
    for node in list(graph.find_nodes(op="call_function", target=ops.attend)):
        names = [str(n.target) for n in node.args[3:5] if n.op == "placeholder"]
        if len(names) < 2 or not set(names) <= set(packed):
            continue
        for name in (name + part for name in names for part in (STEPS, SCALES)):
            if name not in places:
                with graph.inserting_after(last):
                    last = places[name] = graph.placeholder(name)
        halves = [places[name + part] for name in names for part in (STEPS, SCALES)]
        with graph.inserting_before(node):
            arguments = (*node.args[:3], *halves, *node.args[5:])
            new = graph.call_function(ops.attend_packed, arguments)
        new.meta = dict(node.meta)
        node.replace_all_uses_with(new)
        graph.erase_node(node)
        count += 1
    if count:
        graph.lint()
    return count
