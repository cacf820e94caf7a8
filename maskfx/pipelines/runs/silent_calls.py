"""Calls of networks whose results are multiplied by 0, as those of a ControlNet that isn't used.

The first such call is computed. If its result is zero in all numbers, and is so because of a number
among its arguments, later ones aren't computed: they get zeros, so that requests with and without
the network share steps of the denoiser. No names of networks or of arguments are known here.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from maskfx.pipelines.parts.stand_in import computing
from maskfx.pipelines.runs.call_inputs import ShapeKey, constants_of

log = logging.getLogger(__name__)

Key = tuple[str, ShapeKey]  # a network, and the shapes of its call

PRODUCTS = {"mul", "__mul__", "__rmul__", "mul_", "__imul__", "multiply"}
QUOTIENTS = {"div", "__truediv__", "div_", "__itruediv__", "true_divide"}
MADE = {"zeros", "zeros_like", "new_zeros"}
# functions whose result is zero if all tensors that they get are
KEEP_ZERO = {
    *("__getitem__", "__iter__", "select", "narrow", "split", "chunk", "unbind", "index_select"),
    *("view", "reshape", "flatten", "unflatten", "squeeze", "unsqueeze", "expand", "expand_as"),
    *("permute", "transpose", "movedim", "contiguous", "clone", "detach", "repeat", "tile"),
    *("to", "type", "type_as", "float", "half", "bfloat16", "double", "cuda", "cpu"),
    *("cat", "concat", "stack", "neg", "sum", "mean", "interpolate", "repeat_interleave"),
}
SUMS = {"add", "__add__", "__radd__", "add_", "__iadd__", "sub", "__sub__", "__rsub__", "sub_"}
WRITES = {"__imul__", "__iadd__", "__itruediv__", "__setitem__"}  # beside those with "_" at the end


def silent_key(key: Key, inputs: Mapping[str, object]) -> Key | None:
    """Return under which key the zeros of a call are known; None without a 0 among its numbers."""
    constants = constants_of(inputs)
    if not any(is_zero_number(value) for _, value in constants):
        return None
    known = {path: 0 if is_zero_number(value) else value for path, value in constants}
    return f"{key[0]} with {known}", (key[1][0], tuple(v for v in key[1][1] if v != "0"))


def is_zero_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value == 0


def zeros_of(shapes: object, device: torch.device) -> object:
    """Return zeros of these shapes."""
    return pytree.tree_map(
        lambda v: torch.zeros(v.shape, dtype=v.dtype, device=device) if is_tensor(v) else v, shapes
    )


def is_zero(result: object) -> bool:
    """Return True if a result has tensors, and all numbers in them are zero."""
    found = [value for value in pytree.tree_leaves(result) if isinstance(value, Tensor)]
    return bool(found) and not any(bool(value.any()) for value in found)


def is_tensor(value: object) -> bool:
    return isinstance(value, Tensor)


def makes_zeros(module: nn.Module, inputs: Mapping[str, object], result: object) -> bool:
    """Return True if a call's result is zero, and so are others with the same numbers."""
    return is_zero(result) and is_always_zero(module, inputs)


@torch.no_grad()
def is_always_zero(module: nn.Module, inputs: Mapping[str, object]) -> bool:
    """Return True if results are zero for all tensors, because of the numbers in a call.

    The module runs with tensors that have no numbers, and what is multiplied by 0 is followed.
    """
    try:
        with FakeTensorMode(allow_non_fake_inputs=True) as mode, computing([module]):
            own = pytree.tree_map(
                lambda v: mode.from_tensor(v) if isinstance(v, Tensor) else v, dict(inputs)
            )
            with ZeroProducts() as zeros:
                result = module.forward(**own)
    except Exception as error:  # it reads numbers, or is of a kind that can't run so
        log.debug("whether a scale makes a network's results zero isn't known: %s", error)
        return False
    found = [value for value in pytree.tree_leaves(result) if isinstance(value, Tensor)]
    return bool(found) and all(map(zeros.has, found))


class ZeroProducts(TorchFunctionMode):
    """Follows the tensors that are zero whatever numbers others have."""

    def __init__(self) -> None:
        super().__init__()
        self._zeros: dict[int, Tensor] = {}  # by id; held, so that ids stay theirs

    def has(self, value: Tensor) -> bool:
        return id(value) in self._zeros

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        zero = self._makes_zero(name, args, kwargs)
        found = func(*args, **kwargs)
        if not isinstance(found, Tensor | list | tuple) and hasattr(found, "__next__"):
            found = list(found)  # of an iteration over a tensor
        changed = [args[0]] if args and writes(name) else []
        for value in (*changed, *pytree.tree_leaves(found)):
            if isinstance(value, Tensor):
                self._zeros.pop(id(value), None)
                if zero:
                    self._zeros[id(value)] = value
        return iter(found) if name == "__iter__" else found

    def _makes_zero(self, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
        """Return True if a function's result is zero."""
        if name in MADE:
            return True
        tensors = [v for v in pytree.tree_leaves((args, kwargs)) if isinstance(v, Tensor)]
        if name in PRODUCTS:
            return any(map(self.has, tensors)) or any(map(is_zero_number, args))
        if name in QUOTIENTS:
            return bool(args) and isinstance(args[0], Tensor) and self.has(args[0])
        if name in SUMS and not all(isinstance(v, Tensor) or is_zero_number(v) for v in args):
            return False
        return name in KEEP_ZERO | SUMS and bool(tensors) and all(map(self.has, tensors))


def writes(name: str) -> bool:
    """Return True for functions that change their first argument."""
    return name in WRITES or name.endswith("_") and not name.endswith("__")
