"""Moves transposes and flips of the picture behind convolutions, which read it as it lies."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from maskfx.passes.context import PassContext, argument, aten, node_at, node_value, op_name
from maskfx.passes.operators import POINTWISE
from maskfx.passes.spelling import Speller

PICTURE = {2, 3}


@dataclass(frozen=True)
class Turn:
    """What turns a picture: a flip of these axes, or a transpose."""

    node: fx.Node
    flips: frozenset[int] = frozenset()  # empty: a transpose

    @property
    def source(self) -> fx.Node:
        return node_at(self.node, 0)

    def of(self, spell: Speller, value: fx.Node) -> fx.Node:
        """Return another value, or a window's weights, turned in this way."""
        if self.flips:
            return spell.emit(aten.flip.default, value, sorted(self.flips))
        return spell.emit(aten.transpose.int, value, 2, 3)


def canonicalize_turns(graph: fx.Graph, ctx: PassContext) -> int:
    """Move a turn of the picture behind a convolution, and drop one that another undoes.

    Before  y = conv2d(transpose(x, 2, 3), w, b); z = flip(silu(conv2d(flip(x, [3]), w)), [3])
    After   y = transpose(conv2d(x, transpose(w, 2, 3), b), 2, 3); z = silu(conv2d(x, flip(w, [3])))
    and     y = rot90(x, 1, [2, 3]) becomes y = flip(transpose(x, 2, 3), [2])
    Keeps   flips before a stride; turns whose results other operators read.
    """
    count = 0
    while moved := sum(map(move_turn, list(graph.nodes))):
        count += moved
    return count


def move_turn(node: fx.Node) -> bool:
    """Rewrite an operator that is a turn of the picture, or reads a turned one, if it can be."""
    if node.op != "call_function":
        return False
    name, spell, found = op_name(node), Speller(node.graph, node), None
    if name == "rot90":
        found = rotated(spell, node)
    elif name == "conv2d":
        found = convolved(spell, node)
    elif (turn := turn_of(node)) is not None:
        found = turned_again(spell, turn)
    if found is not None:
        spell.replace(found)
    return found is not None


def turn_of(node: fx.Node) -> Turn | None:
    """Return how an operator turns a picture; None if it does something else."""
    name = op_name(node)
    if name not in ("flip", "transpose", "permute") or node_value(node).dim() != 4:
        return None
    if name == "permute":
        order = [axis % 4 for axis in argument(node, 1, "dims")]
        return Turn(node) if order == [0, 1, 3, 2] else None
    if name == "transpose":
        axes = {argument(node, 1, "dim0") % 4, argument(node, 2, "dim1") % 4}
        return Turn(node) if axes == PICTURE else None
    axes = {axis % 4 for axis in argument(node, 1, "dims")}
    return Turn(node, frozenset(axes)) if axes and axes <= PICTURE else None


def turn_before(node: fx.Node) -> tuple[Turn, list[fx.Node]] | None:
    """Return the turn before an operator, and the operators on each site alone in between."""
    between: list[fx.Node] = []
    value = node_at(node, 0)
    while (turn := turn_of(value)) is None:
        if not is_alone(value) or len(value.users) != 1:
            return None
        between.append(value)
        value = node_at(value, 0)
    return turn, between


def is_alone(node: fx.Node) -> bool:
    """Return True for an operator that computes the same whatever way the picture lies."""
    name = op_name(node)
    if name == "group_norm":
        return bool(node_value(node).dim() == 4)
    if name not in POINTWISE or not node.args or not isinstance(node.args[0], fx.Node):
        return False
    spread = all(map(is_spread, node.all_input_nodes[1:]))
    return spread and tuple(node_value(node.args[0]).shape) == tuple(node_value(node).shape)


def is_spread(node: fx.Node) -> bool:
    """Return True for a value that is the same at all sites."""
    value = node.meta.get("val")
    number = not isinstance(value, torch.Tensor) and node.op != "get_attr"
    shape = () if number else tuple(node_value(node).shape)
    return shape == () or len(shape) == 4 and shape[2:] == (1, 1)


def before_turn(spell: Speller, turn: Turn, between: list[fx.Node]) -> fx.Node:
    """Return what operators between a turn and another compute of the picture as it lies."""
    value = turn.source
    for node in reversed(between):
        target, moved = node.target, {other: other for other in node.all_input_nodes}
        moved[node_at(node, 0)] = value
        args, kwargs = fx.map_arg((node.args, node.kwargs), moved.__getitem__)
        value = spell.emit(target, *args, **kwargs)  # type: ignore[arg-type]
    return value


def convolved(spell: Speller, node: fx.Node) -> fx.Node | None:
    found = turn_before(node)
    if found is None:
        return None
    turn, between = found
    stride, dilation = (numbers(argument(node, *at, 1)) for at in ((3, "stride"), (5, "dilation")))
    padding = argument(node, 4, "padding", 0)
    apart = padding if isinstance(padding, str) else numbers(padding)
    if turn.flips and (stride != [1, 1] or apart == "same"):
        return None
    if not turn.flips:
        stride, dilation = stride[::-1], dilation[::-1]
        apart = apart if isinstance(apart, str) else apart[::-1]
    value, weight = before_turn(spell, turn, between), turn.of(spell, node_at(node, 1))
    bias, groups = argument(node, 2, "bias"), argument(node, 6, "groups", 1)
    target: Any = node.target
    return turn.of(spell, spell.emit(target, value, weight, bias, stride, apart, dilation, groups))


def numbers(value: Any) -> list[int]:
    """Return a number for rows and one for columns."""
    listed = [value] if isinstance(value, int) else list(value)
    return listed * 2 if len(listed) == 1 else listed


def turned_again(spell: Speller, turn: Turn) -> fx.Node | None:
    """Return one turn for two, none, or the transpose before the flip."""
    found = turn_before(turn.node)
    if found is None or turn.flips and not found[0].flips:
        return None
    first, between = found
    value = before_turn(spell, first, between)
    if first.flips and not turn.flips:
        swapped = frozenset(5 - axis for axis in first.flips)
        return Turn(turn.node, swapped).of(spell, turn.of(spell, value))
    rest = first.flips ^ turn.flips
    return Turn(turn.node, rest).of(spell, value) if rest else value


def rotated(spell: Speller, node: fx.Node) -> fx.Node | None:
    """Return a rotation by quarters as a transpose and a flip."""
    source = node_at(node, 0)
    quarters = argument(node, 1, "k", 1) % 4
    first, second = (axis % node_value(node).dim() for axis in argument(node, 2, "dims", [0, 1]))
    if quarters == 0:
        return source
    if quarters == 2:
        return spell.emit(aten.flip.default, source, [first, second])
    value = spell.emit(aten.transpose.int, source, first, second)
    return spell.emit(aten.flip.default, value, [first if quarters == 1 else second])
