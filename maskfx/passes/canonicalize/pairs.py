"""Rewrites attention without a softmax, written as products, to one operator."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import cast

import torch
from torch import fx

from maskfx import ops
from maskfx.ir.geometry.lanes import shape_hint
from maskfx.passes.canonicalize.attention import (
    COPIES,
    PRODUCTS,
    WRITTEN,
    Scores,
    has_symbol,
    is_wide,
    laid_out,
    operands,
    padded,
    step_back,
)
from maskfx.passes.context import PassContext, argument, aten, node_value, op_name
from maskfx.passes.spelling import Speller

SCALES = frozenset({"mul", "div"})
CAP = 60.0  # the exponential of this times a million is still a number
SUMS = frozenset({"sum", "mean"})
OVERLOADS = {name: getattr(aten, name).Tensor for name in ("mul", "div", "add", "sub")}


@dataclass
class ScoreStep:
    """An elementwise operator on scores: with a number, or with a value that all keys share."""

    name: str
    number: float | None = None
    value: fx.Node | None = None
    axes: list[int] = field(default_factory=list)

    def __str__(self) -> str:
        return self.name if self.number is None else f"{self.name} {self.number!r}"


@dataclass
class ScoreWeights:
    """What an attention multiplies values by, if it has no softmax.

    Args:
        query, key: the operands of the scores, both (..., positions, features).
        steps: what is done with the scores, the first one first.
    """

    query: fx.Node
    key: fx.Node
    steps: list[ScoreStep]

    def cut(self) -> tuple[list[ScoreStep], list[ScoreStep], list[ScoreStep]] | None:
        """Return the steps before, between and after those that need each score; None if mixed.

        Those before are folded into queries and keys, those after are done with the sums.
        """
        shared = [number for number, step in enumerate(self.steps) if step.value is not None]
        plain = [n for n, s in enumerate(self.steps) if s.name not in OVERLOADS]
        first, last = (plain[0], plain[-1]) if plain else (len(self.steps), -1)
        if any(first < n < last for n in shared):
            return None
        behind = len(self.steps)
        while behind > max(last + 1, 0) and self.steps[behind - 1].name in SCALES:
            behind -= 1
        before = max((n + 1 for n in shared if n < behind), default=0)
        if before > first and plain:
            return None
        return self.steps[:before], self.steps[before:behind], self.steps[behind:]


def canonicalize_pairs(graph: fx.Graph, ctx: PassContext) -> int:
    """Rewrite sums of values, times weights that a function of each score gives, to one operator.

    Before  y = matmul(sigmoid(mul(matmul(q, transpose(k, -2, -1)), s)), v)
    After   y = pair_sum(q, k, v, "mul s, sigmoid")
    and     y = sum(relu(matmul(q, transpose(k, -2, -1))), -1, True)
    becomes y = pair_sum(q, k, ones, "relu")
    and     y = matmul(mul(matmul(q, transpose(k, -2, -1)), s), v)     (no function but a factor)
    becomes y = mul(matmul(q, matmul(transpose(k, -2, -1), v)), s)
    and     y = matmul(softmax(mul(tanh(matmul(q, transpose(k, -2, -1))), 20), -1), v)
    becomes z = pair_sum(q, k, cat([v, ones], -1), "tanh, mul 20, exp")
            y = div(z[..., :-1], z[..., -1:])
    Keeps   weights that depend on more than one score, and products along a fixed axis.
    """
    count = 0
    for node in list(graph.nodes):
        name = op_name(node)
        if name in PRODUCTS:
            count += capped(graph, node) or product(graph, node)
        elif name in SUMS:
            count += total(graph, node)
    if count:
        graph.eliminate_dead_code()
    return count


def capped(graph: fx.Graph, node: fx.Node) -> bool:
    """Rewrite a softmax of scores below a small number, which need no largest subtracted."""
    weights, values = cast("list[fx.Node]", node.args[:2])
    rank = node.meta["val"].dim()
    if op_name(weights) not in ("softmax", "_softmax") or rank < 3 or len(weights.users) > 1:
        return False
    scores = argument(weights, 0, "self")
    if argument(weights, 1, "dim") % rank != rank - 1 or not is_capped(scores):
        return False
    if any(node_value(n).dtype != torch.float32 for n in (weights, scores, values)):
        return False  # half precision holds no large exponentials
    spell = Speller(graph, node)
    found = read(spell, spell.emit(aten.exp.default, scores), False)
    if found is None:
        spell.drop()
        return False
    one = spell.emit(aten.ones_like.default, spell.emit(aten.slice.Tensor, values, -1, 0, 1))
    out = spelled(spell, found, spell.emit(aten.cat.default, [values, one], -1))
    if out is None:
        spell.drop()
        return False
    width = node_value(values).shape[-1]
    sums, total = (
        spell.emit(aten.slice.Tensor, out, -1, *at) for at in ((0, width), (width, width + 1))
    )
    spell.replace(spell.emit(aten.div.Tensor, sums, total))
    return True


def is_capped(scores: fx.Node) -> bool:
    """Return True for a hyperbolic tangent times a number whose exponential is of normal size."""
    name, parts = op_name(scores), list(scores.args)
    numbers = [n for n in parts if isinstance(n, int | float)]
    inner = [n for n in parts if isinstance(n, fx.Node) and op_name(n) == "tanh"]
    return name == "mul" and len(numbers) == len(inner) == 1 and abs(numbers[0]) <= CAP


def product(graph: fx.Graph, node: fx.Node) -> bool:
    """Rewrite a product of weights and values; return False if it isn't one."""
    left, right = cast("list[fx.Node]", node.args[:2])
    rank = node.meta["val"].dim()
    if rank < 3 or any(node_value(n).dim() != rank for n in (left, right)):
        return False
    for weights, values, turned in ((left, right, False), (right, left, True)):
        spell = Speller(graph, node)
        found = read(spell, weights, turned)
        if found is None:
            continue
        if turned:
            values = spell.emit(aten.transpose.int, values, -2, -1)
        out = spelled(spell, found, values)
        if out is None:
            spell.drop()
            continue
        spell.replace(spell.emit(aten.transpose.int, out, -2, -1) if turned else out)
        return True
    return False


def total(graph: fx.Graph, node: fx.Node) -> bool:
    """Rewrite a sum of weights over keys."""
    weights, dims = cast("fx.Node", node.args[0]), argument(node, 1, "dim")
    rank = node_value(weights).dim()
    axes = [d % rank for d in ([dims] if isinstance(dims, int) else dims or [])]
    if rank < 3 or axes not in ([rank - 1], [rank - 2]) or node.kwargs.get("dtype") is not None:
        return False
    turned = axes == [rank - 2]
    spell = Speller(graph, node)
    found = read(spell, weights, turned)
    if found is None:
        return False
    some = spell.emit(aten.slice.Tensor, found.key, -1, 0, 1)
    out = spelled(spell, found, spell.emit(aten.ones_like.default, some))
    if out is None:
        spell.drop()
        return False
    if op_name(node) == "mean":
        out = spell.emit(aten.div.Tensor, out, spell.size(found.key, -2))
    if not argument(node, 2, "keepdim", False):
        out = spell.emit(aten.squeeze.dims, out, [rank - 1])
    elif turned:
        out = spell.emit(aten.transpose.int, out, -2, -1)
    spell.replace(out)
    return True


def read(spell: Speller, weights: fx.Node, turned: bool) -> ScoreWeights | None:
    """Follow weights back to the scores that they are made of; None if something else made them.

    `turned`: the keys come before the queries.
    """
    rank = node_value(weights).dim()
    axes = list(range(rank))
    if turned:
        axes[-2:] = axes[:-3:-1]
    found, steps = Scores(weights, axes), list[ScoreStep]()
    while op_name(found.node) not in WRITTEN:
        if same_kind(found.node) and step_back(found, COPIES, shared=True):
            continue
        step = step_of(found)
        if step is None:
            return None
        steps.insert(0, step)
    node, (q, k) = found.node, found.axes[-2:]
    if op_name(node) == "baddbmm":
        if argument(node, 3, "beta", 1):
            return None
        steps.insert(0, ScoreStep("mul", float(argument(node, 4, "alpha", 1))))
    sides = operands(node)
    if {q, k} != {rank - 2, rank - 1} or any(node_value(n).dim() != rank for n in sides):
        return None
    # the sites are compared, not summed over
    if has_symbol(sides[0], rank - 1) or not (has_symbol(node, q) and has_symbol(node, k)):
        return None
    outer = found.axes[:-2]
    if shape_hint(node_value(sides[0]))[:-2] != shape_hint(node_value(sides[1]))[:-2]:
        return None
    left, right = sides[0], spell.emit(aten.transpose.int, sides[1], -2, -1)
    if k == rank - 2:
        left, right = right, left
    order = [*outer, rank - 2, rank - 1]
    return ScoreWeights(spell.permute(left, order), spell.permute(right, order), steps)


def same_kind(node: fx.Node) -> bool:
    """Return True for floating-point values whose operand has their type."""
    source = node.args[0] if node.args else None
    values = [node_value(n) if isinstance(n, fx.Node) else None for n in (node, source)]
    kinds = {v.dtype if isinstance(v, torch.Tensor) else None for v in values}
    kind = kinds.pop()
    return not kinds and kind is not None and bool(kind.is_floating_point)


def step_of(found: Scores) -> ScoreStep | None:
    """Return the elementwise step that made these values, and go on to what it was done with."""
    node, name = found.node, op_name(found.node)
    if not isinstance(node.meta.get("val"), torch.Tensor) or not same_kind(node):
        return None
    if name not in ops.STEPS or node.kwargs or len(node.args) > 2:
        return None
    value, other = (*node.args, None)[:2]
    if name in ("mul", "add") and isinstance(other, fx.Node) and not is_wide(value, node):
        value, other = other, value
    if not isinstance(value, fx.Node) or not is_wide(value, node):
        return None
    if isinstance(other, fx.Node):
        step = shared_step(found, name, other)
    elif other is None or isinstance(other, int | float) and math.isfinite(other):
        step = ScoreStep(name, None if other is None else float(other))
    else:
        return None
    found.node = value
    return step


def shared_step(found: Scores, name: str, other: fx.Node) -> ScoreStep | None:
    """Return a step with a value that is the same for all keys."""
    if name not in OVERLOADS:
        return None
    own = node_value(other)
    if isinstance(own, torch.Tensor):
        shape = padded(shape_hint(own), len(found.axes))
        if own.dim() > len(found.axes) or shape[found.axes[-1]] != 1:
            return None
    return ScoreStep(name, value=other, axes=list(found.axes))


def shapes_fit(found: ScoreWeights, values: fx.Node) -> bool:
    """Return True if keys and values have the same outer axes and the same type."""
    key, value = node_value(found.key), node_value(values)
    return key.dtype == value.dtype and shape_hint(key)[:-1] == shape_hint(value)[:-1]


def spelled(spell: Speller, found: ScoreWeights, values: fx.Node) -> fx.Node | None:
    """Return the sums of the values, times their weights."""
    parts = found.cut()
    if parts is None or not shapes_fit(found, values):
        return None
    before, steps, after = parts
    query, key = found.query, found.key
    for step in before:
        query, key = folded(spell, step, query, key)
    if all(step.name in SCALES for step in steps):  # no function: the order of products is free
        turned = spell.emit(aten.transpose.int, key, -2, -1)
        context = spell.emit(aten.matmul.default, turned, values)
        out = spell.emit(aten.matmul.default, query, context)
        after = [*steps, *after]
    else:
        out = spell.emit(ops.pair_sum, query, key, values, ", ".join(map(str, steps)))
    for step in after:
        out = spell.emit(OVERLOADS[step.name], out, other_of(spell, step))
    return out


def other_of(spell: Speller, step: ScoreStep) -> object:
    """Return what a step is done with, its axes those of the weights."""
    if step.value is None:
        return step.number
    if not isinstance(node_value(step.value), torch.Tensor):
        return step.value
    return laid_out(spell, step.value, step.axes)


def folded(
    spell: Speller, step: ScoreStep, query: fx.Node, key: fx.Node
) -> tuple[fx.Node, fx.Node]:
    """Return queries and keys whose scores are these after a step.

    What is added is a further feature of the queries, for which all keys have a one.
    """
    other, target = other_of(spell, step), OVERLOADS[step.name]
    if step.name in SCALES:
        return spell.emit(target, query, other), key
    first = spell.emit(aten.slice.Tensor, query, -1, 0, 1)
    zero = spell.emit(aten.zeros_like.default, first)
    one = spell.emit(aten.ones_like.default, spell.emit(aten.slice.Tensor, key, -1, 0, 1))
    query = spell.emit(aten.cat.default, [query, spell.emit(target, zero, other)], -1)
    return query, spell.emit(aten.cat.default, [key, one], -1)
