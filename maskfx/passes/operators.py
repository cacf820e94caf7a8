"""Operator kinds, by name and not by overload, and what reductions remove."""

from __future__ import annotations

from torch import fx

from maskfx.ir.geometry.lanes import NotLaned
from maskfx.passes.context import argument, op_name

POINTWISE = frozenset(
    [
        "__and__",
        "__or__",
        "__xor__",
        "abs",
        "acos",
        "acosh",
        "add",
        "addcdiv",
        "addcmul",
        "asin",
        "asinh",
        "atan",
        "atan2",
        "atanh",
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
        "complex",
        "conj",
        "copysign",
        "cos",
        "cosh",
        "deg2rad",
        "digamma",
        "div",
        "divide",
        "elu",
        "empty_like",
        "eq",
        "erf",
        "erfc",
        "erfinv",
        "exp",
        "exp2",
        "expm1",
        "fill",
        "float_power",
        "floor",
        "floor_divide",
        "fmax",
        "fmin",
        "fmod",
        "frac",
        "full_like",
        "ge",
        "gelu",
        "gt",
        "half",
        "hardshrink",
        "hardsigmoid",
        "hardswish",
        "hardtanh",
        "heaviside",
        "hypot",
        "i0",
        "isfinite",
        "isinf",
        "isnan",
        "le",
        "leaky_relu",
        "lerp",
        "lgamma",
        "log",
        "log10",
        "log1p",
        "log2",
        "log_sigmoid",
        "logaddexp",
        "logaddexp2",
        "logical_and",
        "logical_not",
        "logical_or",
        "logical_xor",
        "logit",
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
        "nextafter",
        "ones_like",
        "polar",
        "pow",
        "prelu",
        "rad2deg",
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
        "signbit",
        "silu",
        "sin",
        "sinc",
        "sinh",
        "softplus",
        "softshrink",
        "special_expit",
        "special_i0",
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
        "xlogy",
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
WINDOWS = CONVOLUTIONS | {"avg_pool2d", "max_pool2d", "im2col"}
PADS = frozenset({"constant_pad_nd", "pad", "reflection_pad2d", "replication_pad2d"})
RESAMPLINGS = {  # by operator: how it rounds or mixes
    "upsample_nearest2d": "nearest",
    "_upsample_nearest_exact2d": "nearest-exact",
    "upsample_bilinear2d": "bilinear",
    "upsample_bicubic2d": "bicubic",
    "_upsample_bilinear2d_aa": "bilinear-antialiased",
    "_upsample_bicubic2d_aa": "bicubic-antialiased",
    "adaptive_avg_pool2d": "area",
}
NORMS = frozenset({"layer_norm", "rms_norm"})
SOFTMAXES = frozenset(
    {"softmax", "_softmax", "log_softmax", "cumsum", "cumprod", "logcumsumexp", "argsort"}
)
SCATTERS = frozenset({"scatter", "scatter_add", "scatter_reduce"})
SITE_SOFTMAXES = frozenset({"softmax", "_softmax", "log_softmax"})  # over all sites, too
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
        "argmax",
        "argmin",
        "count_nonzero",
        "logsumexp",
    ]
)
IN_TURN = frozenset({"mean", "sum", "amax", "amin", "logsumexp"})  # one axis after the other
# what these reduce one number to is that number
OF_ONE = ("mean", "sum", "amax", "amin", "prod", "logsumexp")


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


def merges_sites(node: fx.Node) -> bool:
    """Return True if the reduction of all sites follows from those of two parts of them."""
    name = op_name(node)
    merges = ("mean", "sum", "var", "std", "amax", "amin", "logsumexp")
    return name in merges or name == "linalg_vector_norm" and argument(node, 1, "ord", 2) == 2
