"""Lane rules for operators that mix all sites: reductions, products, attention."""

from __future__ import annotations

from collections.abc import Sequence

from torch import fx

from maskfx.ir.geometry.lanes import (
    PICTURE,
    SITES,
    Batch,
    Dim,
    Feature,
    Frames,
    Lane,
    NotLaned,
    Part,
    X,
    Y,
    atom_at,
    merged,
    node_shape,
    same_dim,
    set_lane,
    site_order,
)
from maskfx.passes.context import argument, op_name
from maskfx.passes.lane_rules.frames import attends_by_frame
from maskfx.passes.lane_rules.marker import (
    Marker,
    Rules,
    same_part,
)
from maskfx.passes.mark_stages import STEP, stage_of
from maskfx.passes.operators import IN_TURN, REDUCTIONS, merges_sites, reduced_dims

rule = Rules()


@rule(*REDUCTIONS)
def reduction(m: Marker, node: fx.Node) -> Lane:
    lane = m.need(node.args[0])
    axes, keep = reduced_dims(node, len(lane.dims))
    gone = [a for i in axes for a in lane.dims[i]]
    sites = [a for a in gone if isinstance(a, SITES)]
    if any(isinstance(a, Batch) for a in gone):
        raise NotLaned(f"it reduces the batch of {lane}")
    if sites:
        everything = [a for a in lane.atoms() if isinstance(a, SITES)]
        if len(sites) != len(everything) or not merges_sites(node):
            raise NotLaned(f"it reduces a site axis of {lane}")
        kept = [a for i, d in enumerate(lane.dims) if i not in axes for a in d]
        some = any(isinstance(a, Feature) for a in gone)
        some = some and op_name(node) not in (*IN_TURN, "var", "std")
        if some and any(isinstance(a, Feature) for a in kept):
            raise NotLaned(f"it reduces sites and some of the features of {lane} at once")
    if keep:
        return Lane(tuple(() if i in axes else d for i, d in enumerate(lane.dims)))
    return Lane(tuple(d for i, d in enumerate(lane.dims) if i not in axes))


@rule("scaled_dot_product_attention")
def attention(m: Marker, node: fx.Node) -> Lane:
    q, k, v = (m.need(n) for n in node.args[:3])
    for name, lane in (("query", q), ("key", k), ("value", v)):
        if not lane.is_feature_dim(-1):
            raise NotLaned(f"its {name} is {lane}")
    if attends_batch(q, k, v):
        if argument(node, 3, "attn_mask") is not None or argument(node, 5, "is_causal", False):
            raise NotLaned("it attends to all samples of the batch, with a mask")
    elif q.has_sites or k.has_sites:
        if argument(node, 5, "is_causal", False):
            raise NotLaned("causal attention isn't narrowed")
        if is_within_rows(q, k, v):
            check_own_mask(m, argument(node, 3, "attn_mask"), q)
        elif line_axis(q, k, v):
            check_line_mask(node, q)
        elif attends_by_frame(q, k, v):
            if argument(node, 3, "attn_mask") is not None:
                raise NotLaned("each frame attends to tokens of its own, with a mask")
        elif not q.has_sites:
            return read_by_few(m, node, q, k, v)
        else:
            check_sites(q, k, v, m.single, argument(node, 3, "attn_mask") is not None)
    return Lane((*q.dims[:-1], v.dims[-1]))


def check_own_mask(m: Marker, mask: fx.Node | None, q: Lane) -> None:
    """Check a mask of rows that attend to their own features: constant, or one of each row."""
    if mask is None or m.need(mask).kind == "const":
        return
    have, shape = m.need(mask), node_shape(mask)
    below = q.dims[len(q.dims) - len(shape) : -2]
    dims: list[Dim] = []
    for own, size, dim in zip(have.dims, shape, below, strict=False):
        adopts = stage_of(mask) != STEP and m.same_size(size, dim)
        if size != 1 and not adopts and not same_dim(own, dim):
            raise NotLaned(f"its mask {mask} doesn't line up: {have} beside {q}")
        dims.append(dim if size != 1 else ())
    found = Lane((*dims, *have.dims[-2:]))
    if not found.has_sites or not all(map(found.is_feature_dim, (-2, -1))):
        raise NotLaned(f"its mask {mask} is {have}, which isn't one of each row")
    set_lane(mask, found)


def attends_batch(q: Lane, k: Lane, v: Lane) -> bool:
    """Return True if each sample attends to all samples of its call."""
    lanes = (q, k, v)
    if not any(isinstance(a, Batch) for lane in lanes for a in lane.dims[-2]):
        return False
    outer = [a for lane in lanes for d in lane.dims[:-2] for a in d]
    if any(lane.dims[-2] != (Batch(),) for lane in lanes) or not all(
        isinstance(a, Feature) for a in outer
    ):
        raise NotLaned(f"it attends from one request to another: {q}")
    return True


@rule("pair_sum")
def pair_sum(m: Marker, node: fx.Node) -> Lane:
    q, k, v = (m.need(n) for n in node.args[:3])
    if not all(lane.is_feature_dim(-1) for lane in (q, k, v)):
        raise NotLaned(f"it multiplies queries {q}, keys {k} and values {v}")
    if any(isinstance(a, Batch) for lane in (q, k, v) for d in lane.dims[-2:] for a in d):
        raise NotLaned(f"it attends from one request to another: {q}")
    if (q.has_sites or k.has_sites) and not is_within_rows(q, k, v):
        check_sites(q, k, v, m.single)
    return Lane((*q.dims[:-1], v.dims[-1]))


def is_within_rows(q: Lane, k: Lane, v: Lane) -> bool:
    """Return True if each row attends to its own features: queries and keys are parts of a row."""
    if not (q.has_sites and q.is_feature_dim(-2) and k.is_feature_dim(-2)):
        return False
    pairs = zip(q.dims[:-2], k.dims[:-2], v.dims[:-2], strict=True)
    return len(q.dims) == len(k.dims) == len(v.dims) and all(
        same_dim(a, b) and same_dim(b, c) for a, b, c in pairs
    )


NAMES = {Frames: "frames", Y: "y", X: "x"}


def line_axis(q: Lane, k: Lane, v: Lane) -> str:
    """Return the axis along which the sites of each line attend, see `Lines`; "" for others."""
    found = {along(lane) for lane in (q, k, v)}
    alike = len(q.dims) == len(k.dims) == len(v.dims) and len(found) == 1
    if not alike or any(lane.is_half for lane in (q, k, v)):
        return ""
    outer = [[base_dim(d) for d in lane.dims[:-2]] for lane in (q, k, v)]
    return found.pop() if outer[0] == outer[1] == outer[2] else ""


def along(lane: Lane) -> str:
    """Return what the lines are along which the keys' or queries' dimension lies; "" for others.

    It is a row, a column, a place in all frames, one frame as a whole, or parts of these.
    """
    own, every = lane.dims[-2], [a for a in lane.atoms() if isinstance(a, SITES)]
    if not all(isinstance(a, (*PICTURE, Part)) for a in (*own, *every)):
        return ""
    if list(own) != sorted(own, key=site_order) or len(own) in (0, len(every)):
        return ""
    words = []
    for atom in own:
        axis = atom.axis if isinstance(atom, Part) else atom
        kind = ("near" if atom.inner else "far") if isinstance(atom, Part) else ""
        words.append(NAMES[type(axis)] + (f"{atom.parts}{kind}" if isinstance(atom, Part) else ""))
    name = "_".join(words)
    return "picture" if name == "y_x" else name


def check_line_mask(node: fx.Node, q: Lane) -> None:
    """Refuse a mask of lines that each line has its own entries of, or that a step computes."""
    mask = argument(node, 3, "attn_mask")
    if mask is None:
        return
    shape, outer = node_shape(mask), q.dims[:-2]
    below = outer[len(outer) - len(shape) + 2 :] if len(shape) > 2 else ()
    told = [a for dim, size in zip(below, shape[:-2], strict=True) if size != 1 for a in dim]
    if stage_of(mask) == STEP:
        raise NotLaned("it attends along lines of the picture, with a mask of each step")
    if any(isinstance(a, SITES) for a in told):
        raise NotLaned("it attends along lines of the picture, with a mask for each line")


def base_dim(dim: Dim) -> Dim:
    """Return a dimension whose axes of the picture are those of any level."""
    return tuple(atom_at(a, 0) for a in merged(dim))


def read_by_few(m: Marker, node: fx.Node, q: Lane, k: Lane, v: Lane) -> Lane:
    """Return the lane of a fixed number of queries that attend to sites."""
    if not q.is_feature_dim(-2) or not same_part(k.dims[-2], k) or k.dims[-2] != v.dims[-2]:
        raise NotLaned(f"its queries are {q}, its keys {k}")
    if argument(node, 3, "attn_mask") is not None:
        raise NotLaned(f"its queries {q} have no sites, its keys {k} have, and there is a mask")
    if len(q.dims) != len(k.dims) or k.dims[0][:1] != (Batch(),):
        raise NotLaned(f"its queries {q} don't line up with its keys {k}")
    outer = list(k.dims[:-2])
    if any(a and not same_dim(a, b) for a, b in zip(q.dims, outer, strict=False)):
        raise NotLaned(f"its queries {q} don't line up with its keys {k}")
    if any(not isinstance(a, (Batch, Feature)) for d in outer for a in d):
        raise NotLaned(f"its keys are {k}")
    return Lane((*outer, q.dims[-2], v.dims[-1]))


def check_sites(q: Lane, k: Lane, v: Lane, single: bool, masked: bool = False) -> None:
    """Check that queries are the sites of one row set, and keys those of one, or fixed tokens.

    Keys without a mask may have several values of each site, such as those of several pictures.
    """
    if merged(k.dims[-2]) != merged(v.dims[-2]):
        raise NotLaned(f"keys {k} and values {v} differ")
    parts = [a for a in q.dims[-2] if not isinstance(a, Feature)]
    if len(parts) != len(q.dims[-2]) or not same_part(q.dims[-2], q):
        raise NotLaned(f"its queries are {q}")
    own = tuple(a for a in k.dims[-2] if masked or not isinstance(a, Feature))
    if k.has_sites and not same_part(own, k):
        raise NotLaned(f"its keys are {k}")
    if (any(not d for d in q.dims[:1]) and not single) or not all(
        isinstance(a, (Batch, Feature)) for d in q.dims[:-2] for a in d
    ):
        raise NotLaned(f"its queries are {q}")
    if not k.has_batch and not single:
        raise NotLaned(f"its keys {k} have no batch")


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
    contracted = any(isinstance(x, SITES) for x in inner_a)
    if contracted and sites == 2 and not out.has_sites:
        return out
    if not contracted and sites == 1 and are_lined_up(a, b):
        return out
    if not contracted and sites == 1 and b.kind == "const":
        return out
    if sites == 0 or is_per_row(a, b):
        return out
    raise NotLaned(f"it multiplies {a} by {b}")


def are_lined_up(a: Lane, b: Lane) -> bool:
    """Return True if each row is multiplied by the same matrices of its request.

    The rows' outer axes may be axes of sites; the matrices, one for each outer feature, have none.
    """
    rows, matrix = (a, b) if a.has_sites else (b, a)
    outer = [[x for d in lane.dims[:-2] for x in d] for lane in (rows, matrix)]
    features = [[x for x in own if isinstance(x, Feature)] for own in outer]
    return features[0] == features[1] or not any(isinstance(x, SITES) for x in outer[0])


def is_per_row(a: Lane, b: Lane) -> bool:
    """Return True if each row holds both factors, matrices of features, such as its window's."""
    inner = all(lane.is_feature_dim(i) for lane in (a, b) for i in (-2, -1))
    outer = a.dims[:-2], b.dims[:-2]
    alike = len(outer[0]) == len(outer[1]) and all(map(same_dim, *outer))
    return inner and alike and Lane(outer[0]).has_sites
