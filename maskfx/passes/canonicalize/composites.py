"""Rewrites operators that others express to these: gates, similarities, sorts and the like."""

from __future__ import annotations

import operator
from collections.abc import Callable

import torch
from torch import fx

from maskfx.ir.nodes import ancestors
from maskfx.passes.context import PassContext, argument, aten, node_value, op_name
from maskfx.passes.spelling import Speller

Rewrite = Callable[[Speller, fx.Node], fx.Node | None]  # None: it stays; itself: it is gone


def canonicalize_composites(graph: fx.Graph, ctx: PassContext) -> int:
    """Rewrite operators that have no rule of their own.

    Before  y = glu(x, 1); z = prelu(x, slopes); s = sort(x, 1)[0]
    After   y = slice(x, 1, 0, n) * sigmoid(slice(x, 1, n, 2 n)); z = where(x > 0, x, slopes * x)
    and     s = gather(x, 1, argsort(x, 1))
    and     v, i = max(x, 1) becomes v = amax(x, 1); i = argmax(x, 1)
    and     v, i = median(x, 1) becomes i = slice(argsort(x, 1), 1, k, k + 1)
    and     new_zeros(x, [2, 8]) becomes full([2, 8], 0), whatever x is
    Keeps   sizes that aren't numbers, where these are cut.
    """
    count = 0
    for node in list(graph.nodes):
        rewrite = REWRITES.get(op_name(node)) if node.op == "call_function" else None
        if rewrite is None or not node.args or not isinstance(node.args[0], (fx.Node, list, tuple)):
            continue
        spell = Speller(graph, node)
        new = rewrite(spell, node)
        if new is None:
            spell.drop()
            continue
        if new is not node:
            spell.replace(new)
        count += 1
    return count


def shape_of(value: object) -> list[object]:
    return list(node_value(value).shape) if isinstance(value, fx.Node) else []


def glu(spell: Speller, node: fx.Node) -> fx.Node | None:
    source, shape = node.args[0], shape_of(node.args[0])
    axis = argument(node, 1, "dim", -1) % len(shape)
    size = shape[axis]
    if not isinstance(size, int):
        return None
    value, gate = (
        spell.emit(aten.slice.Tensor, source, axis, start, start + size // 2)
        for start in (0, size // 2)
    )
    return spell.emit(aten.mul.Tensor, value, spell.emit(aten.sigmoid.default, gate))


def prelu(spell: Speller, node: fx.Node) -> fx.Node | None:
    source, slopes = node.args[0], argument(node, 1, "weight")
    [count], rank = shape_of(slopes) or [1], len(shape_of(source))
    if count == 1:  # it is elementwise
        return None
    if rank > 2:
        slopes = spell.emit(aten.reshape.default, slopes, [count] + [1] * (rank - 2))
    below = spell.emit(aten.mul.Tensor, source, slopes)
    return spell.emit(aten.where.self, spell.emit(aten.gt.Scalar, source, 0), source, below)


def rrelu(spell: Speller, node: fx.Node) -> fx.Node | None:
    if argument(node, 3, "training", False):
        return None
    lower, upper = argument(node, 1, "lower", 1 / 8), argument(node, 2, "upper", 1 / 3)
    return spell.emit(aten.leaky_relu.default, node.args[0], (lower + upper) / 2)


def cosine_similarity(spell: Speller, node: fx.Node) -> fx.Node | None:
    values, axis = node.args[:2], argument(node, 2, "dim", 1)
    least = argument(node, 3, "eps", 1e-8)
    units = []
    for value in values:
        length = spell.emit(aten.linalg_vector_norm.default, value, 2, [axis], True)
        length = spell.emit(aten.clamp_min.default, length, least)
        units.append(spell.emit(aten.div.Tensor, value, length))
    return spell.emit(aten.sum.dim_IntList, spell.emit(aten.mul.Tensor, *units), [axis])


def diff(spell: Speller, node: fx.Node) -> fx.Node | None:
    source, shape = node.args[0], shape_of(node.args[0])
    axis = argument(node, 2, "dim", -1) % len(shape)
    ends = argument(node, 3, "prepend"), argument(node, 4, "append")
    size = shape[axis]
    if argument(node, 1, "n", 1) != 1 or ends != (None, None) or not isinstance(size, int):
        return None
    later = spell.emit(aten.slice.Tensor, source, axis, 1, size)
    return spell.emit(
        aten.sub.Tensor, later, spell.emit(aten.slice.Tensor, source, axis, 0, size - 1)
    )


def channel_shuffle(spell: Speller, node: fx.Node) -> fx.Node | None:
    parts = spell.emit(aten.unflatten.int, node.args[0], 1, [argument(node, 1, "groups"), -1])
    return spell.emit(aten.flatten.using_ints, spell.emit(aten.transpose.int, parts, 1, 2), 1, 2)


def by_vector(spell: Speller, node: fx.Node) -> fx.Node | None:
    """Rewrite a product by a vector, of which one number is left for each row."""
    matrix, vector = node.args[:2]
    if len(shape_of(vector)) != 1 or len(shape_of(matrix)) < 2:
        return None
    return spell.emit(aten.sum.dim_IntList, spell.emit(aten.mul.Tensor, matrix, vector), [-1])


def mm(spell: Speller, node: fx.Node) -> fx.Node | None:
    """Rewrite a product of two matrices; quantized layers write their products so."""
    return product(spell, node.args[0], node.args[1])


def addmm(spell: Speller, node: fx.Node) -> fx.Node | None:
    if argument(node, 3, "beta", 1) != 1 or argument(node, 4, "alpha", 1) != 1:
        return None
    found = product(spell, node.args[1], node.args[2])
    return found and spell.emit(aten.add.Tensor, found, node.args[0])


def product(spell: Speller, left: object, right: object) -> fx.Node | None:
    """Return a product as a linear layer if only its right matrix comes from weights alone."""
    if not isinstance(left, fx.Node) or not isinstance(right, fx.Node):
        return None
    if from_weights(right) and not from_weights(left):
        return spell.emit(aten.linear.default, left, spell.emit(aten.t.default, right))
    return spell.emit(aten.matmul.default, left, right)


def from_weights(node: fx.Node) -> bool:
    """Return True if a value follows from the module's tensors, not from a call's arguments."""
    return not any(one.op == "placeholder" for one in ancestors([node]))


def index(spell: Speller, node: fx.Node) -> fx.Node | None:
    """Rewrite an index along one dimension behind the first, or one of a table's rows."""
    indices = list(argument(node, 1, "indices"))
    given = [axis for axis, one in enumerate(indices) if one is not None]
    if given == [0]:
        return looked_up(spell, node.args[0], indices[0])
    if len(given) != 1:
        return None
    [axis] = given
    numbers = node_value(indices[axis])
    if numbers.dim() != 1 or numbers.dtype not in (torch.int64, torch.int32):
        return None
    return spell.emit(aten.index_select.default, node.args[0], axis, indices[axis])


def looked_up(spell: Speller, table: object, numbers: fx.Node) -> fx.Node | None:
    """Return the rows of a matrix of weights that numbers of a call choose."""
    if not isinstance(table, fx.Node) or not from_weights(table):
        return None
    if not any(one.op == "placeholder" for one in ancestors([numbers], sizes=False)):
        return None  # places that follow from sizes
    rows, value = node_value(table), node_value(numbers)
    whole = value.dtype in (torch.int64, torch.int32)
    if rows.dim() != 2 or not whole or not rows.is_floating_point():
        return None
    places = spell.emit(aten.remainder.Scalar, numbers, rows.shape[0])  # -1 is the last row
    return spell.emit(aten.embedding.default, table, places)


def one_hot(spell: Speller, node: fx.Node) -> fx.Node | None:
    classes = argument(node, 1, "num_classes", -1)
    if not isinstance(classes, int) or classes < 1:
        return None
    device = node_value(node).device
    numbers = spell.emit(aten.arange.default, classes, device=device, pin_memory=False)
    same = spell.emit(aten.eq.Tensor, spell.emit(aten.unsqueeze.default, node.args[0], -1), numbers)
    return spell.emit(aten._to_copy.default, same, dtype=torch.int64)


def sort(spell: Speller, node: fx.Node) -> fx.Node | None:
    """Rewrite values and indices, which one operator returns, to two operators."""
    if any(user.target is not operator.getitem for user in node.users):
        return None
    source, axis = node.args[0], argument(node, 1, "dim", -1)
    if "stable" in node.kwargs:
        return None
    order = spell.emit(
        aten.argsort.default, source, axis, bool(argument(node, 2, "descending", False))
    )
    for user in list(node.users):
        own = Speller(spell.graph, user)
        picked = order
        if user.args[1] == 0:
            picked = own.emit(aten.gather.default, source, axis, order)
        own.replace(picked)
    spell.graph.erase_node(node)
    return node


def ranked(spell: Speller, node: fx.Node) -> fx.Node | None:
    """Rewrite the value at one place of the order along an axis, and its index."""
    if any(user.target is not operator.getitem for user in node.users):
        return None
    median = op_name(node) == "median"
    source, axis = node.args[0], argument(node, 1 if median else 2, "dim", -1)
    keep, size = argument(node, 2 if median else 3, "keepdim", False), shape_of(source)
    if axis is None or not size or not isinstance(size[axis], int):
        return None
    place = (size[axis] - 1) // 2 if median else argument(node, 1, "k") - 1
    for user in list(node.users):
        own = Speller(spell.graph, user)
        found = at_rank(own, source, axis, place, value=bool(user.args[1] == 0))
        own.replace(found if keep else own.emit(aten.squeeze.dim, found, axis))
    spell.graph.erase_node(node)
    return node


def at_rank(
    spell: Speller, source: object, axis: int, place: int, *, value: bool = True
) -> fx.Node:
    """Return the value, or the index, at a place of the order along an axis, which stays."""
    found = spell.emit(aten.argsort.default, source, axis, False)
    if value:
        found = spell.emit(aten.gather.default, source, axis, found)
    return spell.emit(aten.slice.Tensor, found, axis, place, place + 1)


def quantile(spell: Speller, node: fx.Node) -> fx.Node | None:
    source, share, axis = node.args[0], argument(node, 1, "q"), argument(node, 2, "dim")
    shape = shape_of(source)
    linear = argument(node, 4, "interpolation", "linear") == "linear"
    if axis is None or not linear or not isinstance(share, float):
        return None
    size = shape[axis]
    if not isinstance(size, int):
        return None
    place, rest = int(share * (size - 1)), share * (size - 1) % 1
    found = at_rank(spell, source, axis, place)
    if rest:
        found = spell.emit(aten.lerp.Scalar, found, at_rank(spell, source, axis, place + 1), rest)
    keep = argument(node, 3, "keepdim", False)
    return found if keep else spell.emit(aten.squeeze.dim, found, axis)


def extreme(spell: Speller, node: fx.Node) -> fx.Node | None:
    """Rewrite values and indices along an axis, which one operator returns, to two operators."""
    largest = node.target is aten.max.dim
    if not largest and node.target is not aten.min.dim:
        return None
    if any(user.target is not operator.getitem for user in node.users):
        return None
    source, axis, keep = node.args[0], argument(node, 1, "dim"), argument(node, 2, "keepdim", False)
    for user in list(node.users):
        own = Speller(spell.graph, user)
        if user.args[1] == 0:
            values = aten.amax.default if largest else aten.amin.default
            own.replace(own.emit(values, source, [axis], keep))
        else:
            own.replace(
                own.emit((aten.argmax if largest else aten.argmin).default, source, axis, keep)
            )
    spell.graph.erase_node(node)
    return node


def argsort(spell: Speller, node: fx.Node) -> fx.Node | None:
    """Name the axis by position, as operators do that run along one."""
    if len(node.args) > 1 or node.kwargs.get("stable"):
        return None
    named = argument(node, 1, "dim", -1), bool(argument(node, 2, "descending", False))
    return spell.emit(aten.argsort.default, node.args[0], *named)


def filled(spell: Speller, node: fx.Node) -> fx.Node | None:
    """Make a tensor of one number without the value whose dtype it has."""
    own, value = node_value(node), {"new_ones": 1, "new_zeros": 0}.get(op_name(node))
    if not isinstance(node.args[0], fx.Node) or node.args[0].op == "placeholder":
        return None
    number = argument(node, 2, "fill_value") if value is None else value
    given = {"dtype": own.dtype, "device": own.device, "pin_memory": False}
    return spell.emit(aten.full.default, argument(node, 1, "size"), number, **given)


REWRITES: dict[str, Rewrite] = {
    "addmm": addmm,
    "argsort": argsort,
    "channel_shuffle": channel_shuffle,
    "cosine_similarity": cosine_similarity,
    "diff": diff,
    "glu": glu,
    "index": index,
    "kthvalue": ranked,
    "matmul": by_vector,
    "max": extreme,
    "median": ranked,
    "min": extreme,
    "mm": mm,
    "mv": by_vector,
    "new_full": filled,
    "new_ones": filled,
    "new_zeros": filled,
    "one_hot": one_hot,
    "prelu": prelu,
    "quantile": quantile,
    "rrelu": rrelu,
    "sort": sort,
}
