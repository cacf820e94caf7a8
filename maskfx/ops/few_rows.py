"""Products of rows with a matrix, of which those of few rows have an operator of their own."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from maskfx.ops.base import define
from maskfx.ops.native.build import wide_functions

# rows of a product that is quicker in C than by a library, which brings the weight into its layout
FEW = range(8, 97)


few_rows_linear = define(
    "few_rows_linear(Tensor rows, Tensor weight, Tensor? bias) -> Tensor",
    F.linear,
    lambda rows, weight, bias: rows.new_empty(*rows.shape[:-1], weight.shape[0]),
)


@register_flop_formula(torch.ops.maskfx.few_rows_linear, get_raw=True)
def _few_rows_linear_formula(rows: Tensor, weight: Tensor, *args: object, **kwargs: object) -> int:
    return 2 * rows.numel() * weight.shape[0]


def linear(rows: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return `F.linear`, in C for few rows where that serves."""
    if are_few(rows) and wide_functions() is not None:
        found: Tensor = few_rows_linear(rows, weight, bias)
        return found
    return F.linear(rows, weight, bias)


def are_few(rows: Tensor) -> bool:
    """Return True for rows of single precision on a CPU that are few, but not single ones.

    Within `torch.autocast` products are in another precision.
    """
    kind = rows.dtype == torch.float32 and rows.device.type == "cpu"
    few = kind and rows.numel() // max(rows.shape[-1], 1) in FEW
    return few and not torch.is_autocast_enabled("cpu")
