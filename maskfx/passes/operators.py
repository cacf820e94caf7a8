"""Operator kinds, by name and not by overload, and the geometry of windows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import fx

from maskfx.ir.lanes import Lane, NotLaned
from maskfx.passes.context import argument, node_value, op_name

POINTWISE = frozenset(
    [
        "abs",
        "acos",
        "add",
        "addcdiv",
        "addcmul",
        "asin",
        "atan",
        "bitwise_and",
        "bitwise_not",
        "bitwise_or",
        "bitwise_xor",
        "ceil",
        "celu",
        "clamp",
        "clamp_max",
        "clamp_min",
        "clip",
        "conj",
        "cos",
        "cosh",
        "div",
        "divide",
        "elu",
        "empty_like",
        "eq",
        "erf",
        "exp",
        "exp2",
        "expm1",
        "fill",
        "float_power",
        "floor",
        "floor_divide",
        "fmod",
        "full_like",
        "ge",
        "gelu",
        "gt",
        "half",
        "hardsigmoid",
        "hardswish",
        "hardtanh",
        "isinf",
        "isnan",
        "le",
        "leaky_relu",
        "lerp",
        "log",
        "log1p",
        "log2",
        "logical_and",
        "logical_not",
        "logical_or",
        "logical_xor",
        "lt",
        "masked_fill",
        "maximum",
        "minimum",
        "mish",
        "mul",
        "multiply",
        "nan_to_num",
        "ne",
        "neg",
        "negative",
        "ones_like",
        "polar",
        "pow",
        "prelu",
        "reciprocal",
        "relu",
        "relu6",
        "remainder",
        "round",
        "rsqrt",
        "rsub",
        "selu",
        "sgn",
        "sigmoid",
        "sign",
        "silu",
        "sin",
        "sinh",
        "softplus",
        "sqrt",
        "square",
        "sub",
        "subtract",
        "tan",
        "tanh",
        "threshold",
        "to",
        "true_divide",
        "trunc",
        "type_as",
        "where",
        "zeros_like",
        "_to_copy",
        "convert_element_type",
        "clone",
        "contiguous",
        "alias",
        "detach",
        "dropout",
        "lift_fresh_copy",
        "_conj",
        "resolve_conj",
        "float",
        "double",
        "copy",
    ]
)
VIEWS = frozenset(
    [
        "view",
        "reshape",
        "_unsafe_view",
        "flatten",
        "unflatten",
        "squeeze",
        "unsqueeze",
        "view_as",
        "reshape_as",
    ]
)
CONVOLUTIONS = frozenset({"conv2d", "conv3d"})
WINDOWS = CONVOLUTIONS | {"avg_pool2d"}
NORMS = frozenset({"layer_norm", "rms_norm"})
SOFTMAXES = frozenset({"softmax", "_softmax", "log_softmax", "cumsum"})
REDUCTIONS = frozenset(
    [
        "mean",
        "sum",
        "amax",
        "amin",
        "var",
        "std",
        "norm",
        "linalg_vector_norm",
        "prod",
        "any",
        "all",
    ]
)


def reduced_dims(node: fx.Node, rank: int) -> tuple[list[int], bool]:
    """Return the dimensions that a reduction removes, and whether it keeps them as ones."""
    name = op_name(node)
    if name in ("norm", "linalg_vector_norm"):
        dims, keep = argument(node, 2, "dim"), argument(node, 3, "keepdim", False)
    elif name in ("var", "std"):
        dims = argument(node, 1, "dim")
        keep = node.kwargs.get("keepdim", node.args[3] if len(node.args) > 3 else False)
        if isinstance(dims, bool):
            raise NotLaned("it reduces everything")
    else:
        dims, keep = argument(node, 1, "dim"), argument(node, 2, "keepdim", False)
    if dims is None:
        raise NotLaned("it reduces everything")
    dims = [dims] if isinstance(dims, int) else list(dims)
    return [d % rank for d in dims], bool(keep)


def sums_sites(node: fx.Node) -> bool:
    """Return True if the reduction is made of sums, to which the rest's sums can be added."""
    name = op_name(node)
    return (
        name in ("mean", "sum") or name == "linalg_vector_norm" and argument(node, 1, "ord", 2) == 2
    )


@dataclass(frozen=True)
class Geometry:
    """The window of a convolution or pool, including an explicit zero padding before it."""

    source: fx.Node
    lane: Lane
    kernel: tuple[int, int]
    stride: tuple[int, int]
    before: tuple[int, int]
    after: tuple[int, int]
    dilation: tuple[int, int]
    groups: int

    def level(self) -> dict[str, Any]:
        grow = tuple(
            self.before[i] + self.after[i] - self.dilation[i] * (self.kernel[i] - 1) - 1
            for i in (0, 1)
        )
        return {"grow": grow, "divide": self.stride, "extra": (1, 1)}

    @property
    def pointwise(self) -> bool:
        return (
            self.kernel == (1, 1) and self.stride == (1, 1) and self.before == self.after == (0, 0)
        )


def pair(value: Any) -> tuple[int, int]:
    """Return the values for image rows and columns, the last two."""
    if isinstance(value, int):
        return value, value
    return int(value[-2:][0]), int(value[-1])


def triple(value: Any) -> tuple[int, int, int]:
    if isinstance(value, int):
        return value, value, value
    a, b, c = ([*value] * 3)[:3]
    return int(a), int(b), int(c)


def window_geometry(node: fx.Node, lane_of: Callable[[Any], Lane]) -> Geometry:
    """Return the geometry of conv2d, of conv3d over one frame, or of avg_pool2d."""
    source = node.args[0]
    assert isinstance(source, fx.Node)
    if op_name(node) in CONVOLUTIONS:
        weight = node.args[1]
        assert isinstance(weight, fx.Node)
        frames = tuple(node_value(weight).shape[2:-2])
        kernel = pair(tuple(node_value(weight).shape[2:]))
        stride, padding = pair(argument(node, 3, "stride", 1)), argument(node, 4, "padding", 0)
        if isinstance(padding, str):
            raise NotLaned(f"its padding is {padding!r}")
        if any(n != 1 for n in frames) or (frames and triple(padding)[0] != 0):
            raise NotLaned(f"it reaches over {frames[0]} frames")
        before, dilation = pair(padding), pair(argument(node, 5, "dilation", 1))
        groups = int(argument(node, 6, "groups", 1))
    else:
        kernel = pair(argument(node, 1, "kernel_size"))
        stride = pair(argument(node, 2, "stride") or kernel)
        before, dilation, groups = pair(argument(node, 3, "padding", 0)), (1, 1), 1
        if before != (0, 0) or argument(node, 4, "ceil_mode", False):
            raise NotLaned("a pool with padding isn't narrowed")
    after = before
    if op_name(source) in ("constant_pad_nd", "pad") and is_zero_padding(source):
        pads = [int(p) for p in argument(source, 1, "pad")] + [0] * 4
        if all(p == 0 for p in pads[4:]):
            before = (before[0] + pads[2], before[1] + pads[0])
            after = (after[0] + pads[3], after[1] + pads[1])
            inner = source.args[0]
            assert isinstance(inner, fx.Node)
            source = inner
    return Geometry(source, lane_of(source), kernel, stride, before, after, dilation, groups)


def patch_of(node: fx.Node) -> int:
    """Return the side of a conv_transpose2d's patches, which must not overlap."""
    weight = node.args[1]
    assert isinstance(weight, fx.Node)
    kernel = pair(tuple(node_value(weight).shape[2:]))
    stride = pair(argument(node, 3, "stride", 1))
    padding, extra = (
        pair(argument(node, *at, 0)) for at in ((4, "padding"), (5, "output_padding"))
    )
    dilation, groups = pair(argument(node, 7, "dilation", 1)), argument(node, 6, "groups", 1)
    if kernel != stride or kernel[0] != kernel[1] or dilation != (1, 1):
        raise NotLaned(f"its patches of {kernel} lie {stride} apart")
    if padding != (0, 0) or extra != (0, 0) or groups != 1:
        raise NotLaned("a transposed convolution with padding or groups isn't narrowed")
    return kernel[0]


def is_zero_padding(node: fx.Node) -> bool:
    if op_name(node) == "pad":
        return argument(node, 2, "mode", "constant") == "constant" and not argument(
            node, 3, "value"
        )
    return not argument(node, 2, "value", 0)
