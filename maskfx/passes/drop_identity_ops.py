"""Removes operators that return their input."""

from __future__ import annotations

import operator

import torch
from torch import fx

from maskfx.ir.geometry.lanes import int_hint
from maskfx.passes.context import PassContext, argument, node_at, op_name

SAME = frozenset(
    ["alias", "detach", "lift_fresh_copy", "contiguous", "dropout", "feature_dropout", "clone"]
)
MAYBE = frozenset(
    [
        "to",
        "_to_copy",
        "type_as",
        "float",
        "half",
        "double",
        "expand",
        "slice",
        "view",
        "reshape",
        "mul",
        "div",
        "add",
        "sub",
        "copy",
    ]
)


def drop_identity_ops(graph: fx.Graph, ctx: PassContext) -> int:
    """Replace each identity op by its input.

    Before  y = alias(x); z = relu(y)
    After   z = relu(x)
    and     y = copy(x, z)
    becomes z
    Before  y = split(x, [n])[0]
    After   x
    Keeps   an identity op feeding the output: dropping it would alias input and output.
    """
    count = 0
    for node in list(graph.nodes):
        if node.op != "call_function" or not is_identity(node):
            continue
        if any(user.op == "output" for user in node.users):
            continue
        node.replace_all_uses_with(result_of(node))
        graph.erase_node(node)
        count += 1
    return count


def result_of(node: fx.Node) -> fx.Node:
    """Return the input that an identity op returns; a copy into a value returns what is copied."""
    if node.target is operator.getitem:
        return node_at(node_at(node, 0), 0)
    return node_at(node, 1 if op_name(node) == "copy" else 0)


def is_identity(node: fx.Node) -> bool:
    name, source = op_name(node), node.args[0] if node.args else None
    if isinstance(source, fx.Node) and node.target is operator.getitem:
        parts = source.args[1] if op_name(source) == "split_with_sizes" else ()
        return isinstance(parts, (list, tuple)) and len(parts) == 1
    if not isinstance(source, fx.Node) or not isinstance(node.target, torch._ops.OpOverload):
        return False
    if name == "copy":
        source = node_at(node, 1)
    if name in SAME:
        return not name.endswith("dropout") or not argument(node, 2, "train", False)
    if name not in MAYBE:
        return False
    before, after = source.meta.get("val"), node.meta.get("val")
    if not isinstance(before, torch.Tensor) or not isinstance(after, torch.Tensor):
        return False
    if before.dtype != after.dtype or before.device != after.device:
        return False
    if not same_shape(before, after):
        return False
    if node.kwargs.get("rounding_mode") is not None:
        return False
    if name in ("mul", "div"):
        return isinstance(node.args[1], (int, float)) and node.args[1] == 1
    if name in ("add", "sub"):
        return isinstance(node.args[1], (int, float)) and node.args[1] == 0
    return True


def same_shape(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Return True if the sizes are equal symbol for symbol; equal hints don't suffice."""
    if a.dim() != b.dim():
        return False
    for x, y in zip(a.shape, b.shape, strict=True):
        symbolic = isinstance(x, torch.SymInt) or isinstance(y, torch.SymInt)
        if symbolic:
            if str(x) != str(y):
                return False
        elif int_hint(x) != int_hint(y):
            return False
    return True
