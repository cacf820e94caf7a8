"""The marker, which assigns lanes node by node, and helpers that its rules share."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import torch
from torch import fx
from torch.types import IntLikeType

from maskfx.ir.geometry.lanes import (
    SITES,
    Batch,
    Dim,
    Feature,
    Lane,
    NotLaned,
    Tokens,
    at_level,
    int_hint,
    lane_of,
    lanes_of,
    same_dim,
    set_lane,
    shape_hint,
)
from maskfx.ir.geometry.other_sizes import SizeExpr
from maskfx.ir.nodes import is_symbol_arithmetic
from maskfx.passes.context import PassContext, argument, node_value, op_name
from maskfx.passes.geometry import folds_into_users
from maskfx.passes.lane_rules.cuts import number_of, parted
from maskfx.passes.lane_rules.edges import joins_edge
from maskfx.passes.lane_rules.frames import frames_first, is_each_frame
from maskfx.passes.lane_rules.moved import level_to_meet, results_elsewhere, whole_level
from maskfx.passes.lane_rules.read_sizes import dim_of_size
from maskfx.passes.lane_rules.tables import Place, tables_at
from maskfx.passes.mark_stages import CONST, STEP, stage_of
from maskfx.passes.operators import POINTWISE

ATTENTION = "scaled_dot_product_attention"
REPEATS = frozenset({"expand", "broadcast_to", "expand_as"})


@dataclass
class Marker:
    """Assigns lanes node by node.

    Args:
        ctx: the compilation; its pyramid grows as rules find new levels.
        rules: lane rules by operator name.
        joints: for each size of a joint token axis, the dimensions that it can stand for.
        doubtful: the same, of an earlier round, or of values whose axes were read from sizes.
        missed: sizes that no known axis explained.
        read: values whose axes were read from sizes, because no rule determines them, and what is
            computed from these.
        differ: whether sizes that are equal at capture differ for other pictures, and are padded or
            cut to each other; then the next round keeps their levels apart.
        numbers: by role, the integers among the arguments.
        learned: whether this round found what the next one begins with: a place at which tokens
            are cut, or what an axis of a table lies along.
        adopted: what axes of tables lie along, found where a result of theirs meets tokens.
    """

    ctx: PassContext
    rules: Mapping[str, Rule]
    joints: dict[SizeExpr, set[Dim]] = field(default_factory=dict)
    doubtful: dict[SizeExpr, set[Dim]] = field(default_factory=dict)
    missed: set[SizeExpr] = field(default_factory=set)
    read: set[fx.Node] = field(default_factory=set)
    differ: bool = False
    numbers: dict[str, torch.SymInt] = field(default_factory=dict)
    learned: bool = False
    adopted: dict[Place, Dim] = field(default_factory=dict)

    def mark(self, node: fx.Node) -> None:
        if node.op == "placeholder":
            self.numbers.update(number_of(node))
            set_lane(node, self.own(node, parted(lane_of(node), self.ctx.pyramid)))
            return
        if node.op == "output":
            for result in results_elsewhere(self.ctx.pyramid, node):
                self.refuse(result, "it is a picture whose sites lie elsewhere than the input's")
            return
        value = node.meta.get("val")
        if node.op == "get_attr":
            tensor = node_value(node)
            if isinstance(tensor, torch.Tensor):
                set_lane(node, self.as_table(node, constant_lane(list(tensor.shape))))
            return
        if is_symbol_arithmetic(node):
            return
        if not isinstance(value, (torch.Tensor, list, tuple)):
            if stage_of(node) == STEP:
                self.refuse(node, "its value is no tensor")
            return
        if not self.read.isdisjoint(node.all_input_nodes):
            self.read.add(node)
        try:
            lane = self.as_table(node, self.own(node, self.infer(node)))
            if lane is None:
                raise NotLaned("it has no axis that requests could lie along")
            if node in self.read and isinstance(lane, Lane) and self.may_hide_batch(lane):
                raise NotLaned(f"the batch may lie along the first axis of {lane}")
            if stage_of(node) == STEP:
                self.check_inputs(node)
            if isinstance(lane, Lane) and lane.has_sites:
                self.note_joints(node, lane.segments)  # refuses lanes with one image axis
            set_lane(node, lane)
        except NotLaned as error:
            if stage_of(node) == STEP and not folds_into_users(node):
                self.refuse(node, str(error))
                self.read.add(node)
            set_lane(node, self.own(node, self.read_lane(node)))

    @property
    def single(self) -> bool:
        """Whether a single sample was captured, without a batch."""
        return self.ctx.pyramid.batch == 1

    @property
    def unfinished(self) -> bool:
        """Whether another round would know more than this one did."""
        found = self.differ and not self.ctx.pyramid.apart
        return found or self.learned or bool(self.missed & self.known_joints())

    def may_hide_batch(self, lane: Lane) -> bool:
        """Return True if a fixed batch of several samples may be the first axis of this value."""
        batch = self.ctx.pyramid.batch
        if self.single or lane.has_batch or not isinstance(self.ctx.symbols.get("batch", 0), int):
            return False
        return bool(lane.dims and lane.dims[0]) and (
            lane.is_feature_dim(0) and lane.features(0) % batch == 0
        )

    def is_batch_of_one(self, dim: Dim) -> bool:
        return self.single and all(isinstance(atom, Batch) for atom in dim)

    def own(self, node: fx.Node, lane: Lanes) -> Lanes:
        """Make a leading axis of size one the batch, for a value that has none."""
        if isinstance(lane, tuple):
            return tuple(own if isinstance(own := self.own(node, a), Lane) else None for a in lane)
        known = lane is None or lane.has_batch or lane.has_sites and not self.ctx.batch_of_one
        if known or not self.single or stage_of(node) == CONST:
            return lane
        assert lane is not None
        if lane.has_sites and lane.dims[0]:
            return lane
        first = bool(lane.dims) and not lane.dims[0]
        return Lane(((Batch(),), *lane.dims[1:])) if first else None

    def as_table(self, node: fx.Node, lane: Lanes) -> Lanes:
        """Return the lane of a table along what its axes were found to lie along."""
        if not isinstance(lane, Lane):
            return lane
        return Lane(tuple(self.adopted.get((node, i), dim) for i, dim in enumerate(lane.dims)))

    def refuse(self, node: fx.Node, reason: str) -> None:
        self.ctx.dense.setdefault(node.name, reason)

    def check_inputs(self, node: fx.Node) -> None:
        """Refuse operators that rows can't express: on sizes, or on lanes with one image axis."""
        mask = argument(node, 3, "attn_mask") if op_name(node) == ATTENTION else None
        for source in node.all_input_nodes:
            lane = lane_of(source)
            if source is mask or joins_edge(node):  # the mask's axes are queries and keys
                continue
            if op_name(node) in POINTWISE and is_symbol_arithmetic(source):
                raise NotLaned("it computes with the size of the picture or the batch")
            if op_name(node) not in POINTWISE and lane is not None and lane.is_half:
                raise NotLaned(f"its input {source} lies along one axis of the picture: {lane}")

    def note_joints(self, node: fx.Node, segments: tuple[str, ...]) -> None:
        """Record the dimensions that the sizes of joint token axes stand for."""
        for size in node.meta["val"].shape if len(segments) > 1 else ():
            whole = sum(self.ctx.pyramid.segment_size(s) for s in segments)
            if isinstance(size, torch.SymInt) and int_hint(size) == whole:
                found = self.doubtful if node in self.read else self.joints
                found.setdefault(size.node.expr, set()).add((Tokens(segments),))

    def known_joints(self) -> set[SizeExpr]:
        return self.joints.keys() | self.doubtful.keys()

    def begin_again(self) -> None:
        """Start another round, which knows levels and joint axes that this one found late."""
        for size, dims in self.joints.items():
            self.doubtful.setdefault(size, set()).update(dims)
        self.joints.clear()
        self.read.clear()
        self.ctx.pyramid.apart = self.differ
        self.learned = False

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
        rule = self.rules.get(name)
        plain = all(lane is not None and not lane.has_sites for lane in lanes)
        if rule is not None:
            try:
                return rule(self, node)
            except NotLaned:
                if not plain or any(lane and lane.has_batch for lane in lanes):
                    raise
        if plain:
            batched = [lane for lane in lanes if lane and lane.has_batch]
            if any(lane.dims[0] != (Batch(),) for lane in batched):
                raise NotLaned(f"no rule covers {node.target}, and the batch isn't its first axis")
            return self.plain_lanes(node, bool(batched))
        if any(lane and lane.has_sites for lane in lanes):
            raise NotLaned(f"no rule covers {node.target}")
        unknown = [n for n in inputs if lane_of(n) is None]
        first = min(unknown, key=lambda n: n.name in self.ctx.dense)  # the cause, if it is an input
        raise NotLaned(f"the axes of its input {first} are unknown")

    def plain_lanes(self, node: fx.Node, batch: bool) -> Lane | tuple[Lane | None, ...]:
        """Return lanes without sites: any operator runs on them as it is; a batch comes first."""

        def one(value: object) -> Lane | None:
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

    def of_samples(self, node: fx.Node, lane: Lane) -> Lane | None:
        """Return the lane of a result without sites, of an operator whose first axis is a batch."""
        if lane.has_sites or lane.has_batch and lane.dims[0] != (Batch(),):
            return None
        found = self.plain_lanes(node, lane.has_batch)
        return found if isinstance(found, Lane) else None

    # Reading a lane from sizes, where no rule determines it.

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
                return None  # it depends on the contents of a tensor
            dim = self.read_dim(size, batch and axis == 0)
            if dim is None:
                return None
            dims.append(dim)
        return Lane(tuple(dims))

    def read_dim(self, size: IntLikeType, first: bool) -> Dim | None:
        """Return the dimension that a size stands for, or None; `first`: of a first axis."""
        known = (dim for d in (self.joints, self.doubtful) for dims in d.values() for dim in dims)
        found = dim_of_size(self.ctx, size, first, self.numbers, known)
        if found is not None or not isinstance(size, torch.SymInt):
            return found
        self.missed.add(size.node.expr)
        joint = self.joints.get(size.node.expr) or self.doubtful.get(size.node.expr, set())
        return next(iter(joint)) if len(joint) == 1 else None

    # Helpers of the rules.

    def need(self, node: object) -> Lane:
        lane = lane_of(node)
        if lane is None:
            raise NotLaned(f"the axes of its input {node} are unknown")
        return lane

    def unify(
        self,
        nodes: Sequence[object],
        out: Sequence[int],
        free: int | None = None,
        to: fx.Node | None = None,
    ) -> list[Dim]:
        """Return the dimensions of a broadcast; `free` is a dimension that isn't compared.

        `to`: the result, for which pictures whose sites lie apart are read at one level.

        A value that belongs to the request (a position table, a mask) adopts the meaning of the
        dimensions that it is broadcast with.
        """
        tensors = [
            n for n in nodes if isinstance(n, fx.Node) and isinstance(node_value(n), torch.Tensor)
        ]
        tensors.sort(key=lambda n: (-stage_of(n), op_name(n) in REPEATS, lane_of(n) is None))
        dims: list[Dim] = [() for _ in out]
        level = None if to is None else level_to_meet(self.ctx, tensors, to)
        for node in tensors:
            shape = shape_hint(node_value(node))
            offset = len(out) - len(shape)
            lane = lane_of(node)
            if level is not None and lane is not None and stage_of(node) == STEP:
                lane = at_level(lane, level) if whole_level(lane) is not None else lane
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
                elif stage_of(node) == STEP and is_each_frame(mine, seen):
                    dims[axis + offset] = frames_first(mine, seen)
                elif not same_dim(mine, seen):
                    fixed = stage_of(node) == STEP and not is_repeated(node, axis)
                    if fixed:
                        met = tables_at(tensors, axis - len(shape), (seen, mine), self.same_size)
                        self.learned |= not met.keys() <= self.adopted.keys()
                        self.adopted = {**met, **self.adopted}
                    if fixed or not self.same_size(size, seen):
                        raise NotLaned(
                            f"{node} doesn't line up: {lane} in a broadcast to {Lane(tuple(dims))}"
                        )
                    adopted[axis] = seen
            clean = [() if d is None else d for d in adopted]
            if lane is None or tuple(clean) != lane.dims:
                known = self.own(node, Lane(tuple(clean)))
                if known is None or isinstance(known, Lane) and known.is_cut:
                    raise NotLaned(f"its input {node} lies along no axis that requests could")
                set_lane(node, known)
        return dims

    def same_size(self, size: int, dim: Dim) -> bool:
        total = 1
        for atom in dim:
            total *= self.ctx.pyramid.size(atom)
        return total == size


def is_repeated(node: fx.Node, axis: int) -> bool:
    """Return True if the node repeats one value along an axis, whatever the axis means."""
    if op_name(node) not in REPEATS:
        return False
    source = node_value(node.args[0])  # type: ignore[arg-type]
    own = axis - (len(node.meta["val"].shape) - source.dim())
    return own < 0 or int_hint(source.shape[own]) == 1


def constant_lane(shape: Sequence[int]) -> Lane:
    return Lane(tuple((Feature(s),) if s != 1 else () for s in shape))


def same_part(part: Dim, lane: Lane) -> bool:
    """Return True if this dimension holds all of the lane's site axes."""
    return sum(isinstance(a, SITES) for a in lane.atoms()) == len(part)


def need_constant(m: Marker, nodes: Sequence[object]) -> None:
    for node in nodes:
        if isinstance(node, fx.Node) and m.need(node).kind != "const":
            raise NotLaned(f"its weight {node} depends on the request")


Lanes = Lane | tuple[Lane | None, ...] | None
Rule = Callable[[Marker, fx.Node], Lane | tuple[Lane | None, ...]]
R = TypeVar("R", bound=Rule)


class Rules(dict[str, Rule]):
    """The lane rules of one file, by operator name."""

    def __call__(self, *names: str) -> Callable[[R], R]:
        def register(function: R) -> R:
            self.update(dict.fromkeys(names, function))
            return function

        return register
