"""Numbers that a module's code would fix during an export stay symbolic.

While it runs, `int`, `len` and `set` in the files of its parts, and `torch.tensor` and its like,
are replaced by functions that do the same and keep symbolic sizes.
"""

from __future__ import annotations

import builtins
import contextlib
import functools
import sys
from collections.abc import Callable, Iterator, Sized
from typing import Any

import torch
from torch.types import IntLikeType

from maskfx.compiler.capture.tracing.lengths import is_single_count
from maskfx.compiler.capture.tracing.routings import SELECTED

NUMBERS = (int, float, torch.SymInt, torch.SymFloat)


class _IntType(type):
    """Makes every int an instance of the stand-in, too."""

    def __instancecheck__(cls, value: object) -> bool:
        return isinstance(value, builtins.int)

    def __subclasscheck__(cls, other: type) -> bool:
        return issubclass(other, builtins.int)


class SymbolicInt(int, metaclass=_IntType):
    """`int`, except that a symbolic integer stays symbolic, and one that is read from a tensor."""

    def __new__(cls, *args: Any, **named: Any) -> Any:
        if len(args) == 1 and not named:
            number = args[0].item() if is_single_count(args[0]) else args[0]
            if isinstance(number, torch.SymInt):
                return number
        return builtins.int(*args, **named)


class _SetType(type):
    """Makes every set an instance of the stand-in, too."""

    def __instancecheck__(cls, value: object) -> bool:
        return isinstance(value, builtins.set)

    def __subclasscheck__(cls, other: type) -> bool:
        return issubclass(other, builtins.set)


class SymbolicSet(set[object], metaclass=_SetType):
    """`set`, except that one of symbolic numbers, which have no hash, is a list without equals."""

    def __new__(cls, *args: Any) -> Any:
        values = list(args[0]) if len(args) == 1 else []
        if not any(isinstance(value, torch.SymInt) for value in values):
            return builtins.set(values) if args else builtins.set()
        found: list[object] = []
        for value in values:
            if not any(value == one for one in found):
                found.append(value)
        return found


def symbolic_len(value: Sized) -> IntLikeType:
    """`len`, except that a tensor's is the size of its first dimension, which may be symbolic."""
    sized = isinstance(value, torch.Tensor) and value.dim() or isinstance(value, SELECTED)
    return value.shape[0] if sized else len(value)  # type: ignore[attr-defined]


def symbolic_tensor(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Wrap torch.tensor or torch.as_tensor so that a symbolic number stays symbolic."""

    def wrapped(data: Any, *args: Any, **named: Any) -> torch.Tensor:
        if isinstance(data, torch.SymInt) and not args:
            given = {name: value for name, value in named.items() if value is not None}
            number: Any = data
            return torch.scalar_tensor(number, **{"dtype": torch.long, **given})
        listed = isinstance(data, (list, tuple)) and all(
            isinstance(n, int | torch.SymInt) for n in data
        )
        if listed and any(isinstance(n, torch.SymInt) for n in data) and not args:
            return torch.stack([wrapped(n, **named) for n in data])
        return make(data, *args, **named)

    return wrapped


def symbolic_linspace(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Wrap torch.linspace so that a symbolic number of steps stays symbolic."""

    @functools.wraps(make)
    def wrapped(start: Any, end: Any, steps: object, **named: Any) -> torch.Tensor:
        numbers = isinstance(start, NUMBERS) and isinstance(end, NUMBERS)
        if not isinstance(steps, torch.SymInt) or not numbers or named.get("out") is not None:
            return make(start, end, steps, **named)
        named = {"dtype": torch.get_default_dtype(), **{k: v for k, v in named.items() if v}}
        count: Any = steps
        places: torch.Tensor = torch.arange(count, **named)
        found: torch.Tensor = places * ((end - start) / torch.sym_max(count - 1, 1)) + start
        return found

    return wrapped


@contextlib.contextmanager
def symbolic_numbers(module: torch.nn.Module) -> Iterator[None]:
    """Keep numbers symbolic: `int`, `len` and `set` in the files that define `module`'s submodules
    and the classes that these inherit from, and tensors made of one number.
    """
    kinds = {kind for part in module.modules() for kind in type(part).__mro__}
    files = {
        sys.modules.get(kind.__module__) for kind in kinds if issubclass(kind, torch.nn.Module)
    }
    own = [f for f in files if f is not None and not f.__name__.startswith("torch.")]
    shadowed = []
    for file in own:
        stand_ins = ("int", SymbolicInt), ("len", symbolic_len), ("set", SymbolicSet)
        for name, value in stand_ins:
            if name not in vars(file):
                setattr(file, name, value)
                shadowed.append((file, name))
    makers = {name: getattr(torch, name) for name in ("tensor", "as_tensor", "linspace")}
    for name, make in makers.items():
        setattr(torch, name, (symbolic_linspace if name == "linspace" else symbolic_tensor)(make))
    try:
        yield
    finally:
        for name, make in makers.items():
            setattr(torch, name, make)
        for file, name in shadowed:
            delattr(file, name)
