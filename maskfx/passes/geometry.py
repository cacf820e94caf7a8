"""The geometry of windows: of convolutions, pools, and the padding before them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from torch import fx
from torch.types import IntLikeType

from maskfx.ir.geometry.lanes import Frames, Lane, NotLaned, Y
from maskfx.ir.geometry.pyramid import Level, Window
from maskfx.passes.context import PassContext, argument, node_value, op_name
from maskfx.passes.operators import CONVOLUTIONS, PADS, WINDOWS
from maskfx.passes.symbolic_sizes import constant_of

Pair = tuple[int, int]


@dataclass(frozen=True)
class Geometry:
    """The window of an operator, including an explicit padding before it.

    Args:
        source: what the window reads, before padding.
        edge, inserted, counts, flat: see `maskfx.ir.geometry.pyramid.Window`.
        early, late: how many frames before its own, and after it, a window reads.
        ceil: whether a last window may begin before the border and end beyond it.
    """

    source: fx.Node
    lane: Lane
    kernel: Pair
    stride: Pair
    before: Pair
    after: Pair
    dilation: Pair = (1, 1)
    groups: int = 1
    edge: str = ""
    counts: str = ""
    ceil: bool = False
    inserted: Pair = (1, 1)
    grow: Pair = (0, 0)
    flat: bool = False
    early: int = 0
    late: int = 0
    depth: int = 1

    def level(self, parent: int) -> Level:
        """Return the level of the results, derived from the source's.

        It begins where the middle of the first window lies in the middle of the first site.
        """
        offsets = [
            self.dilation[i] * (self.kernel[i] - 1) / 2
            - self.before[i]
            - (self.stride[i] - 1) / 2
            + (self.inserted[i] - 1)
            for i in (0, 1)
        ]
        offset = int(offsets[0]), int(offsets[1])  # half a site counts as none
        if self.inserted != (1, 1):
            return Level(parent=parent, grow=self.grow, times=self.inserted, offset=offset)
        grow = tuple(
            self.before[i]
            + self.after[i]
            - self.dilation[i] * (self.kernel[i] - 1)
            - 1
            + (self.stride[i] - 1 if self.ceil else 0)
            for i in (0, 1)
        )
        return Level(
            parent=parent,
            grow=(grow[0], grow[1]),
            divide=self.stride,
            extra=(1, 1),
            offset=offset,
        )

    def window(self, source: int, target: int) -> Window:
        inserted = self.inserted != (1, 1)
        return Window(
            source,
            target,
            self.kernel,
            (1, 1) if inserted else self.stride,
            self.before,
            self.dilation,
            edge=self.edge,
            counts=self.counts,
            inserted=self.inserted,
            flat=self.flat,
            depth=self.depth,
            early=self.early,
        )

    @property
    def pointwise(self) -> bool:
        plain = self.before == self.after == (0, 0) and self.inserted == (1, 1)
        plain = plain and self.depth == 1
        return plain and self.kernel == (1, 1) and self.stride == (1, 1)


def pair(value: int | Sequence[int]) -> Pair:
    """Return the values for image rows and columns, the last two."""
    if isinstance(value, int):
        return value, value
    return int(value[-2:][0]), int(value[-1])


def triple(value: int | Sequence[int]) -> tuple[int, int, int]:
    if isinstance(value, int):
        return value, value, value
    a, b, c = ([*value] * 3)[:3]
    return int(a), int(b), int(c)


LaneOf = Callable[[object], Lane]  # returns the axes of a value


def window_geometry(node: fx.Node, lane_of: LaneOf) -> Geometry:
    """Return the geometry of a convolution (in 3d, frames first), a pool or an unfold."""
    source = node.args[0]
    assert isinstance(source, fx.Node)
    name = op_name(node)
    found = (
        convolution(node, source, lane_of)
        if name in CONVOLUTIONS
        else along_axis(node, source, lane_of)
        if name == "conv1d"
        else unfold(node, source, lane_of)
        if name == "im2col"
        else pool(node, source, lane_of)
    )
    if name == "conv1d":
        return found
    return padded(found, lane_of, keeps_padding=name in ("avg_pool2d", "max_pool2d"))


def lane_before_pad(source: fx.Node, lane_of: LaneOf) -> Lane:
    """Return the lane of a window's source, of a padding the lane before it if it has none."""
    inner = source.args[0] if op_name(source) in PADS else source
    return lane_of(inner)


def convolution(node: fx.Node, source: fx.Node, lane_of: LaneOf) -> Geometry:
    weight = node.args[1]
    assert isinstance(weight, fx.Node)
    shape = tuple(node_value(weight).shape[2:])
    frames, kernel = shape[:-2], pair(shape)
    stride, padding = pair(argument(node, 3, "stride", 1)), argument(node, 4, "padding", 0)
    dilation, groups = pair(argument(node, 5, "dilation", 1)), argument(node, 6, "groups", 1)
    if isinstance(padding, str):
        if frames:
            raise NotLaned(f"its padding is {padding!r}")
        reach = [
            d * (k - 1) if padding == "same" else 0 for d, k in zip(dilation, kernel, strict=True)
        ]
        before, after = (reach[0] // 2, reach[1] // 2), (-(-reach[0] // 2), -(-reach[1] // 2))
    else:
        before = after = pair(padding)
    lane = lane_before_pad(source, lane_of)
    found = Geometry(source, lane, kernel, stride, before, after, dilation, int(groups))
    if frames:
        apart = (triple(argument(node, *at, 1))[0] for at in ((3, "stride"), (5, "dilation")))
        return over_frames(found, frames[0], triple(padding)[0], *apart)
    if has_frame_axis(lane, 2):  # rows are frames, and columns all sites of one
        if kernel[1] != 1 or before[1] or op_name(source) in PADS:
            raise NotLaned(f"it convolves {lane}")
        alone = replace(found, kernel=(1, 1), stride=(1, 1), before=(0, 0), after=(0, 0))
        return over_frames(alone, kernel[0], before[0], stride[0], dilation[0])
    return found


def has_frame_axis(lane: Lane, axis: int) -> bool:
    """Return True if a dimension is the frames of a video."""
    return len(lane.dims) > axis and [type(atom) for atom in lane.dims[axis]] == [Frames]


def over_frames(found: Geometry, depth: int, ends: int, stride: int, dilation: int) -> Geometry:
    """Return the geometry of a window that reads `depth` frames, with `ends` frames of padding."""
    if depth == 1 and not ends and stride == 1:
        return found
    if not has_frame_axis(found.lane, 2):
        raise NotLaned(f"it reaches over {depth} frames")
    if stride != 1 or dilation != 1 and depth > 1:
        raise NotLaned("it leaves out frames")
    return replace(found, depth=depth, early=ends, late=ends)


def along_axis(node: fx.Node, source: fx.Node, lane_of: LaneOf) -> Geometry:
    """Return the geometry of a conv1d: along picture rows, along columns, or row after row."""
    weight, lane = node.args[1], lane_before_pad(source, lane_of)
    assert isinstance(weight, fx.Node)
    down = [isinstance(atom, Y) for atom in lane.dims[-1]]

    def placed(number: int, other: int) -> Pair:
        return (number, other) if down == [True] else (other, number)

    kernel = int(node_value(weight).shape[2])
    stride, dilation = (single(argument(node, *at, 1)) for at in ((3, "stride"), (5, "dilation")))
    padding = argument(node, 4, "padding", 0)
    reach = dilation * (kernel - 1) if padding == "same" else 0
    ends = (reach // 2, reach - reach // 2)
    ends = ends if isinstance(padding, str) else (single(padding), single(padding))
    found = Geometry(
        source,
        lane,
        placed(kernel, 1),
        placed(stride, 1),
        placed(ends[0], 0),
        placed(ends[1], 0),
        placed(dilation, 1),
        int(argument(node, 6, "groups", 1)),
        flat=down == [True, False],
    )
    if op_name(source) not in PADS:
        return found
    edge, pads = padding_of(source)
    if edge is None or any(pads[2:]) or ends != (0, 0) and (edge or min(pads) < 0):
        return replace(found, lane=lane_of(source))
    inner = source.args[0]
    assert isinstance(inner, fx.Node)
    before, after = (placed(end + pad, 0) for end, pad in zip(ends, pads[:2], strict=True))
    return replace(found, source=inner, before=before, after=after, edge=edge)


def single(value: int | Sequence[int]) -> int:
    return int(value if isinstance(value, int) else value[0])


def pool(node: fx.Node, source: fx.Node, lane_of: LaneOf) -> Geometry:
    """Return the geometry of a pool; the places beyond the border don't count, or count as zero.

    A maximum repeats the sites at the border, which the same windows read anyway.
    """
    kernel = pair(argument(node, 1, "kernel_size"))
    stride = pair(argument(node, 2, "stride") or kernel)
    padding = pair(argument(node, 3, "padding", 0))
    largest = op_name(node) == "max_pool2d"
    dilation = pair(argument(node, 4, "dilation", 1)) if largest else (1, 1)
    ceil = bool(argument(node, 5 if largest else 4, "ceil_mode", False))
    beyond = padding != (0, 0) or ceil
    edge = counts = ""
    if largest:
        if beyond and dilation != (1, 1):
            raise NotLaned("a dilated maximum with padding isn't narrowed")
        edge = "replicate" if beyond else ""
    else:
        if argument(node, 6, "divisor_override") is not None:
            raise NotLaned("a pool with a divisor of its own isn't narrowed")
        inside = not argument(node, 5, "count_include_pad", True)
        counts = ("inside" if inside else "padded" if ceil else "") if beyond else ""
    lane = lane_before_pad(source, lane_of)
    return Geometry(source, lane, kernel, stride, padding, padding, dilation, 1, edge, counts, ceil)


def unfold(node: fx.Node, source: fx.Node, lane_of: LaneOf) -> Geometry:
    names = ("kernel_size", "dilation", "padding", "stride")
    kernel, dilation, padding, stride = (
        pair(argument(node, i, name, 1)) for i, name in enumerate(names, 1)
    )
    lane = lane_before_pad(source, lane_of)
    return Geometry(source, lane, kernel, stride, padding, padding, dilation)


def padded(found: Geometry, lane_of: LaneOf, keeps_padding: bool) -> Geometry:
    """Return the geometry with the padding before it as a part of it."""
    source = found.source
    if op_name(source) not in PADS:
        return found
    own = found.before != (0, 0) or found.after != (0, 0) or found.ceil or found.early > 0
    edge, pads = padding_of(source)
    cuts = min(pads, default=0) < 0
    frames = pads[4:6] if len(pads) == 6 and has_frame_axis(found.lane, 2) else [0, 0]
    if (
        edge is None
        or any(pads[4:])
        and not any(frames)
        or any(frames)
        and edge not in ("", "replicate")
    ):
        return replace(found, lane=lane_of(source))
    if own and (edge or keeps_padding or cuts):
        return replace(found, lane=lane_of(source))
    inner = source.args[0]
    assert isinstance(inner, fx.Node)
    return replace(
        found,
        source=inner,
        before=(found.before[0] + pads[2], found.before[1] + pads[0]),
        after=(found.after[0] + pads[3], found.after[1] + pads[1]),
        edge=edge,
        early=found.early + frames[0],
        late=found.late + frames[1],
    )


def padding_of(node: fx.Node) -> tuple[str | None, list[int]]:
    """Return what stands beyond the border (None: another number than zero) and the padding."""
    numbers = given_ends(node)
    found = [n for n in numbers if isinstance(n, int)]
    if len(found) < len(numbers) or value_of(node):
        return None, [] if len(found) < len(numbers) else found
    return edge_of(node), found + [0] * (4 - len(found))


def folds_into_users(node: fx.Node) -> bool:
    """Return True for a padding whose users all include it in their windows."""
    if op_name(node) not in PADS or padding_of(node)[0] is None:
        return False
    users = [op_name(u) for u in node.users]
    return bool(users) and all(u in WINDOWS or u == "conv1d" for u in users)


def given_ends(node: fx.Node) -> list[fx.Node | int]:
    """Return the padding before and after each axis, the last axis first: numbers or nodes."""
    pads = argument(node, 1, "pad") if op_name(node) in ("pad", "constant_pad_nd") else node.args[1]
    return list(pads)  # type: ignore[arg-type]


def ends_of(ctx: PassContext, node: fx.Node) -> list[IntLikeType]:
    """Return the padding before and after each axis: a number, or the symbolic size it is."""
    found = [p.meta["val"] if isinstance(p, fx.Node) else p for p in given_ends(node)]
    constants = [constant_of(ctx, p) for p in found]
    return [p if c is None else c for p, c in zip(found, constants, strict=True)]


def edge_of(node: fx.Node) -> str:
    """Return by what a padding continues the picture; "" for a number."""
    name = op_name(node)
    if name in ("reflection_pad2d", "replication_pad2d"):
        return "reflect" if name == "reflection_pad2d" else "replicate"
    mode = str(argument(node, 2, "mode", "constant")) if name == "pad" else "constant"
    return "" if mode == "constant" else mode


def value_of(node: fx.Node) -> fx.Node | float:
    """Return the number, or the node of one, that a padding adds."""
    place = {"pad": 3, "constant_pad_nd": 2}.get(op_name(node))
    return (argument(node, place, "value") or 0) if place and not edge_of(node) else 0


def transposed_geometry(node: fx.Node, lane_of: LaneOf) -> Geometry:
    """Return the geometry of a conv_transpose2d: a window on a grid with zeros between sites."""
    source, weight = node.args[:2]
    assert isinstance(source, fx.Node)
    assert isinstance(weight, fx.Node)
    kernel = pair(tuple(node_value(weight).shape[2:]))
    stride = pair(argument(node, 3, "stride", 1))
    padding, extra = (
        pair(argument(node, *at, 0)) for at in ((4, "padding"), (5, "output_padding"))
    )
    groups, dilation = int(argument(node, 6, "groups", 1)), pair(argument(node, 7, "dilation", 1))
    grow = tuple(
        dilation[i] * (kernel[i] - 1) - 2 * padding[i] + extra[i] + 1 - stride[i] for i in (0, 1)
    )
    return Geometry(
        source,
        lane_of(source),
        kernel,
        stride,
        (-padding[0], -padding[1]),
        (extra[0] - padding[0], extra[1] - padding[1]),
        (-dilation[0], -dilation[1]),
        groups,
        inserted=stride,
        grow=(grow[0], grow[1]),
    )


def patch_of(node: fx.Node) -> int | None:
    """Return the side of a conv_transpose2d's patches if they don't overlap, or None."""
    weight = node.args[1]
    assert isinstance(weight, fx.Node)
    kernel = pair(tuple(node_value(weight).shape[2:]))
    stride = pair(argument(node, 3, "stride", 1))
    padding, extra = (
        pair(argument(node, *at, 0)) for at in ((4, "padding"), (5, "output_padding"))
    )
    dilation, groups = pair(argument(node, 7, "dilation", 1)), argument(node, 6, "groups", 1)
    apart = kernel == stride and kernel[0] == kernel[1] and dilation == (1, 1)
    return kernel[0] if apart and padding == extra == (0, 0) and groups == 1 else None
