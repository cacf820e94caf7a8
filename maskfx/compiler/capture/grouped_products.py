"""Grouped products under export: `torch.nn.functional.grouped_mm` as one product for each group.

Rows of a matrix that are sorted by group, such as those of an expert, are multiplied with the
group's own matrix. Where the ends of the groups follow from sizes alone (`known_numbers.py`), these
are products of slices, which rules narrow; the operator itself accepts on meta tensors only the
dtypes that GPUs have it for.

This file knows nothing about lanes, passes or the runtime.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from maskfx.compiler.capture.known_numbers import KnownNumbers, Numbers, is_same

NAME = "_grouped_mm"  # what `grouped_mm` calls


class GroupedProducts(TorchFunctionMode):
    """Writes out grouped products of rows whose groups are known numbers of rows long."""

    def __init__(self, known: KnownNumbers) -> None:
        super().__init__()
        self._known = known

    def __torch_function__(
        self,
        func: Callable[..., object],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> object:
        named = kwargs or {}
        if getattr(func, "__name__", "") == NAME and len(args) == 2:
            ends = self._known.of(named.get("offs"))
            rows, matrices = args
            plain = named.get("bias") is None and (rows.dim(), matrices.dim()) == (2, 3)
            if plain and ends is not None:
                dtype = named.get("out_dtype") or rows.dtype
                return of_groups(rows.to(dtype), matrices.to(dtype), ends)
        return func(*args, **named)


def of_groups(rows: Tensor, matrices: Tensor, ends: Numbers) -> Tensor:
    """Return the rows of each group times its matrix; those after the last group are zero."""
    sizes = [end - begin for begin, end in pairwise([0, *ends.tolist()])]
    left = rows.shape[0] - ends[-1]
    parts = torch.split(rows, [*sizes, *([] if is_same(left, 0) else [left])])
    products = [part @ matrices[group] for group, part in enumerate(parts[: len(sizes)])]
    unused = [part.new_zeros((part.shape[0], matrices.shape[2])) for part in parts[len(sizes) :]]
    return torch.cat([*products, *unused])
