"""Joins steps of a finished graph that are quicker together.

This pass isn't in the pipeline: it runs on copies of finished graphs, right before they run.
"""

from __future__ import annotations

import operator
from collections.abc import Callable

from torch import fx

from maskfx import ops
from maskfx.passes.context import argument, aten, op_name

ACTIVATIONS = ("silu", "relu", "gelu")
Found = tuple[object, tuple[fx.node.Argument, ...]]  # an operator and its arguments
Rule = Callable[[fx.Node], Found | None]


def fuse_kernels(graph: fx.Graph, pointwise: bool = True) -> int:
    """Replace steps by the operator that computes them together.

    Before  y = silu(linear(gather(rows, halo, table), w, b))
    After   y = window_product(rows, halo, table, w, b, "silu")
    and     y = silu(scale_shift(rows, scales, owner))
    becomes y = norm_activation(rows, scales, owner, "silu")
    and     y = mul(first_half, gelu(second_half))
    becomes y = gated(rows, "gelu", False, axis)
    and     y = add(mul(rows, scale[owner]), shift[owner])
    becomes y = modulate(rows, scale, shift, owner)
    and     y = add(base, mul(gate[owner], rows))
    becomes y = add_gated(base, rows, gate, owner)
    Keeps   steps whose values another operator reads too.

    Args:
        graph: A graph of a program.
        pointwise: Whether to join steps without products too.
    """
    rules: tuple[Rule, ...] = (window_product,)
    if pointwise:
        rules = (*rules, norm_activation, gated, modulate, add_gated)
    count = 0
    for node in reversed(list(graph.nodes)):  # an activation before the product that it follows
        if node.op != "call_function" or not node.users:
            continue
        found = next(filter(None, (rule(node) for rule in rules)), None)
        if found is None:
            continue
        target, arguments = found
        with graph.inserting_before(node):
            new = graph.call_function(target, arguments)  # type: ignore[arg-type]
        new.meta = dict(node.meta)
        node.replace_all_uses_with(new)
        erase_unread(graph, node)
        count += 1
    if count:
        graph.lint()
    return count


def erase_unread(graph: fx.Graph, node: fx.Node) -> None:
    """Erase an operator, and those before it that nothing else reads."""
    waiting = [node]
    while waiting:
        one = waiting.pop()
        if not one.users and one.op == "call_function":
            waiting += one.all_input_nodes
            graph.erase_node(one)


def only_read_here(value: object) -> bool:
    return isinstance(value, fx.Node) and len(value.users) == 1


def split_activation(node: fx.Node) -> tuple[str, fx.Node]:
    """Return the name of an activation and what it is applied to: ("none", node) for others."""
    name = op_name(node)
    if name not in ACTIVATIONS or not only_read_here(node.args[0]):
        return "none", node
    if name == "gelu" and node.kwargs.get("approximate", "none") == "tanh":
        name = "gelu_tanh"
    return name, node.args[0]  # type: ignore[return-value]


def window_product(node: fx.Node) -> Found | None:
    activation, product = split_activation(node)
    if product.target != aten.linear.default:
        return None
    picked, weight = product.args[:2]
    if not only_read_here(picked) or picked.target != ops.gather:  # type: ignore[union-attr]
        return None
    bias = product.args[2] if len(product.args) > 2 else product.kwargs.get("bias")
    return ops.window_product, (*picked.args, weight, bias, activation)  # type: ignore[union-attr]


def norm_activation(node: fx.Node) -> Found | None:
    activation, norm = split_activation(node)
    if activation == "none" or norm.target != ops.scale_shift:
        return None
    return ops.norm_activation, (*norm.args, activation)


def gated(node: fx.Node) -> Found | None:
    """Match a product of one half of a value and an activation of its other half."""
    if node.target != aten.mul.Tensor:
        return None
    for value, gate in (node.args, node.args[::-1]):
        if not isinstance(gate, fx.Node) or not only_read_here(gate):
            continue
        activation, half = split_activation(gate)
        one, other = half_of(value), half_of(half)
        if one is None or other is None:
            continue
        same = one[0] is other[0] and one[2] == other[2]
        if activation != "none" and same and {one[1], other[1]} == {0, 1}:
            return ops.gated, (one[0], activation, other[1] == 0, one[2])
    return None


def half_of(value: object) -> tuple[fx.Node, int, int] | None:
    """Return what a value is a half of, the number of the half, and the axis that was divided."""
    if not isinstance(value, fx.Node) or value.target is not operator.getitem:
        return None
    parts, number = value.args
    if not isinstance(parts, fx.Node) or not isinstance(parts.args[0], fx.Node):
        return None
    if op_name(parts) not in ("chunk", "split_with_sizes"):
        return None
    axis = argument(parts, 2, "dim", 0)
    if op_name(parts) == "chunk" and parts.args[1] == 2:
        return parts.args[0], int(number), axis  # type: ignore[arg-type]
    sizes = parts.args[1]
    if isinstance(sizes, (list, tuple)) and len(sizes) == 2 and sizes[0] == sizes[1]:
        return parts.args[0], int(number), axis  # type: ignore[arg-type]
    return None


def by_owner(value: object) -> tuple[fx.Node, fx.Node] | None:
    """Return values and a table, if a value is what the table picks of them: its requests' own."""
    if not isinstance(value, fx.Node) or value.target != aten.index_select.default:
        return None
    values, axis, owner = value.args
    if axis != 0 or not isinstance(values, fx.Node) or not isinstance(owner, fx.Node):
        return None
    return values, owner


def scaled_rows(value: object) -> tuple[fx.Node, fx.Node, fx.Node] | None:
    """Return rows, their requests' factors and the owners, if a value is their product."""
    if not isinstance(value, fx.Node) or value.target != aten.mul.Tensor or len(value.users) > 1:
        return None
    for rows, factor in (value.args, value.args[::-1]):
        found = by_owner(factor)
        if found is not None and isinstance(rows, fx.Node):
            return rows, *found
    return None


def modulate(node: fx.Node) -> Found | None:
    if node.target != aten.add.Tensor or node.kwargs:
        return None
    for product, added in (node.args, node.args[::-1]):
        scaled, shift = scaled_rows(product), by_owner(added)
        if scaled is not None and shift is not None and scaled[2] is shift[1]:
            rows, scale, owner = scaled
            return ops.modulate, (rows, scale, shift[0], owner)
    return None


def add_gated(node: fx.Node) -> Found | None:
    if node.target != aten.add.Tensor or node.kwargs:
        return None
    for base, product in (node.args, node.args[::-1]):
        scaled = scaled_rows(product)
        if scaled is not None and isinstance(base, fx.Node):
            rows, gate, owner = scaled
            return ops.add_gated, (base, rows, gate, owner)
    return None
