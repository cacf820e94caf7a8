"""WaitingValue: a tensor or a number under export that is computed at its first use.

This file knows nothing about lanes, passes or the runtime.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

CATS = (torch.cat, torch.concat, torch.concatenate)
OPERATORS = (
    *("add", "sub", "mul", "truediv", "matmul", "and", "or"),
    *("eq", "ne", "lt", "gt", "ge", "le"),
)


class WaitingValue:
    """A value that is computed at its first use, unless `without` does without it."""

    def value(self) -> Any:
        """Compute the value."""
        raise NotImplementedError

    @staticmethod
    def without(
        func: Callable[..., object], args: Sequence[Any], named: dict[str, Any]
    ) -> object | None:
        """Return a function's result that needs no value, or None if it needs one."""
        return None

    def __getattr__(self, name: str) -> object:
        return getattr(self.value(), name)

    def __len__(self) -> int:
        return len(self.value())

    def __getitem__(self, index: Any) -> Any:
        return self.value()[value_of(index)]

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., object],
        types: Sequence[type],
        args: Sequence[Any] = (),
        named: dict[str, object] | None = None,
    ) -> Any:
        found = cls.without(func, args, named or {})
        if found is not None:
            return found
        args, named = pytree.tree_map(value_of, (tuple(args), named or {}))
        return func(*args, **named)


class WaitingTensor(WaitingValue):
    """A tensor that is computed at its first use; methods of tensors may do without it, too."""

    def as_rows(self) -> Any:
        """Return it as rows selected of others (`RoutedRows`), or None if it isn't that."""
        return None

    def __getitem__(self, index: Any) -> Any:
        rows = self.as_rows()
        return super().__getitem__(index) if rows is None else rows[index]

    def __getattr__(self, name: str) -> object:
        method = getattr(Tensor, name)
        if not callable(method):
            return getattr(self.value(), name)
        kind = type(self)
        return lambda *args, **named: kind.__torch_function__(method, (kind,), (self, *args), named)


def value_of(value: object) -> Any:
    return value.value() if isinstance(value, WaitingValue) else value


def _operator(full: str) -> None:
    def apply(self: WaitingValue, other: Any) -> Any:
        if not isinstance(self, WaitingTensor):
            return getattr(self.value(), full)(value_of(other))
        return type(self).__torch_function__(getattr(Tensor, full), (type(self),), (self, other))

    setattr(WaitingValue, full, apply)


for _name in OPERATORS:
    for _full in (f"__{_name}__", f"__r{_name}__"):
        if hasattr(Tensor, _full):
            _operator(_full)
