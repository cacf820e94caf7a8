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


def value_of(value: object) -> Any:
    return value.value() if isinstance(value, WaitingValue) else value


for _name in OPERATORS:
    for _full in (f"__{_name}__", f"__r{_name}__"):
        if hasattr(Tensor, _full):
            setattr(
                WaitingValue,
                _full,
                lambda self, other, full=_full: getattr(self.value(), full)(value_of(other)),
            )
