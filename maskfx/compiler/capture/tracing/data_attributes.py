"""`Tensor.data` under export: a read of it is an operator of the graph.

torch makes `x.data` without calling an operator, so an export knows nothing about the result, and
it counts as a constant. `x.detach()` has the same values and memory.

This file knows nothing about lanes, passes or the runtime.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor
from torch.overrides import TorchFunctionMode

READ = Tensor.data.__get__  # type: ignore[attr-defined]


class DataAttributes(TorchFunctionMode):
    """Makes `x.data` the result of an operator."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: dict[str, object] | None = None,
    ) -> object:
        if func == READ:
            return args[0].detach()
        return func(*args, **(kwargs or {}))
