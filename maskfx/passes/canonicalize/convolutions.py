"""Rewrites convolutions of one window each, or with weights of each sample, to products."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch
from torch import fx
from torch.types import IntLikeType

from maskfx.passes.canonicalize.writes import expression
from maskfx.passes.context import PassContext, argument, aten, node_at, node_value, op_name
from maskfx.passes.spelling import Speller

CONVOLUTIONS = ("conv1d", "conv2d", "conv3d")


def canonicalize_convolutions(graph: fx.Graph, ctx: PassContext) -> int:
    """Rewrite a convolution whose window is as large as its input, or of samples as groups.

    Before  y = conv2d(x, w, b)                    (x has 2x2 places, as the window of w)
    After   y = unsqueeze(unsqueeze(linear(flatten(x, 1), flatten(w, 1), b), -1), -1)
    and     y = conv2d(reshape(x, [1, b * c, h, w]), w, groups=b)      (w: [b * d, c, 3, 3])
    becomes y = matmul(reshape(w, [b, 1, d, c * 9]), im2col(x, [3, 3])), in the shape that it had
    and     y = slice(conv1d(x, w, b, 1, 3), 2, 0, n)         (w has 4 places, x has n: causal)
    becomes y = slice(conv1d(pad(x, [3, 0]), w, b, 1, 0), 2, 0, n)
    and     y = conv3d(x, w, b, 1, [1, 1, 1])                 (x has one frame, as has y)
    becomes y = conv3d(x, slice(w, 2, 1, 2), b, 1, [0, 1, 1])
    Keeps   inputs that are larger or of symbolic sizes, windows of one place, padding, groups.
    """
    count = 0
    for node in list(graph.nodes):
        if op_name(node) == "conv1d" and (surplus := cut_places(node)):
            count += pad_before(Speller(graph, node), surplus)
            continue
        if op_name(node) == "conv2d" and (groups := groups_of_sample(node, ctx)):
            spell = Speller(graph, node)
            found = of_samples(spell, node, groups)
            if found is not None:
                spell.replace(found)
                count += 1
            continue
        if op_name(node) == "conv3d" and (place := place_of_frame(node)) is not None:
            count += read_one_frame(Speller(graph, node), place)
            continue
        if op_name(node) not in CONVOLUTIONS or not is_one_window(node):
            continue
        spell, bias = Speller(graph, node), argument(node, 2, "bias")
        rows, weight = (spell.emit(aten.flatten.using_ints, node_at(node, i), 1) for i in (0, 1))
        found = spell.emit(aten.linear.default, rows, weight, bias)
        for _ in node_value(node).shape[2:]:
            found = spell.emit(aten.unsqueeze.default, found, -1)
        spell.replace(found)
        count += 1
    return count


def cut_places(node: fx.Node) -> int:
    """Return how many of a conv1d's last places all its users cut off, to its input's length."""
    sources = node_value(node_at(node, 0)).shape
    whole, length = node_value(node).shape[-1], sources[-1]
    surplus = whole - length if isinstance(whole, torch.SymInt) else 0
    surplus = surplus.node.maybe_as_int() if isinstance(surplus, torch.SymInt) else surplus
    stride, padding = (pair(argument(node, *at)) for at in ((3, "stride", 1), (4, "padding", 0)))
    if not surplus or surplus < 0 or stride[0] != 1 or surplus > padding[0]:
        return 0
    cuts = all(
        op_name(user) == "slice"
        and argument(user, 1, "dim", 0) % len(sources) == len(sources) - 1
        and (argument(user, 2, "start", 0) or 0) == 0
        and argument(user, 4, "step", 1) == 1
        and is_equal(node_value(user).shape[-1], length)
        for user in node.users
    )
    return surplus if cuts else 0


def is_equal(one: IntLikeType, other: IntLikeType) -> bool:
    """Return True if two sizes are the same expression."""
    return expression(one) == expression(other)


def pad_before(spell: Speller, surplus: int) -> bool:
    """Replace the padding of a conv1d by one that leaves out the places which are cut off."""
    node = spell.node
    [amount, _] = pair(argument(node, 4, "padding", 0))
    padded = spell.emit(aten.pad.default, node_at(node, 0), [amount, amount - surplus])
    weight, bias = node_at(node, 1), argument(node, 2, "bias")
    dilation, groups = argument(node, 5, "dilation", [1]), argument(node, 6, "groups", 1)
    found = spell.emit(aten.conv1d.default, padded, weight, bias, [1], [0], dilation, groups)
    spell.replace(found)
    return True


def place_of_frame(node: fx.Node) -> int | None:
    """Return the only place of a window of several frames that isn't padding, or None."""
    value, window = (node_value(node_at(node, i)).shape for i in (0, 1))
    padding, dilation = argument(node, 4, "padding", 0), argument(node, 5, "dilation", 1)
    frames = [value[2], window[2], node_value(node).shape[2]] if len(value) == 5 else []
    if not frames or isinstance(padding, str) or not all(isinstance(n, int) for n in frames):
        return None
    before, apart = triple(padding)[0], triple(dilation)[0]
    alone = frames[0] == frames[2] == 1 < frames[1]
    place, between = divmod(before, apart)
    return place if alone and not between and place < frames[1] else None


def read_one_frame(spell: Speller, place: int) -> bool:
    """Leave out the places of a convolution's window that read padding alone."""
    node = spell.node
    weight = spell.emit(aten.slice.Tensor, node_at(node, 1), 2, place, place + 1)
    _, *padding = triple(argument(node, 4, "padding", 0))
    given = [argument(node, i, name, 1) for i, name in ((3, "stride"), (5, "dilation"))]
    stride, dilation = ([1, *triple(one)[1:]] for one in given)
    bias, groups = argument(node, 2, "bias"), argument(node, 6, "groups", 1)
    found = spell.emit(
        aten.conv3d.default, node_at(node, 0), weight, bias, stride, [0, *padding], dilation, groups
    )
    spell.replace(found)
    return True


def is_one_window(node: fx.Node) -> bool:
    """Return True if the window of a convolution covers a batch of inputs exactly."""
    value, window = (node_value(node_at(node, i)).shape for i in (0, 1))
    if len(value) != len(window) or not all(isinstance(size, int) for size in value[2:]):
        return False
    padding, groups = argument(node, 4, "padding", 0), argument(node, 6, "groups", 1)
    padded = any(padding) if isinstance(padding, list | tuple) else padding not in (0, "valid")
    alike = tuple(value[2:]) == tuple(window[2:]) and prod(window[2:]) > 1
    return alike and not padded and groups == 1


def groups_of_sample(node: fx.Node, ctx: PassContext) -> int:
    """Return how many groups each sample has if all samples are one input, else 0."""
    groups, batch = argument(node, 6, "groups", 1), ctx.symbols.get("batch", 1)
    shape = node_value(node_at(node, 0)).shape
    if isinstance(batch, int) or not isinstance(groups, fx.Node) or len(shape) != 4:
        return 0
    each = expression(groups.meta["val"]) / batch
    one = isinstance(shape[0], int) and shape[0] == 1
    return int(each) if one and each.is_Integer else 0


def of_samples(spell: Speller, node: fx.Node, groups: int) -> fx.Node | None:
    """Return the products of what each window reads with the weights of its sample."""
    value, weight, bias = node_at(node, 0), node_at(node, 1), argument(node, 2, "bias")
    stride, padding = argument(node, 3, "stride", [1, 1]), argument(node, 4, "padding", [0, 0])
    dilation = argument(node, 5, "dilation", [1, 1])
    out, (_, each, *window) = node_value(node).shape, node_value(weight).shape
    rows, columns = (spell.number(expression(out[axis])) for axis in (2, 3))
    if isinstance(padding, str) or rows is None or columns is None:
        return None
    sizes = [spell.size(value, axis) for axis in (2, 3)]
    samples = spell.emit(aten.reshape.default, value, [-1, groups * each, *sizes])
    geometry = [pair(part) for part in (window, dilation, padding, stride)]
    read = spell.emit(aten.im2col.default, samples, *geometry)
    places = each * prod(window)
    read = spell.emit(aten.unflatten.int, read, 1, [groups, places])
    batch = spell.size(samples, 0)
    matrices = spell.emit(aten.reshape.default, weight, [batch, groups, -1, places])
    mixed = spell.emit(aten.matmul.default, matrices, read)
    found = spell.emit(aten.reshape.default, mixed, [1, -1, rows, columns])
    if bias is None:
        return found
    return spell.emit(aten.add.Tensor, found, spell.emit(aten.reshape.default, bias, [1, -1, 1, 1]))


def pair(numbers: int | Sequence[int]) -> list[int]:
    """Return a number for rows and one for columns."""
    numbers = [numbers] if isinstance(numbers, int) else numbers
    return [*numbers] * 2 if len(numbers) == 1 else [*numbers]


def triple(numbers: int | Sequence[int]) -> list[int]:
    """Return a number for frames, one for rows and one for columns."""
    numbers = [numbers] if isinstance(numbers, int) else numbers
    return [*numbers] * 3 if len(numbers) == 1 else [*numbers]
