"""Numbers in Python during a capture: sizes that `int`, `len` or `torch.tensor` would fix stay
symbolic, and a tensor's own numbers are read only where they are few.
"""

from __future__ import annotations

import builtins
import contextlib
import math
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from maskfx.errors import CaptureError
from maskfx.lanes import shape_hint

READ = 64  # the most numbers of a tensor that a forward may read during a capture


class _IntType(type):
    """Whatever is an int is an instance of the stand-in, too."""

    def __instancecheck__(cls, value: Any) -> bool:
        return isinstance(value, builtins.int)

    def __subclasscheck__(cls, other: type) -> bool:
        return issubclass(other, builtins.int)


class SymbolicInt(int, metaclass=_IntType):
    """`int`, but a symbolic whole number stays one."""

    def __new__(cls, *args: Any, **named: Any) -> Any:
        if len(args) == 1 and not named and isinstance(args[0], torch.SymInt):
            return args[0]
        return builtins.int(*args, **named)


def symbolic_len(value: Any) -> Any:
    """`len`, but a tensor's is the size of its first dimension, which may be symbolic."""
    return value.shape[0] if isinstance(value, torch.Tensor) and value.dim() else len(value)


def symbolic_tensor(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """torch.tensor or torch.as_tensor, but a symbolic number stays one inside the tensor."""

    def wrapped(data: Any, *args: Any, **named: Any) -> torch.Tensor:
        if isinstance(data, torch.SymInt) and not args:
            number: Any = data
            given = {name: value for name, value in named.items() if value is not None}
            return torch.scalar_tensor(number, **{"dtype": torch.long, **given})
        return make(data, *args, **named)

    return wrapped


@contextlib.contextmanager
def symbolic_numbers(module: torch.nn.Module) -> Iterator[None]:
    """Let numbers stay symbolic: `int` and `len` in the files that define `module`'s parts, and
    tensors made of one number.
    """
    files = {sys.modules[type(m).__module__] for m in module.modules()}
    own = [f for f in files if f is not None and not f.__name__.startswith("torch.")]
    shadowed = []
    for file in own:
        for name, value in (("int", SymbolicInt), ("len", symbolic_len)):
            if name not in vars(file):
                setattr(file, name, value)
                shadowed.append((file, name))
    makers = {name: getattr(torch, name) for name in ("tensor", "as_tensor")}
    for name, make in makers.items():
        setattr(torch, name, symbolic_tensor(make))
    try:
        yield
    finally:
        for name, make in makers.items():
            setattr(torch, name, make)
        for file, name in shadowed:
            delattr(file, name)


@contextlib.contextmanager
def few_numbers() -> Iterator[None]:
    """Let nobody list many numbers of a tensor: export makes a symbol of each, for minutes."""
    before = FakeTensor.tolist

    def listed(self: FakeTensor) -> Any:
        shape = shape_hint(self)
        if math.prod(shape) > READ:
            raise CaptureError(f"Python lists the numbers of a tensor of {shape}")
        return before(self)

    FakeTensor.tolist = listed  # type: ignore[method-assign]
    try:
        yield
    finally:
        FakeTensor.tolist = before  # type: ignore[method-assign]
