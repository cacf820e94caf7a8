"""Narrows sums: over features on rows, over sites together with the sums of the rest."""

from __future__ import annotations

from math import prod

import torch
from torch import fx

from maskfx.ir.geometry.lanes import Feature, Lane, is_image, node_shape
from maskfx.ir.programs.sources import Rest, RestStats, RestSum
from maskfx.passes.context import (
    Editor,
    PassContext,
    Unsupported,
    argument,
    aten,
    need_lane,
    op_name,
    ops,
)
from maskfx.passes.narrow.norms import runs_over_sites
from maskfx.passes.operators import OF_ONE, REDUCTIONS, SITE_SOFTMAXES, reduced_dims
from maskfx.passes.row_form import is_rows

TINY = 1e-12  # added to a variance whose root is divided by


def narrow_reductions(graph: fx.Graph, ctx: PassContext) -> int:
    """Reduce rows.

    Before  y = mean(x, [2, 3])              (over the whole image)
    After   y = site_mean(rows, sums of the rest, spans)
    and     y = linalg_vector_norm(x, 2, [2, 3])
    becomes y = sqrt(site_mean(rows * rows, sums of the rest, spans))   (a sum, not divided)
    and     y = softmax(x, -1)               (the sites are the last axis)
    becomes y = exp(rows - site_logsumexp(rows, rest, spans, rest spans)[owner])
    and     y = matmul(a, b)                 (of a window's sites, which are features of a row)
    becomes y = matmul(rows, other rows)
    Keeps   reductions of values without sites.
    """
    count = 0
    for node in list(graph.nodes):
        name = op_name(node)
        if node.op != "call_function" or "val" not in node.meta:
            continue
        if name in REDUCTIONS and reduces_rows(node):
            reduce(Editor(graph, ctx, node), node)
        elif name in SITE_SOFTMAXES and is_rows(node) and runs_over_sites(node):
            softmax(Editor(graph, ctx, node), node)
        elif name in ("matmul", "bmm") and touches_rows(node):
            product(Editor(graph, ctx, node), node)
        else:
            continue
        count += 1
    return count


def touches_rows(node: fx.Node) -> bool:
    return any(
        isinstance(n, fx.Node) and n.meta.get("lane") and need_lane(n).has_sites
        for n in node.args[:2]
    )


def reduces_rows(node: fx.Node) -> bool:
    return touches_rows(node) and isinstance(node.meta.get("lane"), Lane)


def reduce(edit: Editor, node: fx.Node) -> None:
    lane = need_lane(node.args[0])
    axes, keep = reduced_dims(node, len(lane.dims))
    rows = edit.rows(node.args[0])  # type: ignore[arg-type]
    if not need_lane(node).has_sites:
        over_sites(edit, node, rows, lane)
        return
    places = [lane.row_dim(a) for a in axes if lane.features(a) > 1]
    if not places:
        edit.replace(rows if op_name(node) in OF_ONE else refuse(edit))
        return
    name = op_name(node)
    position = 2 if name in ("norm", "linalg_vector_norm") else 1
    kwargs = {k: v for k, v in node.kwargs.items() if k not in ("dim", "keepdim")}
    kwargs.update(later_arguments(node, position + 1))
    args = [rows, *node.args[1:position]]
    single = isinstance(argument(node, position, "dim"), int)  # as `prod` and `any` need it
    where = places[0] if single else places
    edit.replace(edit.emit(node.target, *args, where, **kwargs))  # type: ignore[arg-type]


def later_arguments(node: fx.Node, position: int) -> dict[str, fx.node.Argument]:
    """Return by name the arguments passed by position from `position` on, such as `unbiased`."""
    assert isinstance(node.target, torch._ops.OpOverload)
    names = [one.name for one in node.target._schema.arguments]
    said = dict(zip(names[position:], node.args[position:], strict=False))
    said.pop("keepdim", None)
    return said


def refuse(edit: Editor) -> fx.Node:
    raise Unsupported(edit.node, "it reduces an axis of size one")


def over_sites(edit: Editor, node: fx.Node, rows: fx.Node, lane: Lane) -> None:
    shape = lane.row_shape()
    size = prod(shape)
    flat = edit.reshape(rows, shape, [size])
    if not all(is_image(s) for s in lane.segments):
        raise Unsupported(node, f"it sums over {lane.segments}")
    gone = [lane.row_dim(a) for a in reduced_dims(node, len(lane.dims))[0] if lane.features(a) > 1]
    if op_name(node) in ("var", "std"):
        spread(edit, node, rows, lane, gone)
        return
    whole = bool(gone) and len(gone) == len(shape)
    if gone and not whole:  # some of the features first
        named = {"sum": "dim_IntList", "mean": "dim"}
        target = getattr(getattr(aten, op_name(node)), named.get(op_name(node), "default"))
        shape = [n for axis, n in enumerate(shape, 1) if axis not in gone]
        size = prod(shape)
        flat = edit.reshape(edit.emit(target, rows, gone), shape, [size])
    if op_name(node) in ("amax", "amin", "logsumexp"):
        extreme(edit, node, flat, lane, shape, whole)
        return
    norm, dtype = op_name(node) == "linalg_vector_norm", node.meta["val"].dtype
    narrow = norm and dtype in (torch.float16, torch.bfloat16)
    if narrow:  # squares exceed the range of half precision
        flat = edit.emit(aten.to.dtype, flat, torch.float32)
    if norm:
        flat = edit.emit(aten.mul.Tensor, flat, flat)
    if whole:
        joined = aten.mean.dim if op_name(node) == "mean" else aten.sum.dim_IntList
        flat, size = edit.emit(joined, flat, [1], True), 1
    tap = edit.tap(flat, lane.segments, [size])
    rest = edit.input(f"sum_{tap}", RestSum(tap, lane.segments))
    out = edit.emit(ops.site_mean, flat, rest, edit.spans(lane.segments), op_name(node) == "mean")
    if norm:
        out = edit.emit(aten.sqrt.default, out)
    if narrow:
        out = edit.emit(aten.to.dtype, out, dtype)
    edit.replace_plain(edit.emit(aten.reshape.default, out, [-1, *node_shape(node)[1:]]))


def spread(edit: Editor, node: fx.Node, rows: fx.Node, lane: Lane, gone: list[int]) -> None:
    """Emit a variance: from the scale of a norm, whose groups are the features that are kept.

    `gone` are the dimensions of the rows over which it runs too.
    """
    shape, segments = lane.row_shape(), lane.segments
    order = [*(d for d in range(1, len(shape) + 1) if d not in gone), *gone]
    if order != sorted(order):
        rows = edit.emit(aten.permute.default, rows, [0, *order])
        shape = [shape[d - 1] for d in order]
    size, each = prod(shape), prod(shape[len(shape) - len(gone) :])
    groups, flat = size // each, edit.reshape(rows, shape, [size])
    tap = edit.tap(flat, segments, [size], groups)
    rest, spans = edit.input(f"stats_{tap}", RestStats(tap, segments)), edit.spans(segments)
    scales = edit.emit(ops.group_scale, flat, rest, spans, groups, None, None, TINY)
    scale = edit.emit(aten.select.int, scales, 1, 0)
    scale = edit.emit(aten.slice.Tensor, scale, 1, 0, size, each)  # it has one for each feature
    variance = edit.emit(aten.sub.Tensor, edit.emit(aten.pow.Tensor_Scalar, scale, -2), TINY)
    variance = edit.emit(aten.clamp_min.default, variance, 0)
    correction = correction_of(node)
    if correction:
        one = edit.emit(aten.slice.Tensor, flat, 1, 0, 1)
        ones = edit.emit(aten.full_like.default, one, 1, dtype=torch.float32)
        counted = edit.tap(ones, segments, [1])
        others = edit.input(f"sum_{counted}", RestSum(counted, segments))
        count = edit.emit(ops.site_mean, ones, others, spans, False)
        count = edit.emit(aten.mul.Tensor, count, each) if each > 1 else count
        less = edit.emit(aten.sub.Tensor, count, correction)
        variance = edit.emit(aten.mul.Tensor, variance, edit.emit(aten.div.Tensor, count, less))
    if op_name(node) == "std":
        variance = edit.emit(aten.sqrt.default, variance)
    found = edit.emit(aten.to.dtype, variance, node.meta["val"].dtype)
    edit.replace_plain(edit.emit(aten.reshape.default, found, [-1, *node_shape(node)[1:]]))


def correction_of(node: fx.Node) -> float:
    """Return what a variance subtracts from the number of values."""
    given = node.kwargs.get("correction", node.kwargs.get("unbiased"))
    if "correction" not in node.kwargs and given is None:
        given = node.args[2] if len(node.args) > 2 else 1
    return 1.0 if given is None else float(given)  # type: ignore[arg-type]


def extreme(
    edit: Editor, node: fx.Node, flat: fx.Node, lane: Lane, shape: list[int], whole: bool
) -> None:
    name, size = op_name(node), prod(shape)
    if whole:
        flat, size = edit.emit(getattr(aten, name).default, flat, [1], True), 1
    if name == "logsumexp":
        found = log_sum(edit, flat, lane, size)
        out = edit.emit(aten.to.dtype, found, node.meta["val"].dtype)
    else:
        rest, spans, others = whole_rows(edit, flat, lane, size)
        out = edit.emit(ops.site_extreme, flat, rest, spans, others, name == "amax")
    edit.replace_plain(edit.emit(aten.reshape.default, out, [-1, *node_shape(node)[1:]]))


def whole_rows(edit: Editor, flat: fx.Node, lane: Lane, size: int) -> list[fx.Node]:
    """Return the cached rows of the rest, and the spans of the rows and of the rest."""
    tap = edit.tap(flat, lane.segments, [size])
    rest = edit.input(f"rest_{tap}", Rest(tap, lane.segments))
    return [rest, edit.spans(lane.segments), edit.rest_spans(lane.segments)]


def log_sum(edit: Editor, flat: fx.Node, lane: Lane, size: int) -> fx.Node:
    """Return the log-sum-exps over all sites of each request."""
    return edit.emit(ops.site_logsumexp, flat, *whole_rows(edit, flat, lane, size))


def softmax(edit: Editor, node: fx.Node) -> None:
    """Emit a softmax over sites: the exponentials of what is left after the log-sum-exp."""
    lane, dtype = need_lane(node), node.meta["val"].dtype
    shape = lane.row_shape()
    flat = edit.reshape(edit.rows(node.args[0]), shape, [prod(shape)])  # type: ignore[arg-type]
    total = log_sum(edit, flat, lane, prod(shape))
    each = edit.emit(aten.index_select.default, total, 0, edit.owner(lane.segments))
    left = edit.emit(aten.sub.Tensor, flat, each)
    found = left if op_name(node) == "log_softmax" else edit.emit(aten.exp.default, left)
    edit.replace(edit.reshape(edit.emit(aten.to.dtype, found, dtype), [prod(shape)], shape))


def product(edit: Editor, node: fx.Node) -> None:
    a, b = node.args[:2]
    assert isinstance(a, fx.Node)
    assert isinstance(b, fx.Node)
    la, lb, out = need_lane(a), need_lane(b), need_lane(node)
    if not out.has_sites:  # both have sites, which are summed over
        images = tuple(s for s in la.segments if is_image(s))
        if images != la.segments or la.segments != lb.segments:
            raise Unsupported(node, f"it sums products over {la.segments}")
        left, right = rows3(edit, a, la, before=True), rows3(edit, b, lb, before=False)
        rests = []
        for rows, shape in ((left, shape3(la, True)), (right, shape3(lb, False))):
            tap = edit.tap(rows, images, shape)
            rests.append(edit.input(f"rest_{tap}", Rest(tap, images)))
        spans, rest = edit.spans(images), edit.rest_spans(images)
        mixed = edit.emit(ops.site_product, left, right, *rests, spans, rest)
        edit.replace_plain(edit.emit(aten.reshape.default, mixed, [-1, *node_shape(node)[1:]]))
        return
    if la.has_sites and lb.has_sites:
        edit.replace(per_row(edit, node, a, b))
        return
    if la.has_sites and lb.kind == "const":
        edit.replace(by_constant(edit, node, a, b))
        return
    if la.has_sites:
        rows, matrix = rows3(edit, a, la, before=False), matrix4(edit, b, lb)
    else:
        rows = rows3(edit, b, lb, before=True)
        matrix = edit.emit(aten.transpose.int, matrix4(edit, a, la), 2, 3)
    mixed = edit.emit(ops.owner_product, rows, matrix, edit.spans(out.segments))
    shape = out.row_shape()
    depth = node_shape(node)[-1] if la.has_sites else node_shape(node)[-2]
    edit.replace(edit.reshape(mixed, [prod(shape) // depth, depth], shape))


def per_row(edit: Editor, node: fx.Node, a: fx.Node, b: fx.Node) -> fx.Node:
    """Multiply two matrices of features of each row."""
    factors = []
    for value in (a, b):
        shape, own = node_shape(value)[-2:], need_lane(value).row_shape()
        wide = [prod(own) // prod(shape), *shape]
        factors.append(edit.reshape(edit.rows(value), own, wide))
    out, shape = edit.emit(aten.matmul.default, *factors), need_lane(node).row_shape()
    sides = node_shape(node)[-2:]
    return edit.reshape(out, [prod(shape) // prod(sides), *sides], shape)


def by_constant(edit: Editor, node: fx.Node, a: fx.Node, b: fx.Node) -> fx.Node:
    """Multiply rows by a matrix for all requests, or by one for each of their heads."""
    la, shape = need_lane(a), node_shape(b)
    if la.features(-1) == 1:
        raise Unsupported(node, "it multiplies along an axis of size one")
    if prod(shape[:-2]) == 1:
        rows, matrix = edit.rows(a), edit.emit(aten.reshape.default, b, shape[-2:])
        out = edit.emit(aten.matmul.default, rows, matrix)
    else:
        many = prod(shape[:-2])
        heads, depth = shape3(la, before=False)
        if heads not in (1, many):
            raise Unsupported(node, f"its {many} matrices don't fit {heads} heads")
        rows = edit.emit(aten.transpose.int, rows3(edit, a, la, before=False), 0, 1)
        matrix = edit.emit(aten.reshape.default, b, [many, *shape[-2:]])
        out = edit.emit(aten.transpose.int, edit.emit(aten.matmul.default, rows, matrix), 0, 1)
        return edit.reshape(out, [many, shape[-1]], need_lane(node).row_shape())
    wide = [*la.row_shape()[:-1], shape[-1]]
    return edit.reshape(out, wide, need_lane(node).row_shape())


def shape3(lane: Lane, before: bool) -> list[int]:
    """Return [heads, depth]; the depth axis stands before the sites, or behind them."""
    heads = prod(a.size for d in lane.dims[:-2] for a in d if isinstance(a, Feature))
    return [heads, lane.features(-2 if before else -1)]


def rows3(edit: Editor, value: fx.Node, lane: Lane, before: bool) -> fx.Node:
    return edit.reshape(edit.rows(value), lane.row_shape(), shape3(lane, before))


def matrix4(edit: Editor, value: fx.Node, lane: Lane) -> fx.Node:
    if not lane.has_batch:
        raise Unsupported(edit.node, f"{value} has no batch: {lane}")
    shape = node_shape(value)
    heads = prod(a.size for d in lane.dims[:-2] for a in d if isinstance(a, Feature))
    return edit.emit(aten.reshape.default, value, [-1, heads, *shape[-2:]])
