"""Follow the axes of every value through the graph.

One rule per kind of operator says what becomes of the atoms. What no rule covers, or what a rule
refuses, is marked to run dense, with the reason.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from maskfx.capture import is_symbol_arithmetic
from maskfx.lanes import (
    Atom,
    Batch,
    Dim,
    Feature,
    Lane,
    Level,
    NotLaned,
    Tokens,
    X,
    Y,
    filling_segment,
    fixed_segment,
    int_hint,
    lane_of,
    lanes_of,
    node_shape,
    regroup,
    set_lane,
    shape_hint,
)
from maskfx.passes.context import PassContext, argument, node_value, op_name
from maskfx.passes.mark_stages import CONST, STEP, stage_of
from maskfx.passes.operators import (
    CONVOLUTIONS,
    NORMS,
    POINTWISE,
    REDUCTIONS,
    SOFTMAXES,
    VIEWS,
    WINDOWS,
    is_zero_padding,
    patch_of,
    reduced_dims,
    sums_sites,
    window_geometry,
)


def mark_lanes(graph: fx.Graph, ctx: PassContext) -> int:
    """Give every value its lane, and find what has to run dense."""
    marker, refused = Marker(ctx), dict(ctx.dense)
    for node in graph.nodes:
        marker.mark(node)
    if marker.missed & marker.joints.keys():  # the size of an axis that is joined further down
        ctx.dense.clear()
        ctx.dense.update(refused)
        for node in graph.nodes:
            marker.mark(node)
    return 0


@dataclass
class Marker:
    """Carries the pyramid from node to node, and which sizes are those of joint token axes."""

    ctx: PassContext
    joints: dict[Any, set[Dim]] = field(default_factory=dict)
    missed: set[Any] = field(default_factory=set)

    def mark(self, node: fx.Node) -> None:
        if node.op == "placeholder":
            set_lane(node, self.own(node, lane_of(node)))
            return
        if node.op == "output":
            return
        value = node.meta.get("val")
        if node.op == "get_attr":
            tensor = node_value(node)
            if isinstance(tensor, torch.Tensor):
                set_lane(node, constant_lane(list(tensor.shape)))
            return
        if is_symbol_arithmetic(node):
            return
        if not isinstance(value, (torch.Tensor, list, tuple)):
            if stage_of(node) == STEP:
                self.refuse(node, "its value is no tensor")
            return
        try:
            lane = self.own(node, self.infer(node))
            if lane is None:
                raise NotLaned("it has no axis that requests could lie along")
            if isinstance(lane, Lane) and lane.has_sites:
                self.note_joints(node, lane.segments)  # refuses lanes with half a picture
            set_lane(node, lane)
        except NotLaned as error:
            if stage_of(node) == STEP and not folds_into_users(node):
                self.refuse(node, str(error))
            set_lane(node, self.own(node, self.read_lane(node)))

    @property
    def single(self) -> bool:
        """Was one sample captured, without a batch?"""
        return self.ctx.pyramid.batch == 1

    def own(self, node: fx.Node, lane: Lanes) -> Lanes:
        """The lane of a request's value that has no batch axis: a first axis of size one is it."""
        if isinstance(lane, tuple):
            return tuple(own if isinstance(own := self.own(node, a), Lane) else None for a in lane)
        known = lane is None or lane.has_sites or lane.has_batch
        if known or not self.single or stage_of(node) == CONST:
            return lane
        assert lane is not None
        first = bool(lane.dims) and not lane.dims[0]
        return Lane(((Batch(),), *lane.dims[1:])) if first else None

    def refuse(self, node: fx.Node, reason: str) -> None:
        self.ctx.dense.setdefault(node.name, reason)

    def note_joints(self, node: fx.Node, segments: tuple[str, ...]) -> None:
        """Remember what the sizes of joint token axes mean."""
        for size in node.meta["val"].shape if len(segments) > 1 else ():
            whole = sum(self.ctx.pyramid.segment_size(s) for s in segments)
            if isinstance(size, torch.SymInt) and int_hint(size) == whole:
                self.joints.setdefault(size.node.expr, set()).add((Tokens(segments),))

    def infer(self, node: fx.Node) -> Lane | tuple[Lane | None, ...]:
        name = op_name(node)
        if node.target is operator.getitem:
            parts = lanes_of(node.args[0])  # type: ignore[arg-type]
            part = parts[node.args[1]] if parts is not None else None  # type: ignore[index]
            if part is None:
                raise NotLaned(f"the axes of {node.args[0]} are unknown")
            return part
        inputs = [
            n
            for n in node.all_input_nodes
            if isinstance(n.meta.get("val"), torch.Tensor) or lane_of(n)
        ]
        lanes = [lane_of(n) for n in inputs]
        rule = RULES.get(name)
        plain = all(lane is not None and not lane.has_sites for lane in lanes)
        if rule is not None:
            try:
                found: Lane | tuple[Lane | None, ...] = rule(self, node)
                return found
            except NotLaned:
                if not plain or any(lane and lane.has_batch for lane in lanes):
                    raise
        if plain:
            batched = [lane for lane in lanes if lane and lane.has_batch]
            if any(lane.dims[0] != (Batch(),) for lane in batched):
                raise NotLaned(f"no rule covers {node.target}, and the batch isn't its first axis")
            return self.plain_lanes(node, bool(batched))
        if any(lane is None for lane in lanes):
            raise NotLaned("the axes of an input are unknown")
        raise NotLaned(f"no rule covers {node.target}")

    def plain_lanes(self, node: fx.Node, batch: bool) -> Lane | tuple[Lane | None, ...]:
        """Without sites any operator runs as it is; the batch, if any, comes first."""

        def one(value: Any) -> Lane | None:
            if not isinstance(value, torch.Tensor):
                return None
            return self.read_value(value, batch)

        value = node.meta["val"]
        if isinstance(value, torch.Tensor):
            lane = one(value)
            if lane is None:
                raise NotLaned("the axes of its result are unknown")
            return lane
        return tuple(one(v) for v in value)

    # Reading a lane off sizes, where no rule tells it.

    def read_lane(self, node: fx.Node) -> Lane | tuple[Lane | None, ...] | None:
        value = node.meta.get("val")
        if isinstance(value, torch.Tensor):
            return self.read_value(value, batch=True)
        if isinstance(value, (list, tuple)):
            return tuple(
                self.read_value(v, True) if isinstance(v, torch.Tensor) else None for v in value
            )
        return None

    def read_value(self, value: torch.Tensor, batch: bool) -> Lane | None:
        dims: list[Dim] = []
        for axis, size in enumerate(value.shape):
            if isinstance(size, torch.SymInt) and size.node.hint is None:
                return None  # it depends on what a tensor holds
            dim = self.read_dim(size, batch and axis == 0)
            if dim is None:
                return None
            dims.append(dim)
        return Lane(tuple(dims))

    def read_dim(self, size: Any, first: bool) -> Dim | None:
        hint = int_hint(size)
        if hint == 1:
            return ()
        if not isinstance(size, torch.SymInt):
            fixed = isinstance(self.ctx.symbols.get("batch", 0), int)
            if first and hint == self.ctx.pyramid.batch and fixed:
                return (Batch(),)
            return (Feature(hint),)
        symbols = {str(s) for s in size.node.expr.free_symbols}
        role = {str(e): r for r, e in self.ctx.symbols.items() if not isinstance(e, int)}
        roles = {role.get(s, "?") for s in symbols}
        pyramid = self.ctx.pyramid
        if roles == {"batch"} and hint == pyramid.batch:
            return (Batch(),)
        if roles == {"tokens"} and hint == pyramid.segments.get("image"):
            return (Tokens(("image",)),)
        if len(roles) == 1 and hint == pyramid.segments.get(min(roles)):
            return (Tokens((min(roles),)),)
        for level, (h, w) in enumerate(pyramid.hints):
            if hint == h * w and roles == {"y", "x"}:
                return (Y(level), X(level))
            if hint == h and roles == {"y"}:
                return (Y(level),)
            if hint == w and roles == {"x"}:
                return (X(level),)
        self.missed.add(size.node.expr)
        joint = self.joints.get(size.node.expr, set())
        return next(iter(joint)) if len(joint) == 1 else None

    # Rules' helpers.

    def need(self, node: Any) -> Lane:
        lane = lane_of(node)
        if lane is None:
            raise NotLaned(f"the axes of its input {node} are unknown")
        return lane

    def unify(self, nodes: Sequence[Any], out: Sequence[int], free: int | None = None) -> list[Dim]:
        """The dimensions of a broadcast; `free` is a dimension that isn't compared.

        A value that belongs to the request (a position table, a mask) takes over the meaning of
        the dimensions it meets.
        """
        tensors = [
            n for n in nodes if isinstance(n, fx.Node) and isinstance(node_value(n), torch.Tensor)
        ]
        tensors.sort(key=lambda n: (-stage_of(n), lane_of(n) is None))
        dims: list[Dim] = [() for _ in out]
        for node in tensors:
            shape = shape_hint(node_value(node))
            offset = len(out) - len(shape)
            lane = lane_of(node)
            adopted: list[Dim | None] = [None] * len(shape)
            if lane is not None:
                adopted = list(lane.dims)
            for axis, size in enumerate(shape):
                if size == 1 or axis + offset == free:
                    continue
                mine, seen = adopted[axis], dims[axis + offset]
                if not seen:
                    if mine is None:
                        raise NotLaned(f"the axes of its input {node} are unknown")
                    dims[axis + offset] = mine
                elif not same_dim(mine, seen):
                    if stage_of(node) == STEP or not self.same_size(size, seen):
                        raise NotLaned(
                            f"{node} doesn't line up: {lane} in a broadcast to {Lane(tuple(dims))}"
                        )
                    adopted[axis] = seen
            clean = [() if d is None else d for d in adopted]
            if lane is None or tuple(clean) != lane.dims:
                set_lane(node, Lane(tuple(clean)))
        return dims

    def same_size(self, size: int, dim: Dim) -> bool:
        total = 1
        for atom in dim:
            total *= self.ctx.pyramid.size(atom)
        return total == size


def folds_into_users(node: fx.Node) -> bool:
    """A zero padding before convolutions is part of their windows."""
    users = [op_name(u) for u in node.users]
    padding = op_name(node) in ("constant_pad_nd", "pad") and is_zero_padding(node)
    return padding and bool(users) and all(u in WINDOWS for u in users)


def same_dim(a: Dim | None, b: Dim) -> bool:
    """Equal up to the way features are factored."""
    if a is None:
        return False
    return a == b or merged(a) == merged(b)


def merged(dim: Dim) -> tuple[Atom, ...]:
    out: list[Atom] = []
    for atom in dim:
        if isinstance(atom, Feature) and out and isinstance(out[-1], Feature):
            out[-1] = Feature(out[-1].size * atom.size)
        else:
            out.append(atom)
    return tuple(out)


def constant_lane(shape: Sequence[int]) -> Lane:
    return Lane(tuple((Feature(s),) if s != 1 else () for s in shape))


Lanes = Lane | tuple[Lane | None, ...] | None
Rule = Callable[[Marker, fx.Node], Any]
RULES: dict[str, Rule] = {}


def rule(*names: str) -> Callable[[Rule], Rule]:
    def register(function: Rule) -> Rule:
        for name in names:
            RULES[name] = function
        return function

    return register


@rule(*POINTWISE)
def pointwise(m: Marker, node: fx.Node) -> Lane:
    return Lane(tuple(m.unify(node.all_input_nodes, node_shape(node))))


@rule(*VIEWS)
def view(m: Marker, node: fx.Node) -> Lane:
    return Lane(regroup(m.need(node.args[0]).atoms(), node_shape(node), m.ctx.pyramid))


@rule("permute")
def permute(m: Marker, node: fx.Node) -> Lane:
    lane = m.need(node.args[0])
    return Lane(tuple(lane.dims[i] for i in argument(node, 1, "dims")))


@rule("transpose", "swapaxes")
def transpose(m: Marker, node: fx.Node) -> Lane:
    dims = list(m.need(node.args[0]).dims)
    a, b = argument(node, 1, "dim0"), argument(node, 2, "dim1")
    dims[a], dims[b] = dims[b], dims[a]
    return Lane(tuple(dims))


@rule("t", "numpy_T")
def t(m: Marker, node: fx.Node) -> Lane:
    return Lane(tuple(reversed(m.need(node.args[0]).dims)))


@rule("expand", "expand_as", "broadcast_to")
def expand(m: Marker, node: fx.Node) -> Lane:
    lane, value = m.need(node.args[0]), node.meta["val"]
    dims: list[Dim] = []
    offset = value.dim() - len(lane.dims)
    for axis, size in enumerate(value.shape):
        own = lane.dims[axis - offset] if axis >= offset else ()
        if not own and int_hint(size) != 1:
            read = m.read_dim(size, axis == 0)
            if read is None:
                raise NotLaned(f"it expands to {size}, which is no known axis")
            own = read
        dims.append(own)
    return Lane(tuple(dims))


@rule("cat", "concat", "concatenate")
def cat(m: Marker, node: fx.Node) -> Lane:
    listed: Any = node.args[0]
    nodes: list[fx.Node] = [n for n in listed if node_value(n).numel() != 0]
    out = node_shape(node)
    axis = argument(node, 1, "dim", 0) % len(out)
    if m.single:
        fill_up(m, node, nodes, axis)
    lanes = [m.need(n) for n in nodes]
    dims = m.unify(nodes, out, free=axis)
    parts = [lane_of(n).dims[axis] for n in nodes]  # type: ignore[union-attr]
    sizes = [node_shape(n)[axis] for n in nodes]
    if all(all(isinstance(a, Feature) for a in p) for p in parts):
        dims[axis] = (Feature(sum(sizes)),)
        return Lane(tuple(dims))
    segments: list[str] = []
    for lane, part, size in zip(lanes, parts, sizes, strict=True):
        if all(isinstance(a, Feature) for a in part):
            segments.append(fixed_segment(size))
        elif (
            all(isinstance(a, (Y, X, Tokens)) for a in part)
            and lane.segments
            and same_part(part, lane)
        ):
            segments.extend(lane.segments)
        else:
            raise NotLaned(f"it joins {lane} along dimension {axis}")
    dims[axis] = (Tokens(tuple(segments)),)
    return Lane(tuple(dims))


def fill_up(m: Marker, node: fx.Node, nodes: Sequence[fx.Node], axis: int) -> None:
    """What stands beside tokens on their axis are tokens too: a filling, or a fixed number."""
    held = [lane for n in nodes if (lane := lane_of(n)) is not None and has_site(lane.dims[axis])]
    for other in nodes:
        lane = lane_of(other)
        if not held or lane is not None and (lane.has_sites or lane.has_batch):
            continue
        shape, size = node_shape(other), other.meta["val"].shape[axis]
        segment = fixed_segment(shape[axis]) if isinstance(size, int) else None
        if segment is None and len(held[0].segments) == 1:
            whole = node.meta["val"].shape[axis]
            segment = filling_of(m, held[0].segments[0], shape[axis], whole)
        if segment is not None:
            dims: list[Dim] = [(Feature(s),) if s != 1 else () for s in shape]
            dims[axis] = (Tokens((segment,)),)
            set_lane(other, Lane(tuple(dims)))


def filling_of(m: Marker, segment: str, size: int, whole: Any) -> str | None:
    """The segment of so many rows that fills another up to a multiple, which `whole` tells."""
    if not isinstance(whole, torch.SymInt):
        return None
    numbers = {int(n) for n in whole.node.expr.atoms() if n.is_Integer and n > 1}
    for multiple in sorted(numbers, reverse=True):
        filling = filling_segment(multiple, segment)
        if m.ctx.pyramid.segment_size(filling) == size and int_hint(whole) % multiple == 0:
            return filling
    return None


def has_site(dim: Dim) -> bool:
    return any(isinstance(a, (Y, X, Tokens)) for a in dim)


def same_part(part: Dim, lane: Lane) -> bool:
    """Does this dimension hold the whole of the lane's site axes?"""
    return sum(isinstance(a, (Y, X, Tokens)) for a in lane.atoms()) == len(part)


@rule("stack")
def stack(m: Marker, node: fx.Node) -> Lane:
    nodes: list[fx.Node] = list(node.args[0])  # type: ignore[arg-type]
    out = node_shape(node)
    axis = argument(node, 1, "dim", 0) % len(out)
    dims = m.unify(nodes, out[:axis] + out[axis + 1 :])
    return Lane(
        tuple([*dims[:axis], (Feature(len(nodes)),) if len(nodes) > 1 else (), *dims[axis:]])
    )


@rule("split", "split_with_sizes", "chunk", "tensor_split")
def split(m: Marker, node: fx.Node) -> tuple[Lane, ...]:
    lane = m.need(node.args[0])
    axis = argument(node, 2, "dim", 0) % len(lane.dims)
    lanes, start = [], 0
    for part in node.meta["val"]:
        size = shape_hint(part)[axis]
        lanes.append(cut(m, lane, axis, start, start + size))
        start += size
    return tuple(lanes)


@rule("unbind")
def unbind(m: Marker, node: fx.Node) -> tuple[Lane, ...]:
    lane = m.need(node.args[0])
    axis = argument(node, 1, "dim", 0) % len(lane.dims)
    if not lane.is_feature_dim(axis):
        raise NotLaned(f"it takes {lane} apart along dimension {axis}")
    out = Lane(lane.dims[:axis] + lane.dims[axis + 1 :])
    return tuple(out for _ in node.meta["val"])


@rule("select")
def select(m: Marker, node: fx.Node) -> Lane:
    lane = m.need(node.args[0])
    axis = argument(node, 1, "dim") % len(lane.dims)
    if not lane.is_feature_dim(axis):
        raise NotLaned(f"it selects from dimension {axis} of {lane}")
    return Lane(lane.dims[:axis] + lane.dims[axis + 1 :])


@rule("slice", "narrow")
def slice_(m: Marker, node: fx.Node) -> Lane:
    lane = m.need(node.args[0])
    axis = argument(node, 1, "dim", 0) % len(lane.dims)
    before, after = node_shape(node.args[0])[axis], node_shape(node)[axis]  # type: ignore[arg-type]
    if before == after:
        return lane
    start = int_hint(hinted(argument(node, 2, "start", 0) or 0))
    start = start + before if start < 0 else start
    if argument(node, 4, "step", 1) != 1 and not lane.is_feature_dim(axis):
        raise NotLaned(f"it takes every other part of dimension {axis} of {lane}")
    return cut(m, lane, axis, start, start + after)


def hinted(value: Any) -> Any:
    return value.meta["val"] if isinstance(value, fx.Node) else value


def cut(m: Marker, lane: Lane, axis: int, start: int, stop: int) -> Lane:
    """The part from start to stop of one dimension."""
    dims = list(lane.dims)
    if lane.is_feature_dim(axis):
        dims[axis] = (Feature(stop - start),) if stop - start != 1 else ()
        return Lane(tuple(dims))
    if len(dims[axis]) == 1 and isinstance(dims[axis][0], Tokens):
        inside, at = [], 0
        for segment in dims[axis][0].segments:  # type: ignore[union-attr]
            size = m.ctx.pyramid.segment_size(segment)
            if start <= at and at + size <= stop:
                inside.append(segment)
            elif at < stop and start < at + size:
                raise NotLaned(f"it cuts through {segment} of {lane}")
            at += size
        if not inside:
            raise NotLaned(f"it keeps nothing of dimension {axis} of {lane}")
        dims[axis] = m.ctx.pyramid.token_atoms(inside)
        return Lane(tuple(dims))
    raise NotLaned(f"it cuts dimension {axis} of {lane}")


@rule("slice_scatter")
def slice_scatter(m: Marker, node: fx.Node) -> Lane:
    lane, source = m.need(node.args[0]), m.need(node.args[1])
    axis = argument(node, 2, "dim", 0) % len(lane.dims)
    size = node_shape(node.args[1])[axis]  # type: ignore[arg-type]
    whole = node_shape(node)[axis]
    if size == whole:
        return lane
    start = int_hint(hinted(argument(node, 3, "start", 0) or 0))
    start = start + whole if start < 0 else start
    if argument(node, 5, "step", 1) != 1 and not lane.is_feature_dim(axis):
        raise NotLaned(f"it writes every other part of {lane}")
    part = cut(m, lane, axis, start, start + size)
    if any(not same_dim(a, b) for a, b in zip(part.dims, source.dims, strict=True)):
        raise NotLaned(f"it writes {source} into {lane}")
    return lane


@rule("linear")
def linear(m: Marker, node: fx.Node) -> Lane:
    lane = m.need(node.args[0])
    need_constant(m, node.args[1:])
    if not lane.is_feature_dim(-1):
        raise NotLaned(f"it multiplies along {lane.dims[-1]}")
    size = node_shape(node)[-1]
    return Lane((*lane.dims[:-1], (Feature(size),) if size != 1 else ()))


@rule("embedding")
def embedding(m: Marker, node: fx.Node) -> Lane:
    need_constant(m, node.args[:1])
    size = node_shape(node)[-1]
    return Lane((*m.need(node.args[1]).dims, (Feature(size),) if size != 1 else ()))


def need_constant(m: Marker, nodes: Sequence[Any]) -> None:
    for node in nodes:
        if isinstance(node, fx.Node) and m.need(node).kind != "const":
            raise NotLaned(f"its weight {node} depends on the request")


@rule(*NORMS)
def feature_norm(m: Marker, node: fx.Node) -> Lane:
    lane = m.need(node.args[0])
    count = len(argument(node, 1, "normalized_shape"))
    if not all(lane.is_feature_dim(-1 - i) for i in range(count)):
        raise NotLaned(f"it normalises over {lane}")
    need_constant(m, node.all_input_nodes[1:])
    return lane


@rule(*SOFTMAXES)
def softmax(m: Marker, node: fx.Node) -> Lane:
    lane = m.need(node.args[0])
    if not lane.is_feature_dim(argument(node, 1, "dim")):
        raise NotLaned(f"it runs along a site axis of {lane}")
    return lane


@rule("group_norm")
def group_norm(m: Marker, node: fx.Node) -> Lane:
    lane = m.need(node.args[0])
    need_constant(m, node.all_input_nodes[1:])
    if not lane.is_feature_dim(1) or lane.dims[0] != (Batch(),):
        raise NotLaned(f"it normalises {lane}")
    if lane.has_sites and any(lane.features(i) > 1 for i in range(2, len(lane.dims))):
        raise NotLaned(f"it normalises {lane}")
    return lane


@rule("batch_norm")
def batch_norm(m: Marker, node: fx.Node) -> Lane:
    lane = m.need(node.args[0])
    if not lane.is_feature_dim(1) or argument(node, 5, "training", False):
        raise NotLaned(f"it normalises {lane}")
    return lane


@rule(*REDUCTIONS)
def reduction(m: Marker, node: fx.Node) -> Lane:
    lane = m.need(node.args[0])
    axes, keep = reduced_dims(node, len(lane.dims))
    gone = [a for i in axes for a in lane.dims[i]]
    sites = [a for a in gone if isinstance(a, (Y, X, Tokens))]
    if any(isinstance(a, Batch) for a in gone):
        raise NotLaned(f"it reduces the batch of {lane}")
    if sites:
        everything = [a for a in lane.atoms() if isinstance(a, (Y, X, Tokens))]
        if len(sites) != len(everything) or not sums_sites(node):
            raise NotLaned(f"it reduces a site axis of {lane}")
        if any(isinstance(a, Feature) for a in gone):
            raise NotLaned(f"it reduces sites and features of {lane} at once")
    if keep:
        return Lane(tuple(() if i in axes else d for i, d in enumerate(lane.dims)))
    return Lane(tuple(d for i, d in enumerate(lane.dims) if i not in axes))


@rule(*CONVOLUTIONS)
def convolution(m: Marker, node: fx.Node) -> Lane:
    geometry = window_geometry(node, m.need)
    need_constant(m, node.args[1:3])
    source = picture_level(geometry.lane, "it convolves")
    level = m.ctx.pyramid.derive(Level(parent=source, **geometry.level()))
    return resized(m, node, geometry.lane, level)


def picture_level(lane: Lane, what: str) -> int:
    """The level of a value laid out as (batch, channels, rows, columns), perhaps of one frame."""
    *front, y, x = lane.dims
    plain = len(front) in (2, 3) and lane.is_feature_dim(1) and not any(front[2:])
    if not plain or len(y) != 1 or len(x) != 1:
        raise NotLaned(f"{what} {lane}")
    if not isinstance(y[0], Y) or not isinstance(x[0], X):
        raise NotLaned(f"{what} {lane}")
    return y[0].level


def resized(m: Marker, node: fx.Node, lane: Lane, level: int) -> Lane:
    """The lane of a picture at another level, with as many channels as the result has."""
    out = node_shape(node)
    if m.ctx.pyramid.hints[level] != (out[-2], out[-1]):
        raise NotLaned(f"its output {out} fits no level")
    channels: Dim = (Feature(out[1]),) if out[1] != 1 else ()
    return Lane((lane.dims[0], channels, *lane.dims[2:-2], (Y(level),), (X(level),)))


@rule("conv_transpose2d")
def conv_transpose2d(m: Marker, node: fx.Node) -> Lane:
    """Each site becomes a patch of its own; patches that overlap aren't narrowed."""
    lane = m.need(node.args[0])
    need_constant(m, node.args[1:3])
    source, patch = picture_level(lane, "it convolves"), patch_of(node)
    return resized(m, node, lane, m.ctx.pyramid.derive(Level(parent=source, times=(patch, patch))))


@rule("avg_pool2d")
def avg_pool2d(m: Marker, node: fx.Node) -> Lane:
    found: Lane = convolution(m, node)
    return found


@rule("upsample_nearest2d", "_upsample_nearest_exact2d")
def upsample(m: Marker, node: fx.Node) -> Lane:
    lane, out = m.need(node.args[0]), node_shape(node)
    if len(lane.dims) != 4 or len(lane.dims[2]) != 1 or not isinstance(lane.dims[2][0], Y):
        raise NotLaned(f"it resamples {lane}")
    source = lane.dims[2][0].level
    have = m.ctx.pyramid.hints[source]
    if have == (out[2], out[3]):
        return lane
    level = m.ctx.pyramid.level_of((out[2], out[3]))
    if level is None:
        times = (out[2] // have[0], out[3] // have[1])
        level = m.ctx.pyramid.derive(Level(parent=source, times=times))
        if m.ctx.pyramid.hints[level] != (out[2], out[3]):
            raise NotLaned(f"it resamples {have} to {tuple(out[2:])}")
    return Lane((lane.dims[0], lane.dims[1], (Y(level),), (X(level),)))


@rule("constant_pad_nd", "pad")
def pad(m: Marker, node: fx.Node) -> Lane:
    lane, pads = m.need(node.args[0]), argument(node, 1, "pad")
    dims = list(lane.dims)
    out = node_shape(node)
    for i in range(len(pads) // 2):
        axis = len(dims) - 1 - i
        if pads[2 * i] == 0 and pads[2 * i + 1] == 0:
            continue
        if not lane.is_feature_dim(axis):
            raise NotLaned(f"it pads a site axis of {lane}")
        dims[axis] = (Feature(out[axis]),)
    return Lane(tuple(dims))


@rule("scaled_dot_product_attention")
def attention(m: Marker, node: fx.Node) -> Lane:
    q, k, v = (m.need(n) for n in node.args[:3])
    for name, lane in (("query", q), ("key", k), ("value", v)):
        if not lane.is_feature_dim(-1):
            raise NotLaned(f"its {name} is {lane}")
    if any(isinstance(a, Batch) for lane in (q, k, v) for d in lane.dims[-2:] for a in d):
        raise NotLaned(f"it attends from one request to another: {q}")
    if q.has_sites or k.has_sites:
        if argument(node, 5, "is_causal", False):
            raise NotLaned("causal attention isn't narrowed")
        if not q.has_sites:
            raise NotLaned(f"its queries {q} have no sites, its keys {k} have")
        if merged(k.dims[-2]) != merged(v.dims[-2]):
            raise NotLaned(f"keys {k} and values {v} differ")
        parts = [a for a in q.dims[-2] if not isinstance(a, Feature)]
        if len(parts) != len(q.dims[-2]) or not same_part(q.dims[-2], q):
            raise NotLaned(f"its queries are {q}")
        if (any(not d for d in q.dims[:1]) and not m.single) or not all(
            isinstance(a, (Batch, Feature)) for d in q.dims[:-2] for a in d
        ):
            raise NotLaned(f"its queries are {q}")
        if not k.has_batch and not m.single:
            raise NotLaned(f"its keys {k} have no batch")
    return Lane((*q.dims[:-1], v.dims[-1]))


def line_up(parts: Sequence[tuple[Dim, ...]]) -> list[Dim]:
    width = max(len(p) for p in parts)
    dims: list[Dim] = [() for _ in range(width)]
    for part in parts:
        for i, dim in enumerate(part):
            j = i + width - len(part)
            if dim and dims[j] and not same_dim(dim, dims[j]):
                raise NotLaned(f"{Lane(part)} doesn't line up")
            dims[j] = dims[j] or dim
    return dims


@rule("matmul", "bmm")
def matmul(m: Marker, node: fx.Node) -> Lane:
    a, b = m.need(node.args[0]), m.need(node.args[1])
    na, nb = len(a.dims), len(b.dims)
    if na < 2 or nb < 2:
        raise NotLaned(f"it multiplies {a} by {b}")
    inner_a, inner_b = a.dims[-1], b.dims[-2]
    if not same_dim(inner_a, inner_b):
        raise NotLaned(f"it multiplies {a} by {b}")
    if any(isinstance(x, Batch) for lane in (a, b) for d in lane.dims[-2:] for x in d):
        raise NotLaned(f"it mixes requests: {a} by {b}")
    outer = line_up([a.dims[:-2], b.dims[:-2]])
    out = Lane((*outer, a.dims[-2], b.dims[-1]))
    sites = sum(lane.has_sites for lane in (a, b))
    contracted = any(isinstance(x, (Y, X, Tokens)) for x in inner_a)
    if contracted and sites == 2 and not out.has_sites:
        return out
    if (
        not contracted
        and sites == 1
        and all(not isinstance(x, (Y, X, Tokens)) for d in outer for x in d)
    ):
        return out
    if not contracted and sites == 1 and b.kind == "const":
        return out
    if sites == 0:
        return out
    raise NotLaned(f"it multiplies {a} by {b}")


@rule("view_as_complex")
def view_as_complex(m: Marker, node: fx.Node) -> Lane:
    lane = m.need(node.args[0])
    if not lane.is_feature_dim(-1):
        raise NotLaned(f"it takes pairs of {lane}")
    return Lane(lane.dims[:-1])


@rule("view_as_real")
def view_as_real(m: Marker, node: fx.Node) -> Lane:
    return Lane((*m.need(node.args[0]).dims, (Feature(2),)))


@rule("repeat_interleave")
def repeat_interleave(m: Marker, node: fx.Node) -> Lane:
    lane = m.need(node.args[0])
    axis = argument(node, 2, "dim")
    if axis is None or not lane.is_feature_dim(axis):
        raise NotLaned(f"it repeats along a site axis of {lane}")
    dims = list(lane.dims)
    dims[axis] = (Feature(node_shape(node)[axis]),)
    return Lane(tuple(dims))


@rule("repeat")
def repeat(m: Marker, node: fx.Node) -> Lane:
    lane, out = m.need(node.args[0]), node.meta["val"]
    offset = out.dim() - len(lane.dims)
    dims: list[Dim] = [()] * offset + list(lane.dims)
    before = [1] * offset + node_shape(node.args[0])  # type: ignore[arg-type]
    for axis, size in enumerate(out.shape):
        if int_hint(size) == before[axis]:
            continue
        if not all(isinstance(a, Feature) for a in dims[axis]):
            raise NotLaned(f"it repeats dimension {axis} of {lane}")
        read = m.read_dim(size, axis == 0) if not dims[axis] else (Feature(int_hint(size)),)
        if read is None:
            raise NotLaned(f"it repeats to {size}, which is no known axis")
        dims[axis] = read
    return Lane(tuple(dims))
