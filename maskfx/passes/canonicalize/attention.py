"""Rewrites attention written as products and a softmax to one operator."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import cast

import torch
from torch import fx

from maskfx.ir.geometry.lanes import has_no_hint, shape_hint
from maskfx.passes.context import PassContext, argument, aten, node_at, node_value, op_name
from maskfx.passes.spelling import Speller

CASTS = frozenset({"to", "_to_copy", "float", "half", "double", "type_as"})
COPIES = CASTS | {"contiguous", "clone", "alias", "detach", "dropout"}
MOVES = frozenset({"permute", "transpose", "swapaxes"})
PRODUCTS = frozenset({"bmm", "matmul"})
WRITTEN = PRODUCTS | {"baddbmm"}
SOFTMAXES = frozenset({"softmax", "_softmax"})
LOW = -1e8  # a score that takes the place of others; beside it, what is added to it is nothing


def canonicalize_attention(graph: fx.Graph, ctx: PassContext) -> int:
    """Rewrite attention that is written step by step to one operator.

    Before  y = bmm(softmax(baddbmm(_, q, transpose(k, 1, 2), beta=0, alpha=s), -1), v)
    After   y = scaled_dot_product_attention(q, k, v, scale=s)
    and     y = matmul(softmax(masked_fill(add(matmul(q, k), bias), mask, -inf), -1), v)
    becomes y = scaled_dot_product_attention(q, transpose(k, -2, -1), v, where(mask, -inf, bias))
    and     y = matmul(softmax(k, -1), v)           (along an axis as long as the picture)
    becomes y = scaled_dot_product_attention(eye, transpose(k, -2, -1), v, scale=1)
    and     y = scaled_dot_product_attention(q, k, v, is_causal=True)
    becomes y = scaled_dot_product_attention(q, k, v, tril(ones))
    and     y = scaled_dot_product_attention(q, k, v)           (there is one key)
    becomes y = expand(v, [b, heads, n, d])
    Keeps   weights that are used elsewhere too, and products along an axis of the picture.
    """
    count = 0
    for node in list(graph.nodes):
        name = op_name(node)
        if name == "scaled_dot_product_attention":
            count += causal(graph, node) or of_one_key(graph, node)
        elif name in PRODUCTS:
            count += written_out(graph, node)
    return count


def causal(graph: fx.Graph, node: fx.Node) -> bool:
    """Spell a causal mask."""
    if not argument(node, 5, "is_causal", False):
        return False
    spell = Speller(graph, node)
    query, key, value = (node_at(node, place) for place in range(3))
    sizes = [spell.size(query, -2), spell.size(key, -2)]
    ones = spell.emit(aten.ones.default, sizes, dtype=torch.bool, device=device_of(query))
    more = {k: v for k, v in node.kwargs.items() if k in ("scale", "enable_gqa")}
    mask = spell.emit(aten.tril.default, ones)
    target = aten.scaled_dot_product_attention.default
    spell.replace(spell.emit(target, query, key, value, mask, **more))
    return True


def of_one_key(graph: fx.Graph, node: fx.Node) -> bool:
    """Give every query the value of the only key, whatever their product."""
    query, key, value = (node_at(node, place) for place in range(3))
    outer = [node_value(n).shape[:-2] for n in (query, value)]
    only = node_value(key).shape[-2]
    masked = argument(node, 3, "attn_mask") is not None or argument(node, 4, "dropout_p", 0.0)
    if masked or not isinstance(only, int) or only != 1 or outer[0] != outer[1]:
        return False
    spell = Speller(graph, node)
    shape = [-1] * node_value(query).dim()
    shape[-2] = spell.size(query, -2)
    spell.replace(spell.emit(aten.expand.default, value, shape))
    return True


def device_of(value: fx.Node) -> torch.device:
    found: torch.device = node_value(value).device
    return found


def written_out(graph: fx.Graph, node: fx.Node) -> bool:
    """Rewrite a product of weights and values; return False if it isn't one."""
    left, right = cast("list[fx.Node]", node.args[:2])
    for weights, values, turned in ((left, right, False), (right, left, True)):
        rank = node.meta["val"].dim()
        if rank < 3 or any(node_value(n).dim() != rank for n in (weights, values)):
            continue
        axes = list(range(rank))
        if turned:
            axes[-2:] = axes[:-3:-1]
        found = read(weights, axes)
        if found is not None and line_up(found, values, turned):
            spell_out(Speller(graph, node), found, values, turned)
            return True
    return False


def line_up(found: Scores, values: fx.Node, turned: bool) -> bool:
    """Return True if values have the keys' type and heads; queries may have more heads than one."""
    value, keys, rank = node_value(values), node_value(found.node), len(found.axes)
    own = shape_hint(value)[:-2]
    queries = heads = [shape_hint(keys)[a] for a in found.axes[:-2]]
    if op_name(found.node) in WRITTEN:
        left, right = (node_value(n) for n in operands(found.node))
        keys = left
        if found.axes[-1] == rank - 1:
            left, right = right, left
        heads, queries = ([shape_hint(v)[a] for a in found.axes[:-2]] for v in (left, right))
    few = rank == 4 and heads == [queries[0], 1]
    return own == heads and (heads == queries or few) and keys.dtype == value.dtype


@dataclass
class ScoreMask:
    """A mask over scores: what stands where it removes one, and whether it is True elsewhere."""

    node: fx.Node
    low: float
    keeps: bool
    axes: list[int]


@dataclass
class Scores:
    """How the weights of an attention follow from scores.

    Args:
        node: the scores: a product of queries and keys, or any other value.
        axes: for each axis of the weights, outer ones, queries and keys, its axis in the scores.
        scale: what the scores are multiplied by.
        factors: values by which they are multiplied too, of one number per head.
        added: what is added, with its factor and its own `axes`.
        masks: which weights are zero.
    """

    node: fx.Node
    axes: list[int]
    scale: float = 1.0
    factors: list[tuple[fx.Node, list[int]]] = field(default_factory=list)
    added: list[tuple[fx.Node, float, list[int]]] = field(default_factory=list)
    masks: list[ScoreMask] = field(default_factory=list)


def read(weights: fx.Node, axes: list[int]) -> Scores | None:
    """Follow weights back to the scores that they are made of; None if no softmax made them."""
    found = Scores(weights, axes)
    while op_name(found.node) not in SOFTMAXES:
        if not step_back(found, COPIES):
            return None
    softmax = found.node
    rank = node_value(softmax).dim()
    if not alone(softmax) or argument(softmax, 1, "dim") % rank != found.axes[-1]:
        return None
    found.node = softmax.args[0]  # type: ignore[assignment]
    while op_name(found.node) not in WRITTEN:
        if not (step_back(found, CASTS) or scaled(found) or shifted(found) or masked(found)):
            break
    return found if matches(found) else None


def alone(node: fx.Node) -> bool:
    """Return True if a value has one user and is floating-point."""
    return len(node.users) == 1 and node_value(node).is_floating_point()


def step_back(found: Scores, names: frozenset[str], shared: bool = False) -> bool:
    """Skip an operator that only copies, converts or moves axes; `shared`: used elsewhere too."""
    node, name = found.node, op_name(found.node)
    if not (shared or alone(node)) or not (name in names or name in MOVES):
        return False
    rank = node_value(node).dim()
    order = list(range(rank))
    if name == "permute":
        order = [d % rank for d in argument(node, 1, "dims")]
    elif name in MOVES:
        a, b = argument(node, 1, "dim0") % rank, argument(node, 2, "dim1") % rank
        order[a], order[b] = order[b], order[a]
    elif name == "dropout" and argument(node, 2, "train", False):
        return False
    found.node, found.axes = node.args[0], [order[a] for a in found.axes]  # type: ignore[assignment]
    return True


def scaled(found: Scores) -> bool:
    """Take a factor out of the scores: a number, or a value with one number per head."""
    node, name = found.node, op_name(found.node)
    if name not in ("mul", "div") or not alone(node) or node.kwargs.get("rounding_mode"):
        return False
    value, factor = node.args[:2]
    if name == "mul" and isinstance(factor, fx.Node) and not is_wide(value, node):
        value, factor = factor, value
    if isinstance(factor, int | float):
        found.scale *= factor if name == "mul" else 1 / factor
        found.node = value  # type: ignore[assignment]
        return True
    if name == "div" or not isinstance(factor, fx.Node) or not is_wide(value, node):
        return False
    shape = padded(shape_hint(node_value(factor)), len(found.axes))
    if any(shape[a] != 1 for a in found.axes[-2:]):
        return False
    found.factors.append((factor, found.axes))
    found.node = value  # type: ignore[assignment]
    return True


def is_wide(value: object, node: fx.Node) -> bool:
    """Return True if a value has the shape of what is made of it."""
    own, wanted = (node_value(n) if isinstance(n, fx.Node) else None for n in (value, node))
    if not isinstance(own, torch.Tensor) or not isinstance(wanted, torch.Tensor):
        return False
    known = not any(has_no_hint(size) for v in (own, wanted) for size in v.shape)
    return known and shape_hint(own) == shape_hint(wanted)


def padded(shape: list[int], rank: int) -> list[int]:
    return [1] * (rank - len(shape)) + shape


def shifted(found: Scores) -> bool:
    """Take off what is added to the scores; they are the operand that comes from a product."""
    node, name = found.node, op_name(found.node)
    if name not in ("add", "sub") or not alone(node) or argument(node, 2, "alpha", 1) != 1:
        return False
    value, other = node.args[:2]
    if not isinstance(value, fx.Node) or not isinstance(other, fx.Node):
        return False
    sign = 1.0 if name == "add" else -1.0
    if name == "add" and not (is_wide(value, node) and comes_from_product(value)):
        value, other = other, value
    if found.factors or not is_wide(value, node) or not comes_from_product(value):
        return False
    found.added.append((other, sign * found.scale, found.axes))
    found.node = value
    return True


def comes_from_product(node: fx.node.Argument) -> bool:
    """Return True if these are scores of queries and keys, perhaps scaled, shifted or masked."""
    seen = 0
    while isinstance(node, fx.Node) and seen < 12:
        if op_name(node) in WRITTEN:
            return True
        if op_name(node) not in CASTS | MOVES | {"mul", "div", "add", "sub", "masked_fill"}:
            return False
        full = [n for n in node.args[:2] if is_wide(n, node)] or [node.args[0]]
        node, seen = full[0], seen + 1
    return False


def masked(found: Scores) -> bool:
    """Take off a mask that removes scores."""
    node, name = found.node, op_name(found.node)
    if name == "masked_fill":
        value, mask, low = node.args[:3]
    elif name == "where" and len(node.args) == 3:
        mask, value, low = node.args
    else:
        return False
    if isinstance(low, fx.Node):
        low = only_number(low)
    number = float(low) if isinstance(low, int | float) else 0.0
    if found.factors or number * found.scale > least_of(node):
        return False
    if not alone(node) or not is_wide(value, node):
        return False
    found.masks.append(ScoreMask(mask, number, name == "where", found.axes))  # type: ignore[arg-type]
    found.node = value  # type: ignore[assignment]
    return True


def least_of(node: fx.Node) -> float:
    """Return the score from which on a weight is zero: half precision reaches no lower."""
    return max(LOW, torch.finfo(node_value(node).dtype).min)


def only_number(node: fx.Node) -> float | None:
    """Return the number that a constant holds."""
    while op_name(node) in ("lift_fresh_copy", "detach", "alias", "to"):
        node = node.args[0]  # type: ignore[assignment]
    if op_name(node) in ("scalar_tensor", "full") and len(node_value(node).shape) == 0:
        number = node.args[0] if op_name(node) == "scalar_tensor" else node.args[1]
        return float(number) if isinstance(number, int | float) else None
    value = node_value(node) if node.op == "get_attr" else None
    return float(value) if isinstance(value, torch.Tensor) and value.numel() == 1 else None


def matches(found: Scores) -> bool:
    """Return True if one attention computes it."""
    node, (q, k) = found.node, found.axes[-2:]
    rank = len(found.axes)
    if not isinstance(node.meta.get("val"), torch.Tensor) or not math.isfinite(found.scale):
        return False
    if op_name(node) not in WRITTEN:  # a softmax along the sites themselves
        size = node_value(node).shape[k]
        plain = not found.factors and not found.added and not found.masks
        return plain and isinstance(size, torch.SymInt) and not has_symbol(node, q)
    if not alone(node) or {q, k} != {rank - 2, rank - 1}:
        return False
    if op_name(node) == "baddbmm" and argument(node, 3, "beta", 1) and found.factors:
        return False
    left, right = operands(node)
    values = [node_value(n) for n in (left, right)]
    if any(v.dim() != rank for v in values) or values[0].dtype != values[1].dtype:
        return False
    return not has_symbol(left, rank - 1)  # else sites are summed over, not compared


def has_symbol(node: fx.Node, axis: int) -> bool:
    return not isinstance(node_value(node).shape[axis], int)


def operands(node: fx.Node) -> list[fx.Node]:
    """Return the operands of a product."""
    return list(node.args[1:3] if op_name(node) == "baddbmm" else node.args[:2])  # type: ignore[arg-type]


def spell_out(spell: Speller, found: Scores, values: fx.Node, turned: bool) -> None:
    """Replace the node by one attention."""
    node, axes = found.node, found.axes
    rank = len(axes)
    outer = axes[:-2]
    if op_name(node) in WRITTEN:
        query, key, scale = sides(spell, found)
        query, key = (spell.permute(n, [*outer, rank - 2, rank - 1]) for n in (query, key))
    else:
        key, scale = spell.permute(node, [*outer, axes[-1], axes[-2]]), found.scale
        width = spell.size(key, -1)
        kind = node_value(key).dtype
        query = spell.emit(aten.eye.default, width, dtype=kind, device=device_of(key))
        for _ in outer:
            query = spell.emit(aten.unsqueeze.default, query, 0)
    for factor, own in found.factors:
        query = spell.emit(aten.mul.Tensor, query, laid_out(spell, factor, own))
    bias = bias_of(spell, found, node_value(query).dtype)
    if turned:
        values = spell.emit(aten.transpose.int, values, -2, -1)
    target = aten.scaled_dot_product_attention.default
    out = spell.emit(target, query, key, values, bias, scale=scale)
    spell.replace(spell.emit(aten.transpose.int, out, -2, -1) if turned else out)


def sides(spell: Speller, found: Scores) -> tuple[fx.Node, fx.Node, float]:
    """Return queries, keys and the scale of scores."""
    node, scale = found.node, found.scale
    left, right = operands(node)
    if op_name(node) == "baddbmm":
        beta = argument(node, 3, "beta", 1)
        if beta:
            found.added.append((node.args[0], scale * beta, found.axes))  # type: ignore[arg-type]
        scale *= argument(node, 4, "alpha", 1)
    if found.axes[-1] == len(found.axes) - 1:
        return left, spell.emit(aten.transpose.int, right, -2, -1), scale
    return spell.emit(aten.transpose.int, right, -2, -1), left, scale


def laid_out(spell: Speller, value: fx.Node, axes: list[int]) -> fx.Node:
    """Return a value that broadcasts to scores, with the axes of the weights."""
    if axes == sorted(axes):
        return value
    while node_value(value).dim() < len(axes):
        value = spell.emit(aten.unsqueeze.default, value, 0)
    return spell.permute(value, axes)


def bias_of(spell: Speller, found: Scores, dtype: torch.dtype) -> fx.Node | None:
    """Return what is added to the scores, and -inf or the like where they are masked."""
    bias: fx.Node | None = None
    for value, factor, axes in found.added:
        own = laid_out(spell, value, axes)
        own = own if node_value(own).dtype == dtype else spell.emit(aten.to.dtype, own, dtype)
        own = own if factor == 1 else spell.emit(aten.mul.Scalar, own, factor)
        bias = own if bias is None else spell.emit(aten.add.Tensor, bias, own)
    for mask in found.masks:
        own = laid_out(spell, mask.node, mask.axes)
        out = spell.emit(aten.logical_not.default, own) if mask.keeps else own
        if bias is None:
            bias = spell.emit(aten.zeros_like.default, own, dtype=dtype)
        low = max(mask.low, torch.finfo(dtype).min) if math.isfinite(mask.low) else mask.low
        bias = spell.emit(aten.masked_fill.Scalar, bias, out, low)
    return bias
