"""Lowering: a program in standard operators, for formats that don't know those of maskfx.

The operators of `maskfx.ops` read on the host where each request's rows are, and loop over the
requests. In their place stand operators over all rows at once. Vectors with the request of each row
state which rows belong together, so numbers of rows and requests stay free.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx
from torch._ops import OpOverload

from maskfx import ops
from maskfx.compiler.build_program import recording_twin, taps_of
from maskfx.errors import CompileError
from maskfx.ir.lazy_module import LazyModule
from maskfx.ir.program import Program
from maskfx.ir.sources import (
    Owner,
    Pairs,
    PairTable,
    Requests,
    Rest,
    RestOwner,
    RestSpans,
    Source,
    Spans,
)

aten = torch.ops.aten
Node = fx.Node


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


class Lowering:
    """Copies a program's graph with the operators of maskfx replaced.

    Attributes:
        graph: the new graph.
        inputs: its inputs in order.
        values: the new graph's node for each node of the old one.
    """

    def __init__(self, program: Program) -> None:
        self.interface = program.interface
        self.graph = fx.Graph()
        self.inputs: dict[str, Source] = {}
        self.values: dict[Node, Node] = {}
        self._places: dict[Source, Node] = {}
        self._known: dict[Hashable, Node] = {}
        kinds = {tap.dtype for tap in self.interface.taps.values()}
        self.wide = torch.float64 if torch.float64 in kinds else torch.float32
        for node in program.module.graph.nodes:
            self._copy(node)

    def _copy(self, node: Node) -> None:
        if node.op == "placeholder":
            source = self.interface.inputs[str(node.target)]
            if not isinstance(source, Spans | RestSpans | Pairs):
                self.values[node] = self.input(str(node.target), source)
                self.values[node].meta = dict(node.meta)
            return
        if node.op == "call_function" and node.target in RULES:
            arguments = normalized(node)
            self.values[node] = RULES[node.target](self, arguments)
            if "val" in node.meta:
                self.values[node].meta.setdefault("val", node.meta["val"])
            return
        self.values[node] = self.graph.node_copy(node, lambda n: self.values[n])

    def drop_unread(self, kept: Sequence[Node]) -> None:
        """Remove what neither the results nor these values depend on, and unread inputs."""
        self.graph.eliminate_dead_code(lambda n: n in kept or n.op in ("placeholder", "output"))
        for node in self.graph.find_nodes(op="placeholder"):
            if not node.users:
                self.graph.erase_node(node)
                del self.inputs[str(node.target)]
        order = [str(node.target) for node in self.graph.find_nodes(op="placeholder")]
        self.inputs = {name: self.inputs[name] for name in order}
        self.graph.lint()

    # What rules use.

    def input(self, name: str, source: Source) -> Node:
        """Return the input with this source, and add it behind the others if it is missing."""
        if source not in self._places:
            last = next(reversed(self._places.values()), None)
            with self.graph.inserting_after(last) if last else self.graph.inserting_before():
                self._places[source] = self.graph.placeholder(name)
            self.inputs[name] = source
        return self._places[source]

    def source(self, old: Node) -> Source:
        """Return the source of an input of the old graph."""
        return self.interface.inputs[str(old.target)]

    def call(self, target: OpOverload, *args: fx.node.Argument) -> Node:
        """Call an operator; the same call has one node."""
        key = (target, *(tuple(a) if isinstance(a, list) else a for a in args))
        if key not in self._known:
            self._known[key] = self.graph.call_function(target, args)
        return self._known[key]

    def new(self, old: Node) -> Node:
        return self.values[old]

    def owner(self, spans: Node) -> Node:
        """Return the request of each row that these spans divide."""
        match self.source(spans):
            case Spans(segments):
                return self.input(f"owner_{slug(segments)}", Owner(segments))
            case RestSpans(segments):
                return self.input(f"rest_owner_{slug(segments)}", RestOwner(segments))
        raise CompileError(f"lower: {spans} is an input without rows")

    def members(self, owner: Node, like: Node | None = None) -> Node:
        """Return (requests, rows): 1 where a row belongs to the request, else 0.

        Args:
            owner: the request of each row.
            like: a value of the result's dtype; by default sums over sites are made with it.
        """
        numbers = self.input("requests", Requests())
        pairs = self.call(
            aten.eq.Tensor,
            self.call(aten.unsqueeze.default, numbers, 1),
            self.call(aten.unsqueeze.default, owner, 0),
        )
        if like is not None:
            return self.call(aten.type_as.default, pairs, like)
        return self.call(aten.to.dtype, pairs, self.wide)


Rule = Callable[[Lowering, dict[str, object]], Node]
RULES: dict[object, Rule] = {}


def rule(target: object) -> Callable[[Rule], Rule]:
    def noted(function: Rule) -> Rule:
        RULES[target] = function
        return function

    return noted


def normalized(node: Node) -> dict[str, object]:
    """Return the arguments of an operator by name."""
    names = [argument.name for argument in node.target._schema.arguments]  # type: ignore[union-attr]
    return dict(zip(names, node.args, strict=False)) | dict(node.kwargs)


def slug(segments: tuple[str, ...]) -> str:
    return "_".join(s.replace(":", "").replace("@", "_region") for s in segments)


@rule(ops.gather)
def gather(low: Lowering, given: dict[str, Any]) -> Node:
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
def enter(low: Lowering, given: dict[str, Any]) -> Node:
    rows, loaded, table = (low.new(given[name]) for name in ("rows", "loaded", "table"))
    return low.call(aten.index_select.default, low.call(aten.cat.default, [rows, loaded]), 0, table)


@rule(ops.scale_shift)
def scale_shift(low: Lowering, given: dict[str, Any]) -> Node:
    rows, scales, owner = (low.new(given[name]) for name in ("rows", "scales", "owner"))
    halves = [low.call(aten.select.int, scales, 1, half) for half in (0, 1)]
    scale, shift = (low.call(aten.index_select.default, half, 0, owner) for half in halves)
    wide = low.call(aten.add.Tensor, low.call(aten.mul.Tensor, rows, scale), shift)
    return low.call(aten.type_as.default, wide, rows)


@rule(ops.group_scale)
def group_scale(low: Lowering, given: dict[str, Any]) -> Node:
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
    scale = call(aten.rsqrt.default, call(aten.add.Scalar, variance, given["eps"]))
    merged = call(aten.add.Tensor, rest_mean, call(aten.mul.Tensor, share, delta))
    shift = call(aten.neg.default, call(aten.mul.Tensor, merged, scale))
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


def by_group(low: Lowering, weight: Node, groups: int) -> Node:
    wide = low.call(aten.to.dtype, low.new(weight), low.wide)
    return low.call(aten.unflatten.int, wide, 0, [groups, -1])


@rule(ops.attend)
def attend(low: Lowering, given: dict[str, Any]) -> Node:
    """Attend over all rows, to the keys of the same request alone."""
    call = low.call
    q, k, v = (low.new(given[name]) for name in ("q", "k", "v"))
    queries, keys = low.owner(given["q_spans"]), low.owner(given["k_spans"])
    loaded = low.source(given["rest_spans"])
    assert isinstance(loaded, RestSpans)
    if loaded.segments:
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


def pair_table(low: Lowering, given: dict[str, Any]) -> Node:
    """Return the input with the attention's mask."""
    pairs, rest = low.source(given["bias"]), given["rest_k"]
    assert isinstance(pairs, Pairs)
    loaded = low.source(rest) if rest.op == "placeholder" else None
    taps = low.interface.taps
    tap = taps[loaded.tap] if isinstance(loaded, Rest) else next(iter(taps.values()))
    source = PairTable(pairs.value, pairs.queries, pairs.keys, pairs.heads, tap.dtype)
    return low.input(f"{given['bias'].target}_table", source)


@rule(ops.site_mean)
def site_mean(low: Lowering, given: dict[str, Any]) -> Node:
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
def site_extreme(low: Lowering, given: dict[str, Any]) -> Node:
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
def site_product(low: Lowering, given: dict[str, Any]) -> Node:
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
def owner_product(low: Lowering, given: dict[str, Any]) -> Node:
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
