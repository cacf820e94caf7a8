"""Lane rules for sites that experts choose (topk over sites), and what is computed for them.

Each expert chooses an equal number of a request's sites. The chosen sites are an axis of their
own, beside the axis of the experts; both together are one row set. Indices of chosen sites aren't
computed with on rows: a rule traces an index back to its topk, and what picks or adds by it works
on the rows of this choice.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import Tensor, fx

from maskfx.ir.geometry.lanes import (
    Atom,
    Batch,
    Dim,
    Experts,
    Feature,
    Lane,
    NotLaned,
    Tokens,
    chosen_segment,
    int_hint,
    is_image,
    lane_of,
    merged,
    node_shape,
    set_lane,
    shape_hint,
)
from maskfx.passes.context import Choice, argument, node_at, node_value, nodes_at, op_name
from maskfx.passes.lane_rules import joins, layers, mixing
from maskfx.passes.lane_rules.marker import Marker, Rules, need_constant, same_part
from maskfx.passes.mark_stages import STEP, stage_of
from maskfx.passes.operators import SCATTERS, VIEWS

rule = Rules()

MOVES = VIEWS | {"permute", "transpose", "swapaxes", "expand", "expand_as", "broadcast_to"}
MOVES |= {"clone", "contiguous", "to", "_to_copy", "alias", "detach"}


@rule("topk")
def topk(m: Marker, node: fx.Node) -> tuple[Lane, Lane]:
    lane, count = m.need(node.args[0]), argument(node, 1, "k")
    axis = argument(node, 2, "dim", -1) % len(lane.dims)
    if not isinstance(count, int):
        raise NotLaned("how many it picks depends on the size of the picture")
    dims = list(lane.dims)
    if lane.is_feature_dim(axis):
        dims[axis] = (Feature(count),) if count != 1 else ()
        return Lane(tuple(dims)), Lane(tuple(dims))
    experts = [i for i in range(len(dims)) if lane.features(i) > 1]
    images = all(map(is_image, lane.segments)) and len(lane.segments) == 1
    if not same_part(dims[axis], lane) or not images or len(experts) != 1 or count < 2:
        raise NotLaned(f"it picks {count} along dimension {axis} of {lane}")
    if stage_of(node) != STEP or not argument(node, 3, "largest", True):
        raise NotLaned(f"it picks the smallest of {lane}, or the same in all steps")
    segment, number = chosen_segment(node.name), lane.features(experts[0])
    m.ctx.pyramid.segments[segment] = count
    m.ctx.choices[segment] = Choice(node.name, dims[axis], number, count)
    dims[experts[0]] = (Experts(number),)
    dims[axis] = (Tokens((segment,)),)
    return Lane(tuple(dims)), Lane(tuple(dims))


def chosen_by(m: Marker, index: fx.node.Argument) -> tuple[str, bool] | None:
    """Return the choice that an index comes from, and if it numbers the sites of all requests.

    Otherwise it numbers the sites of each request; with a batch of one, both are the same.
    """
    offset = m.ctx.pyramid.batch == 1
    node = index
    while isinstance(node, fx.Node):
        name = op_name(node)
        if node.target is operator.getitem and op_name(node.args[0]) == "topk":  # type: ignore[arg-type]
            lane = lane_of(node)
            known = node.args[1] == 1 and lane is not None and lane.segments
            return (known[0], offset) if known and known[0] in m.ctx.choices else None
        if name in MOVES:
            node = node.args[0]
        elif name == "add" and not node.kwargs:
            one, other = node.args[:2]
            if not isinstance(one, fx.Node) or not isinstance(other, fx.Node):
                return None
            node, added = (one, other) if stage_of(one) == STEP else (other, one)
            if not is_offset(m, added, node):
                return None
            offset = True
        else:
            return None
    return None


def is_offset(m: Marker, added: fx.Node, index: fx.Node) -> bool:
    """Return True if a constant is the number of the first site of each request."""
    lane = lane_of(index)
    if lane is None or stage_of(added) == STEP or len(lane.segments) != 1:
        return False
    choice = m.ctx.choices.get(lane.segments[0])
    if choice is None:
        return False
    try:
        value = constant_of(added)
    except NotLaned:
        return False
    sites = 1
    for atom in choice.axis:
        sites *= m.ctx.pyramid.size(atom)
    batch = m.ctx.pyramid.batch
    shape = [batch if Batch() in dim else 1 for dim in lane.dims]
    wanted = torch.arange(batch).mul(sites)
    if value.numel() != batch or [n for n in value.shape if n != 1] not in ([batch], []):
        return False
    same_axis = [*[1] * (len(shape) - value.dim()), *value.shape] == shape
    return same_axis and torch.equal(value.reshape(-1).cpu(), wanted)


def constant_of(node: fx.Node) -> Tensor:
    """Compute a value that depends on sizes alone, at the sizes of the capture."""

    def computed(source: fx.Node) -> Any:
        value = source.meta.get("val")
        if isinstance(value, (torch.SymInt, int)):
            return int_hint(value)
        if source.op == "get_attr":
            return node_value(source)
        if source.op != "call_function":
            raise NotLaned(f"{source} depends on the request")
        args, named = fx.map_arg((source.args, dict(source.kwargs)), computed)
        return source.target(*args, **named)  # type: ignore[operator]

    found = computed(node)
    if not isinstance(found, Tensor):
        raise NotLaned(f"{node} is no tensor")
    return found


def need_choice(m: Marker, node: fx.Node, index: fx.node.Argument, dim: Dim) -> str:
    """Return the choice by which a node picks along a dimension, and note it on the node."""
    found = chosen_by(m, index)
    if found is None:
        raise NotLaned(f"no rule covers {node.target}")
    segment, offset = found
    choice = m.ctx.choices[segment]
    wanted = (Batch(), *choice.axis) if offset and m.ctx.pyramid.batch > 1 else choice.axis
    if merged(dim) not in (merged(wanted), merged((Batch(), *wanted)) if m.single else None):
        raise NotLaned(f"it picks sites along {Lane((dim,))}")
    node.meta["choice"] = segment
    return segment


@rule("gather")
def gather(m: Marker, node: fx.Node) -> Lane:
    lane, index = m.need(node.args[0]), m.need(node.args[2])
    axis = argument(node, 1, "dim") % len(lane.dims)
    if lane.is_feature_dim(axis):
        dims = m.unify([node.args[0], node.args[2]], node_shape(node), free=axis)
        return Lane((*dims[:axis], index.dims[axis], *dims[axis + 1 :]))
    need_choice(m, node, node.args[2], lane.dims[axis])
    for i, (own, picked) in enumerate(zip(lane.dims, index.dims, strict=True)):
        expert = len(picked) == 1 and isinstance(picked[0], Experts)
        alike = expert and lane.features(i) == picked[0].size  # type: ignore[union-attr]
        if i != axis and merged(own) != merged(picked) and not alike:
            raise NotLaned(f"it picks {index} of {lane}")
    return index


@rule("index")
def index(m: Marker, node: fx.Node) -> Lane:
    lane, indices = m.need(node.args[0]), list(argument(node, 1, "indices"))
    if len(indices) != 1 or not lane.dims:
        raise NotLaned(f"no rule covers {node.target}")
    return picked(m, node, lane, 0, indices[0])


@rule("index_select")
def index_select(m: Marker, node: fx.Node) -> Lane:
    lane = m.need(node.args[0])
    return picked(m, node, lane, argument(node, 1, "dim") % len(lane.dims), node_at(node, 2))


def picked(m: Marker, node: fx.Node, lane: Lane, axis: int, numbers: fx.Node) -> Lane:
    """Return the lane of what an index picks along one dimension: chosen sites, or text tokens."""
    if stage_of(numbers) == STEP:
        need_choice(m, node, numbers, lane.dims[axis])
        return Lane((*lane.dims[:axis], *m.need(numbers).dims, *lane.dims[axis + 1 :]))
    dim = lane.dims[axis]
    if lane.is_feature_dim(axis) and lane.features(axis) > 1:
        need_constant(m, [numbers])
        count = node_shape(node)[axis]
        return Lane(
            (*lane.dims[:axis], (Feature(count),) if count != 1 else (), *lane.dims[axis + 1 :])
        )
    tokens = len(dim) == 1 and isinstance(dim[0], Tokens) and not any(map(is_image, lane.segments))
    value = node_value(numbers)
    if not tokens or not isinstance(value, Tensor) or value.dim() != 1:
        raise NotLaned(f"it picks along dimension {axis} of {lane}")
    if int_hint(value.shape[0]) == shape_hint(node_value(node.args[0]))[axis]:  # type: ignore[arg-type]
        set_lane(numbers, Lane((dim,)))
    own = m.need(numbers)
    if any(map(is_image, own.segments)) or not own.has_sites:
        raise NotLaned(f"it picks {own} of {lane}")
    return Lane((*lane.dims[:axis], own.dims[0], *lane.dims[axis + 1 :]))


@rule("scatter_add", "index_add", "scatter_reduce")
def scatter_add(m: Marker, node: fx.Node) -> Lane:
    base, (axis, numbers, source) = node_at(node, 0), node.args[1:4]
    if op_name(node) in SCATTERS and chosen_by(m, numbers) is None:
        return layers.scatter(m, node)
    if op_name(node) == "scatter_reduce" and (
        argument(node, 4, "reduce") != "sum" or not argument(node, 5, "include_self", True)
    ):
        raise NotLaned("it combines chosen sites otherwise than by their sum")
    found = chosen_by(m, numbers)
    if found is None or argument(node, 4, "alpha", 1) not in (1, "sum"):
        raise NotLaned(f"no rule covers {node.target}")
    segment, offset = found
    added, axis = m.need(source), int(str(axis)) % len(node_shape(node))
    lane = lane_of(base) or sizes_read(m, base, axis)
    if added.segments != (segment,):
        raise NotLaned(f"it adds {added} to {lane}")
    if not lane.has_sites and stage_of(base) != STEP:
        sites = m.ctx.choices[segment].axis
        sites = (Batch(), *sites) if offset and m.ctx.pyramid.batch > 1 else sites
        lane = Lane((*lane.dims[:axis], sites, *lane.dims[axis + 1 :]))
        set_lane(base, lane)
    need_choice(m, node, numbers, lane.dims[axis])
    return lane


def sizes_read(m: Marker, base: fx.Node, free: int) -> Lane:
    """Return the lane of a constant that has a number for each site along dimension `free`."""
    if stage_of(base) == STEP:
        raise NotLaned(f"the axes of its input {base} are unknown")
    dims: list[Dim] = []
    for axis, size in enumerate(node_value(base).shape):
        dim = () if axis == free else m.read_dim(size, False)
        if dim is None:
            raise NotLaned(f"the axes of its input {base} are unknown")
        dims.append(dim)
    return Lane(tuple(dims))


# Taking the experts apart, and joining them.


def token_segment(lane: Lane | None) -> str:
    """Return the first segment of a value's token axis, or ""."""
    atoms = lane.atoms() if lane is not None else []
    return next((a.segments[0] for a in atoms if isinstance(a, Tokens)), "")


def expert_axis(lane: Lane, axis: int) -> int:
    """Return the number of experts along a dimension that they come first in, or 0."""
    dim = lane.dims[axis]
    return dim[0].size if dim and isinstance(dim[0], Experts) else 0


def of_expert(m: Marker, dims: tuple[Dim, ...], expert: int) -> tuple[Dim, ...]:
    """Return dimensions with the segment of all experts' sites replaced by that of one."""

    def one(atom: Atom) -> Atom:
        if not isinstance(atom, Tokens):
            return atom
        segment = chosen_segment(atom.segments[0], expert)
        m.ctx.pyramid.segments[segment] = m.ctx.pyramid.segments[atom.segments[0]]
        return Tokens((segment,))

    return tuple(tuple(map(one, dim)) for dim in dims)


@rule("split", "split_with_sizes", "chunk", "tensor_split", "unbind")
def split(m: Marker, node: fx.Node) -> Lane | tuple[Lane | None, ...]:
    lane = m.need(node.args[0])
    alone = op_name(node) == "unbind"
    axis = argument(node, 1 if alone else 2, "dim", 0) % len(lane.dims)
    experts = expert_axis(lane, axis)
    if not experts or lane.segments[0] not in m.ctx.choices:
        return joins.rule[op_name(node)](m, node)
    parts = node.meta["val"]
    sizes = {tuple(shape_hint(part)) for part in parts}
    if len(parts) != experts or len(sizes) != 1 or alone and len(lane.dims[axis]) != 1:
        raise NotLaned(f"it splits {lane} into {len(parts)}")
    node.meta["choice"] = lane.segments[0]
    rest = () if alone else (lane.dims[axis][1:],)
    dims = (*lane.dims[:axis], *rest, *lane.dims[axis + 1 :])
    return tuple(Lane(of_expert(m, dims, i)) for i in range(experts))


@rule("select")
def select(m: Marker, node: fx.Node) -> Lane:
    lane = m.need(node.args[0])
    axis, number = argument(node, 1, "dim") % len(lane.dims), argument(node, 2, "index")
    experts = expert_axis(lane, axis)
    if not experts or len(lane.dims[axis]) != 1 or not isinstance(number, int):
        return joins.select(m, node)
    node.meta["choice"] = lane.segments[0]
    dims = (*lane.dims[:axis], *lane.dims[axis + 1 :])
    return Lane(of_expert(m, dims, number % experts))


@rule("cat", "concat", "concatenate", "stack")
def cat(m: Marker, node: fx.Node) -> Lane:
    nodes = [n for n in nodes_at(node, 0) if 0 not in shape_hint(node_value(n))]
    lanes = [lane_of(n) for n in nodes]
    names = list(map(token_segment, lanes))
    choice = names[0].rpartition(":")[0] if names else ""
    stacked = op_name(node) == "stack"
    if choice not in m.ctx.choices:
        if len(nodes) == 1 and not stacked:
            return m.need(nodes[0])
        found = joins.rule[op_name(node)](m, node)
        assert isinstance(found, Lane)
        return found
    first, axis = m.need(nodes[0]), argument(node, 1, "dim", 0) % len(node_shape(node))
    experts = m.ctx.choices[choice].experts
    if names != [chosen_segment(choice, i) for i in range(experts)]:
        raise NotLaned(f"it joins what {len(names)} of {experts} experts computed")
    sites = tuple(
        tuple(Tokens((choice,)) if isinstance(a, Tokens) else a for a in dim) for dim in first.dims
    )
    here = (Experts(experts),) if stacked else (Experts(experts), *sites[axis])
    if not stacked and not any(isinstance(a, Tokens) for a in sites[axis]):
        raise NotLaned(f"it joins {first} along dimension {axis}")
    node.meta["choice"] = choice
    return Lane((*sites[:axis], here, *sites[axis if stacked else axis + 1 :]))


@rule("matmul", "bmm", "_grouped_mm")
def product(m: Marker, node: fx.Node) -> Lane:
    """Multiply rows by one matrix, or each expert's rows by its matrix."""
    a, b = m.need(node.args[0]), m.need(node.args[1])
    constant = b.kind == "const" and a.has_sites and bool(a.dims) and a.is_feature_dim(-1)
    if constant and len(b.dims) == 2:
        return Lane((*a.dims[:-1], b.dims[-1]))
    experts = expert_axis(a, 0)
    if not experts or not constant or len(b.dims) != 3 or b.features(0) != experts:
        found: Lane = mixing.matmul(m, node)
        return found
    if op_name(node) == "_grouped_mm":
        each = m.ctx.pyramid.batch * m.ctx.choices[a.segments[0]].count
        ends = argument(node, 2, "offs")
        wanted = torch.arange(1, experts + 1) * each
        if not isinstance(ends, fx.Node) or not torch.equal(constant_of(ends).cpu().long(), wanted):
            raise NotLaned("its groups aren't what each expert chose")
    node.meta["choice"] = a.segments[0]
    return Lane((*a.dims[:-1], b.dims[-1]))
