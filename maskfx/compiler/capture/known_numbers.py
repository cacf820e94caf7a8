"""Numbers in tensors that follow from sizes alone, while a module is exported.

Some modules put sizes into a small tensor and read them again in Python, as bounds of a slice or
as a shape. Under export a tensor has no values. So beside each small tensor of integers that is
made from numbers, these numbers are kept, through views of it and arithmetic on it; where Python
reads the tensor it gets them, and they stay symbolic.

This file knows nothing about lanes, passes or the runtime.
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Callable, Mapping, Sequence
from functools import reduce
from typing import Any, SupportsInt

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

MOST = 4096  # numbers of a tensor that are kept

Numbers = NDArray[np.object_]


def filled(values: object) -> Numbers:
    """Return nested lists of numbers as an array of Python objects."""
    found = np.empty(np.shape(np.asarray(pytree.tree_map(lambda v: 0, values))), dtype=object)
    found[...] = np.array(values, dtype=object) if found.ndim else values
    return found


def shape_in(args: Sequence[Any]) -> tuple[SupportsInt, ...]:
    first = args[0] if args else ()
    return tuple(first) if isinstance(first, (tuple, list, torch.Size)) else tuple(args)


def reshaped(own: Numbers, *shape: object) -> Numbers:
    return own.reshape([int(n) for n in shape_in(shape)])


def repeated(own: Numbers, *times: object) -> Numbers:
    return np.tile(own, [int(n) for n in shape_in(times)])


def unbound(own: Numbers, dim: int = 0) -> tuple[Numbers, ...]:
    return tuple(filled_at(part) for part in np.moveaxis(own, dim, 0))


def filled_at(part: object) -> Numbers:
    """Return a part of an array as an array, even if it is a single number."""
    return part if isinstance(part, np.ndarray) else filled(part)


def largest(own: Numbers) -> Numbers:
    """Return the largest number; equal sizes are compared by what they are."""
    return filled(reduce(lambda a, b: a if is_same(a, b) else torch.sym_max(a, b), own.flat))


def is_same(one: object, other: object) -> bool:
    """Return True for equal numbers, without a condition on symbolic ones."""
    a, b = (n.node.expr if isinstance(n, torch.SymInt) else n for n in (one, other))
    return bool(a == b)


SAME = ("to", "cpu", "long", "int", "clone", "contiguous", "detach")
VIEWS: dict[str, Callable[..., object]] = {
    **dict.fromkeys(SAME, lambda own, *args, **named: own),
    **dict.fromkeys(("reshape", "view"), reshaped),
    "repeat": repeated,
    "unsqueeze": lambda own, dim: np.expand_dims(own, dim),
    "flatten": lambda own: own.reshape(-1),
    "unbind": unbound,
    "max": largest,
    "sum": lambda own, dim=None: filled_at(own.sum(axis=dim)),
    "prod": lambda own, dim=None: filled_at(own.prod(axis=dim)),
    "cumsum": lambda own, dim, dtype=None: own.cumsum(axis=dim),
    "__getitem__": lambda own, index: filled_at(own[index]),
}
ARITHMETIC: dict[str, Callable[[Any, Any], Any]] = {
    **dict.fromkeys(("add", "__add__", "__radd__"), operator.add),
    **dict.fromkeys(("mul", "__mul__", "__rmul__"), operator.mul),
    **dict.fromkeys(("sub", "__sub__"), operator.sub),
    **dict.fromkeys(("floor_divide", "__floordiv__"), operator.floordiv),
}
READS = ("__int__", "__index__", "item", "tolist")
MADE = ("arange", "zeros", "ones", "empty")
SHAPED = ("reshape", "view", "expand", "repeat", "__getitem__", "narrow", "split", "unflatten")


class KnownNumbers(TorchFunctionMode):
    """Keeps the numbers in small tensors that are made from numbers."""

    def __init__(self) -> None:
        super().__init__()
        self._known: dict[int, tuple[Tensor, Numbers]] = {}

    def know(self, value: Tensor, numbers: Numbers) -> None:
        """Note the numbers in a tensor."""
        self._known[id(value)] = value, numbers

    def of(self, value: object) -> Numbers | None:
        known = self._known.get(id(value))
        return known[1] if known is not None and known[0] is value else None

    def __torch_function__(
        self,
        func: Callable[..., object],
        types: Sequence[type],
        args: Sequence[object] = (),
        kwargs: dict[str, object] | None = None,
    ) -> object:
        named, name = kwargs or {}, getattr(func, "__name__", "")
        own = self.of(args[0]) if args else None
        if own is not None and name in READS:
            return own.tolist() if name == "tolist" else own.item()
        if own is not None and name == "__iter__":
            parts: Any = self.__torch_function__(Tensor.unbind, types, args)
            return iter(parts)
        if name in SHAPED and self._known:
            args = (args[0], *pytree.tree_map(self._number, tuple(args[1:])))
        if name in MADE and self._known:
            args = pytree.tree_map(self._number, tuple(args))
        found = func(*args, **named)
        with contextlib.suppress(TypeError, ValueError, IndexError):  # a form that isn't followed
            self._keep(found, self._numbers(name, own, args, named))
        return found

    def _number(self, value: object) -> object:
        """Return the number in a tensor of one that is known; in a slice, of its bounds."""
        if isinstance(value, slice):
            return slice(*map(self._number, (value.start, value.stop, value.step)))
        own = self.of(value)
        return own.item() if own is not None and own.ndim == 0 else value

    def _numbers(
        self, name: str, own: Numbers | None, args: Sequence[Any], named: Mapping[str, object]
    ) -> object:
        """Return the numbers in a function's result, or None."""
        if name == "scalar_tensor":
            return filled(args[0])
        if name in ("tensor", "as_tensor"):
            return None if isinstance(args[0], Tensor) else filled(args[0])
        if name == "full" and all(isinstance(n, int) for n in args[0]):
            found = np.empty([int(n) for n in args[0]], dtype=object)
            found[...] = named["fill_value"] if "fill_value" in named else args[1]
            return found
        if name == "stack" and not named and len(args) == 1:
            parts = [self.of(part) for part in args[0]]
            return None if any(part is None for part in parts) else np.stack(parts)  # type: ignore[arg-type]
        if own is None:
            return None
        if name in VIEWS:
            return VIEWS[name](own, *args[1:], **named)
        if name in ARITHMETIC and len(args) == 2:
            other = args[1] if isinstance(args[1], int) else self.of(args[1])
            return None if other is None else filled_at(ARITHMETIC[name](own, other))
        return None

    def _keep(self, value: object, numbers: object) -> None:
        if isinstance(value, (tuple, list)) and isinstance(numbers, tuple):
            for part, own in zip(value, numbers, strict=True):
                self._keep(part, own)
        elif isinstance(value, Tensor) and isinstance(numbers, np.ndarray):
            whole = not value.is_floating_point() and value.dtype != torch.bool
            if whole and numbers.size <= MOST and value.dim() == numbers.ndim:
                self._known[id(value)] = value, numbers
