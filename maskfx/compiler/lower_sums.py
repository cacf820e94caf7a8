"""Lowering rules for operators that sum over the sites of each request."""

from __future__ import annotations

import torch

from maskfx import ops
from maskfx.compiler.lowering import Lowering, Node, Operands, aten, rule
from maskfx.ir.programs.sources import RestSpans
from maskfx.ops.pairs import read_steps


@rule(ops.site_mean)
def site_mean(low: Lowering, given: Operands) -> Node:
    call = low.call
    rows, rest = low.new(given["rows"]), low.new(given["rest"])
    members = low.members(low.owner(given["spans"]))
    own = call(aten.mm.default, members, call(aten.to.dtype, rows, low.wide))
    total = call(aten.add.Tensor, own, call(aten.slice.Tensor, rest, 1, 0, -1))
    if given["divide"]:
        count = call(aten.sum.dim_IntList, members, [1], True)
        count = call(aten.add.Tensor, count, call(aten.slice.Tensor, rest, 1, -1))
        total = call(aten.div.Tensor, total, count)
    return call(aten.type_as.default, total, rows)


@rule(ops.site_extreme)
def site_extreme(low: Lowering, given: Operands) -> Node:
    """Reduce the rows of each request in a copy where the others' rows can't count."""
    call, sign = low.call, 1.0 if given["largest"] else -1.0
    rows = call(aten.cat.default, [low.new(given["rows"]), low.new(given["rest"])])
    owners = [low.owner(given["spans"]), low.owner(given["rest_spans"])]
    members = low.members(call(aten.cat.default, owners), rows)
    apart = call(aten.unsqueeze.default, call(aten.mul.Tensor, rows, sign), 0)
    own = call(aten.gt.Scalar, call(aten.unsqueeze.default, members, 2), 0.5)
    largest = call(aten.amax.default, call(aten.where.ScalarOther, own, apart, -torch.inf), [1])
    return call(aten.mul.Tensor, largest, sign)


@rule(ops.site_product)
def site_product(low: Lowering, given: Operands) -> Node:
    call = low.call
    left, right = (
        call(aten.cat.default, [low.new(given[own]), low.new(given[rest])])
        for own, rest in (("a", "rest_a"), ("b", "rest_b"))
    )
    owners = [low.owner(given["spans"]), low.owner(given["rest_spans"])]
    members = low.members(call(aten.cat.default, owners), left)
    columns = call(aten.permute.default, left, [1, 2, 0])
    apart = call(
        aten.mul.Tensor,
        call(aten.unsqueeze.default, columns, 0),
        call(aten.unsqueeze.default, call(aten.unsqueeze.default, members, 1), 1),
    )
    return call(aten.matmul.default, apart, call(aten.transpose.int, right, 0, 1))


@rule(ops.owner_product)
def owner_product(low: Lowering, given: Operands) -> Node:
    call = low.call
    rows, matrices = low.new(given["rows"]), low.new(given["matrices"])
    members = low.members(low.owner(given["spans"]), rows)
    every = call(aten.matmul.default, call(aten.transpose.int, rows, 0, 1), matrices)
    chosen = call(
        aten.mul.Tensor,
        every,
        call(aten.unsqueeze.default, call(aten.unsqueeze.default, members, 1), 3),
    )
    return call(aten.transpose.int, call(aten.sum.dim_IntList, chosen, [0]), 0, 1)


@rule(ops.site_logsumexp)
def site_logsumexp(low: Lowering, given: Operands) -> Node:
    """Sum the exponentials of each request's rows in a copy where the others' are zero."""
    call = low.call
    rows = call(aten.cat.default, [low.new(given["rows"]), low.new(given["rest"])])
    owners = [low.owner(given["spans"]), low.owner(given["rest_spans"])]
    members = low.members(call(aten.cat.default, owners))
    apart = call(aten.unsqueeze.default, call(aten.to.dtype, rows, low.wide), 0)
    own = call(aten.gt.Scalar, call(aten.unsqueeze.default, members, 2), 0.5)
    return call(aten.logsumexp.default, call(aten.where.ScalarOther, own, apart, -torch.inf), [1])


@rule(ops.site_pair_sum)
def site_pair_sum(low: Lowering, given: Operands) -> Node:
    """Weigh the values of all rows, with weights of zero between rows of different requests."""
    call = low.call
    q, k, v = (low.new(given[name]) for name in ("q", "k", "v"))
    queries, keys = low.owner(given["q_spans"]), low.owner(given["k_spans"])
    loaded = low.source(given["rest_spans"])
    if isinstance(loaded, RestSpans) and loaded.segments:
        k = call(aten.cat.default, [k, low.new(given["rest_k"])])
        v = call(aten.cat.default, [v, low.new(given["rest_v"])])
        keys = call(aten.cat.default, [keys, low.owner(given["rest_spans"])])
    own = call(
        aten.eq.Tensor,
        call(aten.unsqueeze.default, queries, 1),
        call(aten.unsqueeze.default, keys, 0),
    )
    columns = call(aten.permute.default, k, [1, 2, 0])
    weights = call(aten.matmul.default, call(aten.transpose.int, q, 0, 1), columns)
    for function, numbers in read_steps(given["steps"]):
        weights = call(function, weights, *numbers)
    weights = call(aten.where.ScalarOther, own, weights, 0.0)
    out = call(aten.matmul.default, weights, call(aten.transpose.int, v, 0, 1))
    return call(aten.transpose.int, out, 0, 1)


@rule(ops.pair_sum)
def pair_sum(low: Lowering, given: Operands) -> Node:
    """Weigh the values of each row by itself."""
    q, k, v = (low.new(given[name]) for name in ("q", "k", "v"))
    weights = low.call(aten.matmul.default, q, low.call(aten.transpose.int, k, -2, -1))
    for function, numbers in read_steps(given["steps"]):
        weights = low.call(function, weights, *numbers)
    return low.call(aten.matmul.default, weights, v)
