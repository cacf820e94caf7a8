"""Rows that are selected of others under export, as values of all rows.

What a function of each row by itself makes of the selected rows is what it makes of all of them, at
the same places.

This file knows nothing about lanes, passes or the runtime.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from maskfx.compiler.capture.tracing.waiting_values import WaitingTensor, WaitingValue, value_of

ELEMENTWISE = frozenset(  # by name: of each number, and of those of other arguments beside it
    [
        "add",
        "sub",
        "mul",
        "div",
        "true_divide",
        "pow",
        "neg",
        "exp",
        "log",
        "rsqrt",
        "sqrt",
        "abs",
        "square",
        "sigmoid",
        "tanh",
        "relu",
        "silu",
        "gelu",
        "leaky_relu",
        "elu",
        "softplus",
        "mish",
        "hardswish",
        "relu6",
        "clamp",
        "clip",
        "where",
        "maximum",
        "minimum",
        "dropout",
        "float",
        "half",
        "bfloat16",
        "double",
        "to",
        "type",
        "type_as",
        "contiguous",
        "clone",
        "detach",
        "logsigmoid",
        "reciprocal",
        "lerp",
        "addcmul",
        "multiply",
        "subtract",
        "divide",
        "sin",
        "cos",
        "rsub",
        "hardtanh",
        "hardsigmoid",
    ]
)
ALONG = frozenset(  # by name: along dimensions that they name
    [
        "softmax",
        "log_softmax",
        "sum",
        "mean",
        "amax",
        "amin",
        "norm",
        "cumsum",
        "glu",
        "var",
        "std",
        "normalize",
        "chunk",
        "split",
        "unbind",
        "unsqueeze",
        "squeeze",
        "select",
        "narrow",
        "flip",
        "unflatten",
    ]
)
LAST = frozenset({"linear", "layer_norm", "rms_norm"})  # of the last dimensions
RESHAPES = frozenset({"reshape", "view"})


class RowCount(WaitingValue):
    """How many rows were selected; some, where Python compares it with none."""

    def __init__(self, rows: WaitingValue) -> None:
        self.rows = rows

    def value(self) -> Any:
        return self.rows.value().shape[0]

    def __bool__(self) -> bool:
        return True

    def __eq__(self, other: object) -> Any:
        return False if other == 0 else self.value() == value_of(other)

    def __ne__(self, other: object) -> Any:
        return True if other == 0 else self.value() != value_of(other)

    def __gt__(self, other: Any) -> Any:
        return True if other == 0 else self.value() > value_of(other)

    def __lt__(self, other: Any) -> Any:
        return False if other == 1 else self.value() < value_of(other)

    def __ge__(self, other: Any) -> Any:
        return True if other == 1 else self.value() >= value_of(other)

    def __le__(self, other: Any) -> Any:
        return False if other == 0 else self.value() <= value_of(other)

    def __hash__(self) -> int:
        return id(self)


class RoutedRows(WaitingTensor):
    """All rows, of which some are selected: one value of each place of a mask.

    Args:
        whole: the rows, along the first dimension.
        mask: which of them are selected, one for each row.
        origin: the mask that was searched; rows of one origin are the same ones.
        lead: whether a dimension of size one stands before the rows.
    """

    def __init__(self, whole: Tensor, mask: Tensor, origin: Tensor, lead: bool = False) -> None:
        self.whole, self.mask, self.origin, self.lead = whole, mask, origin, lead

    def value(self) -> Tensor:
        with torch._C.DisableTorchFunction():
            rows: Tensor = Tensor.__getitem__(self.whole, self.mask)
            return rows.unsqueeze(0) if self.lead else rows

    def of(self, whole: Any) -> Any:
        """Return the same rows of other values."""
        if isinstance(whole, (tuple, list)):
            return type(whole)(map(self.of, whole))
        return RoutedRows(whole, self.mask, self.origin)

    @property
    def shape(self) -> tuple[Any, ...]:
        own = (RowCount(self), *self.whole.shape[1:])
        return (1, *own) if self.lead else own

    @property
    def dtype(self) -> torch.dtype:
        return self.whole.dtype

    @property
    def device(self) -> torch.device:
        return self.whole.device

    @property
    def ndim(self) -> int:
        return self.whole.dim() + self.lead

    def dim(self) -> int:
        return self.ndim

    def size(self, dim: int | None = None) -> Any:
        return self.shape if dim is None else self.shape[dim]

    def numel(self) -> Any:
        return RowCount(self) if self.whole.shape[1:].numel() else self.value().numel()

    @staticmethod
    def without(
        func: Callable[..., object], args: Sequence[Any], named: dict[str, Any]
    ) -> object | None:
        return of_each_row(func, args, named)

    def __len__(self) -> Any:
        return len(self.value())

    def __getitem__(self, index: Any) -> Any:
        parts = index if isinstance(index, tuple) else (index,)
        if self.lead and index == 0:
            return self.of(self.whole)
        keeps = parts[:1] == (slice(None),) or len(parts) > 1 and parts[0] is Ellipsis
        plain = all(p is None or p is Ellipsis or isinstance(p, (int, slice)) for p in parts)
        if parts[0] is Ellipsis and len(parts) - parts.count(None) > self.ndim - 1:
            keeps = False
        if self.lead or not keeps or not plain:
            return self.value()[value_of(index)]
        return self.of(self.whole[index])

    def as_rows(self) -> RoutedRows:
        return self


def of_each_row(
    func: Callable[..., Any], args: Sequence[Any], named: dict[str, Any]
) -> object | None:
    """Return a function of all rows, or None if it doesn't compute each of them by itself."""
    args, named = [as_rows(a) for a in args], {k: as_rows(v) for k, v in named.items()}
    given = [a for a in (*args, *named.values()) if isinstance(a, RoutedRows)]
    name = getattr(func, "__name__", "").strip("_")
    first = given[0] if given else None
    if first is None or any(one.origin is not first.origin for one in given):
        return None
    if first.lead:
        return first.of(first.whole) if len(given) == 1 and drops_lead(name, args) else None
    if not is_of_rows(name, args, named, given):
        return None
    plain = [a.whole if isinstance(a, RoutedRows) else a for a in args]
    more = {k: a.whole if isinstance(a, RoutedRows) else a for k, a in named.items()}
    rows: object = first.of(func(*plain, **more))
    return rows


def as_rows(value: object) -> object:
    """Return what is selected of a first dimension as rows, and anything else as it is."""
    found = value.as_rows() if isinstance(value, WaitingTensor) else None
    return value if found is None else found


def drops_lead(name: str, args: Sequence[Any]) -> bool:
    """Return True if a method takes away the dimension of size one before the rows."""
    own = args[0].whole.shape
    if name in RESHAPES:
        sizes = args[1] if len(args) == 2 and isinstance(args[1], (tuple, list)) else args[1:]
        return tuple(sizes) == (-1, *own[1:])
    return name == "squeeze" and tuple(args[1:]) == (0,)


def is_of_rows(
    name: str, args: Sequence[Any], named: dict[str, Any], given: Sequence[RoutedRows]
) -> bool:
    """Return True if a function computes each row by itself, along its first dimension."""
    rank = given[0].whole.dim()
    others = [a for a in (*args, *named.values()) if isinstance(a, Tensor)]
    if name in ELEMENTWISE:
        ranks = {one.whole.dim() for one in given}
        beside = all(o.dim() < rank or o.dim() == rank and is_one(o.shape[0]) for o in others)
        return len(ranks) == 1 and (beside or name in ("to", "type_as"))
    if len(given) != 1 or not isinstance(args[0], RoutedRows):
        return False
    if name in LAST:
        return rank > 1 and (name == "linear" or len(args[1]) < rank)
    if name == "matmul":
        return rank > 1 and isinstance(args[1], Tensor) and args[1].dim() == 2
    if name in RESHAPES:
        sizes = args[1] if len(args) == 2 and isinstance(args[1], (tuple, list)) else args[1:]
        own = given[0].whole.shape[1:]
        whole = all(isinstance(n, int) and n > 0 for n in sizes[1:])
        first = isinstance(sizes[0], RowCount) or sizes[0] == -1
        return first and whole and torch.Size(sizes[1:]).numel() == own.numel()
    if name == "flatten":
        start = named.get("start_dim", args[1] if len(args) > 1 else 0)
        return bool(start % rank > 0)
    if name in ALONG:
        at = 2 if name in ("chunk", "split", "norm", "normalize") else 1
        dims = named.get("dim", args[at] if len(args) > at else None)
        listed = dims if isinstance(dims, (tuple, list)) else [dims]
        extra = rank + (name == "unsqueeze")
        return all(type(d) is int and d % extra > 0 for d in listed)
    return False


def is_one(size: object) -> bool:
    return isinstance(size, int) and size == 1
