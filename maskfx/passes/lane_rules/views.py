"""Lane rules for views, permutes and repeats: the same atoms, regrouped or reordered."""

from __future__ import annotations

from torch import fx

from maskfx.ir.geometry.lanes import Dim, Feature, Lane, NotLaned, int_hint, node_shape
from maskfx.ir.geometry.regroup import regroup
from maskfx.passes.context import argument
from maskfx.passes.lane_rules.marker import Marker, Rules
from maskfx.passes.operators import VIEWS

rule = Rules()


@rule(*VIEWS)
def view(m: Marker, node: fx.Node) -> Lane:
    fixed = [isinstance(size, int) for size in node.meta["val"].shape]
    atoms = m.need(node.args[0]).atoms()
    return Lane(regroup(atoms, node_shape(node), m.ctx.pyramid, fixed))


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
