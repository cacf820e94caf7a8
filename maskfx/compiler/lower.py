"""Lowering: a program in standard operators, for formats that don't know those of maskfx.

The operators of `maskfx.ops` read on the host where each request's rows are, and loop over the
requests. In their place stand operators over all rows at once. Vectors with the request of each row
state which rows belong together, so numbers of rows and requests stay free.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from maskfx import ops
from maskfx.compiler import lower_sums
from maskfx.compiler.build_program import recording_twin, taps_of
from maskfx.compiler.lowering import RULES, Lowering, Node, Operands, aten, rule
from maskfx.errors import CompileError
from maskfx.ir.geometry.lanes import is_image
from maskfx.ir.modules.lazy_module import LazyModule
from maskfx.ir.programs.program import Program
from maskfx.ir.programs.sources import (
    Calls,
    CallSpans,
    LinePairs,
    Lines,
    Pairs,
    PairTable,
    Rest,
    RestSpans,
)

__all__ = ["RULES", "lower", "lower_sums"]


def lower(program: Program) -> Program:
    """Return the program with each operator of maskfx replaced by standard ones.

    Taps, outputs, weights and code are those of `program`; spans and ragged masks among its inputs
    become the sources `Requests`, `Owner`, `RestOwner` and `PairTable`.
    """
    done = Lowering(program)
    originals = dict(zip(program.recording.graph.nodes, program.module.graph.nodes, strict=True))
    taps = [done.values[originals[node]] for node in taps_of(program.recording)]
    done.drop_unread(taps)
    module = LazyModule(program.module, done.graph)
    interface = replace(program.interface, inputs=done.inputs)
    return replace(
        program, module=module, recording=recording_twin(module, taps), interface=interface
    )


@rule(ops.gather)
def gather(low: Lowering, given: Operands) -> Node:
    """Pick the rows of each window out of rows, halo and one row of zeros."""
    rows, halo, table = (low.new(given[name]) for name in ("rows", "halo", "table"))
    both = low.call(aten.cat.default, [rows, halo])
    source = low.call(aten.constant_pad_nd.default, both, [0, 0, 0, 1])
    picked = low.call(
        aten.index_select.default, source, 0, low.call(aten.flatten.using_ints, table)
    )
    count, places = (low.call(aten.sym_size.int, table, axis) for axis in (0, 1))
    width = low.call(aten.sym_size.int, rows, 1)
    apart = low.call(aten.reshape.default, picked, [count, places, width])
    return low.call(aten.flatten.using_ints, apart, 1)


@rule(ops.enter)
def enter(low: Lowering, given: Operands) -> Node:
    rows, loaded, table = (low.new(given[name]) for name in ("rows", "loaded", "table"))
    return low.call(aten.index_select.default, low.call(aten.cat.default, [rows, loaded]), 0, table)


@rule(ops.scale_shift)
def scale_shift(low: Lowering, given: Operands) -> Node:
    rows, scales, owner = (low.new(given[name]) for name in ("rows", "scales", "owner"))
    halves = [low.call(aten.select.int, scales, 1, half) for half in (0, 1)]
    scale, shift = (low.call(aten.index_select.default, half, 0, owner) for half in halves)
    wide = low.call(aten.add.Tensor, low.call(aten.mul.Tensor, rows, scale), shift)
    return low.call(aten.type_as.default, wide, rows)


@rule(ops.group_scale)
def group_scale(low: Lowering, given: Operands) -> Node:
    """Merge the moments of each request's rows with those of its rest.

    The deviations are summed around the rows' mean, so no large squares are subtracted.
    """
    call, groups = low.call, given["groups"]
    rest = call(aten.to.dtype, low.new(given["rest"]), low.wide)
    owner = low.owner(given["spans"])
    members = low.members(owner)
    rows = call(aten.to.dtype, low.new(given["rows"]), low.wide)
    grouped = call(aten.unflatten.int, rows, 1, [groups, -1])
    size = call(aten.sym_size.int, grouped, 2)
    number = call(aten.sum.dim_IntList, members, [1], True)
    some = call(aten.clamp.default, number, 1.0)
    mean = call(
        aten.div.Tensor, call(aten.mm.default, members, call(aten.mean.dim, grouped, [2])), some
    )
    around = call(
        aten.sub.Tensor,
        grouped,
        call(aten.unsqueeze.default, call(aten.index_select.default, mean, 0, owner), 2),
    )
    squares = call(aten.mean.dim, call(aten.mul.Tensor, around, around), [2])
    within = call(aten.div.Tensor, call(aten.mm.default, members, squares), some)
    count, rest_mean, spread = (call(aten.select.int, rest, 2, i) for i in (0, 1, 2))
    own = call(aten.mul.Tensor, number, size)
    total = call(aten.clamp.default, call(aten.add.Tensor, count, own), 1.0)
    share, delta = call(aten.div.Tensor, own, total), call(aten.sub.Tensor, mean, rest_mean)
    # variance = spread / total + share * (within + (1 - share) * delta ** 2)
    between = call(
        aten.mul.Tensor,
        call(aten.add.Scalar, call(aten.neg.default, share), 1.0),  # ONNX has no rsub
        call(aten.mul.Tensor, delta, delta),
    )
    variance = call(
        aten.add.Tensor,
        call(aten.div.Tensor, spread, total),
        call(aten.mul.Tensor, share, call(aten.add.Tensor, within, between)),
    )
    merged = call(aten.add.Tensor, rest_mean, call(aten.mul.Tensor, share, delta))
    return by_channel(low, given, merged, variance, groups, size)


def by_channel(
    low: Lowering, given: Operands, mean: Node, variance: Node, groups: int, size: Node | int
) -> Node:
    """Return scale and shift of each channel, of which a group has `size`."""
    call = low.call
    scale = call(aten.rsqrt.default, call(aten.add.Scalar, variance, given["eps"]))
    shift = call(aten.neg.default, call(aten.mul.Tensor, mean, scale))
    scale, shift = (
        call(aten.expand.default, call(aten.unsqueeze.default, half, 2), [-1, -1, size])
        for half in (scale, shift)
    )
    if given.get("weight") is not None:
        weight = by_group(low, given["weight"], groups)
        scale, shift = (call(aten.mul.Tensor, half, weight) for half in (scale, shift))
    if given.get("bias") is not None:
        shift = call(aten.add.Tensor, shift, by_group(low, given["bias"], groups))
    halves = [call(aten.flatten.using_ints, half, 1) for half in (scale, shift)]
    return call(aten.stack.default, halves, 1)


@rule(ops.site_moments)
def site_moments(low: Lowering, given: Operands) -> Node:
    call = low.call
    rows = call(aten.to.dtype, low.new(given["rows"]), low.wide)
    grouped = call(aten.unflatten.int, rows, 1, [given["groups"], -1])
    mean = call(aten.mean.dim, grouped, [2], True)
    around = call(aten.sub.Tensor, grouped, mean)
    variance = call(aten.mean.dim, call(aten.mul.Tensor, around, around), [2], True)
    return call(aten.cat.default, [mean, variance], 2)


@rule(ops.line_scale)
def line_scale(low: Lowering, given: Operands) -> Node:
    """Merge the moments of the rows of each line, and of its cached rows."""
    call, source = low.call, low.source(given["owner"])
    assert isinstance(source, Lines)
    parts = [low.new(given["moments"]), low.new(given["rest"])]
    every = call(aten.cat.default, [call(aten.to.dtype, part, low.wide) for part in parts])
    lines = call(aten.cat.default, [low.new(given["owner"]), low.new(given["rest_owner"])])
    numbers = low.lines(replace(source, part="numbers"))
    members = low.members(lines, numbers=numbers)
    count = call(aten.clamp.default, call(aten.sum.dim_IntList, members, [1], True), 1.0)
    mean, variance = (call(aten.select.int, every, 2, i) for i in (0, 1))
    middle = call(aten.div.Tensor, call(aten.mm.default, members, mean), count)
    around = call(aten.sub.Tensor, mean, call(aten.index_select.default, middle, 0, lines))
    each = call(aten.add.Tensor, variance, call(aten.mul.Tensor, around, around))
    spread = call(aten.div.Tensor, call(aten.mm.default, members, each), count)
    groups = given["moments"].args[1]
    return by_channel(low, given, middle, spread, groups, given["channels"] // groups)


def by_group(low: Lowering, weight: Node, groups: int) -> Node:
    wide = low.call(aten.to.dtype, low.new(weight), low.wide)
    return low.call(aten.unflatten.int, wide, 0, [groups, -1])


@rule(ops.attend)
def attend(low: Lowering, given: Operands) -> Node:
    """Attend over all rows, to the keys of the same request alone."""
    call = low.call
    q, k, v = (low.new(given[name]) for name in ("q", "k", "v"))
    if isinstance(low.source(given["k_spans"]), CallSpans):  # requests attend to their call's
        queries = keys = low.input("calls", Calls())
    else:
        queries, keys = low.owner(given["q_spans"]), low.owner(given["k_spans"])
    loaded = low.source(given["rest_spans"])
    assert isinstance(loaded, RestSpans | Lines)
    if any(map(is_image, loaded.segments)):
        k = call(aten.cat.default, [k, low.new(given["rest_k"])])
        v = call(aten.cat.default, [v, low.new(given["rest_v"])])
        keys = call(aten.cat.default, [keys, low.owner(given["rest_spans"])])
    mask = call(
        aten.eq.Tensor,
        call(aten.unsqueeze.default, queries, 1),
        call(aten.unsqueeze.default, keys, 0),
    )
    if given.get("bias") is not None:
        mask = call(aten.where.ScalarOther, mask, pair_table(low, given), -torch.inf)
        mask = call(aten.unsqueeze.default, mask, 0)
    q, k, v = (
        call(aten.unsqueeze.default, call(aten.transpose.int, x, 0, 1), 0) for x in (q, k, v)
    )
    out = low.graph.call_function(
        aten.scaled_dot_product_attention.default,
        (q, k, v, mask),
        {"scale": given.get("scale"), "enable_gqa": True},
    )
    return call(aten.transpose.int, call(aten.squeeze.dim, out, 0), 0, 1)


def pair_table(low: Lowering, given: Operands) -> Node:
    """Return the input with the attention's mask."""
    pairs, rest = low.source(given["bias"]), given["rest_k"]
    if isinstance(pairs, LinePairs):
        raise CompileError(
            "export: an attention along rows or columns has a mask, which no format has operators "
            'for yet; export part="dense", or run the denoiser here'
        )
    assert isinstance(pairs, Pairs)
    loaded = low.source(rest) if rest.op == "placeholder" else None
    taps = low.interface.taps
    tap = taps[loaded.tap] if isinstance(loaded, Rest) else next(iter(taps.values()))
    source = PairTable(pairs.value, pairs.queries, pairs.keys, pairs.heads, tap.dtype)
    return low.input(f"{given['bias'].target}_table", source)
