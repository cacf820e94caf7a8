"""Argument and result trees: copying, comparing, and detecting values without data."""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from maskfx.ir.lru import LruCache


def has_meta(module: torch.nn.Module, values: Sequence[object]) -> bool:
    """Return True if a weight or an input is a meta tensor, so that nothing can run."""
    tensors = [*module.parameters(), *module.buffers()]
    tensors += [v for v in values if isinstance(v, torch.Tensor)]
    return any(t.is_meta for t in tensors)


def open_dataclasses(result: object) -> None:
    """Let pytrees take apart the dataclasses in a result that they hold as single leaves."""
    leaves = pytree.tree_leaves(result)
    opened = [leaf for leaf in leaves if open_dataclass(type(leaf))]
    if opened:
        open_dataclasses(opened)


def open_dataclass(kind: type) -> bool:
    """Register a class with pytrees; return False if it is no dataclass, or registered."""
    if not dataclasses.is_dataclass(kind) or kind in pytree.SUPPORTED_NODES:
        return False
    if not all(field.init for field in dataclasses.fields(kind)):
        return False
    pytree.register_dataclass(kind, serialized_type_name=f"{kind.__module__}.{kind.__qualname__}")
    return True


def made_object(result: object) -> str:
    """Return the type name of the first leaf that isn't a tensor or a plain value, or "".

    Such an object belongs to the call that made it, and to no other.
    """
    for leaf in pytree.tree_leaves(result):
        if not isinstance(leaf, (torch.Tensor, int, float, str, type(None))):
            return type(leaf).__name__
    return ""


def identity_object(value: object) -> str:
    """Return the type name of the first object that compares by identity, or "".

    No other run has an equal object.
    """
    if isinstance(value, (torch.Tensor, int, float, str, type(None), torch.dtype, Enum)):
        return ""
    if isinstance(value, (dict, list, tuple)):
        parts = value.values() if isinstance(value, dict) else value
        return next(filter(None, map(identity_object, parts)), "")
    equals: object = type(value).__eq__
    return type(value).__name__ if equals is object.__eq__ and not callable(value) else ""


def copies(values: Sequence[object]) -> list[object]:
    """Copy the tensors, because some modules write into their arguments."""
    return [copy_of(v) for v in values]


def copy_of(value: object) -> object:
    return value.clone() if isinstance(value, torch.Tensor) else value


def is_wrapped(value: torch.Tensor) -> bool:
    """Return True for a class around other tensors, such as a quantized weight."""
    return is_traceable_wrapper_subclass(value)


def parts_of(value: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return the tensors with a tensor's numbers: itself, or what a quantized weight consists of.

    Packages for quantization wrap integers and scales in a class that acts as one tensor; their
    names begin with a dot.
    """
    if not is_wrapped(value):
        return {"": value}
    names = value.__tensor_flatten__()[0]  # type: ignore[attr-defined]
    inner = {name: parts_of(getattr(value, name)) for name in names}
    return {f".{n}{rest}": part for n, parts in inner.items() for rest, part in parts.items()}


def same_values(found: object, wanted: object) -> bool:
    """Return True if the trees are equal up to rounding, as two runs of the same model are."""
    a, b = pytree.tree_leaves(found), pytree.tree_leaves(wanted)
    if len(a) != len(b):
        return False
    for x, y in zip(a, b, strict=True):
        if not isinstance(x, torch.Tensor) or not isinstance(y, torch.Tensor):
            if type(x) is not type(y):
                return False
            continue
        if x.shape != y.shape or x.dtype != y.dtype:
            return False
        if x.is_floating_point():
            bound = rounding(x)
            x, y = torch.nan_to_num(x.float()), torch.nan_to_num(y.float())
            if (x - y).norm() > bound * y.norm() + 1e-6:
                return False
        elif not torch.equal(x, y):
            return False
    return True


def rounding(value: torch.Tensor) -> float:
    """Return the relative difference that two runs may have; GPU convolutions may use TF32."""
    if value.dtype not in (torch.float32, torch.float64):
        return 5e-2
    return 1e-3 if value.is_cuda else 1e-4


def same_constant(a: object, b: object) -> bool:
    """Return True if equal; values that compare elementwise (arrays) must be the same object."""
    try:
        return type(a) is type(b) and bool(a == b)
    except (ValueError, RuntimeError):
        return a is b


@dataclass(frozen=True)
class Compared:
    """The result of comparing two tensors, with their versions at that time."""

    one: weakref.ref[torch.Tensor]
    other: weakref.ref[torch.Tensor]
    versions: tuple[int, int]
    equal: bool

    def is_of(self, one: torch.Tensor, other: torch.Tensor) -> bool:
        """Return True if these are the compared tensors, unchanged."""
        same = self.one() is one and self.other() is other
        return same and self.versions == (one._version, other._version)


class Equality:
    """Remembers which tensors compared equal, while they are the same unchanged objects.

    Comparing two device tensors synchronizes the host, and the same pairs recur in every step.
    """

    def __init__(self, limit: int = 256) -> None:
        self._known: LruCache[tuple[int, int], Compared] = LruCache(limit)

    def __call__(self, one: torch.Tensor, other: torch.Tensor) -> bool:
        if one is other:
            return True
        if one.is_inference() or other.is_inference():  # in-place changes leave no trace
            return torch.equal(one, other)
        one, other = sorted((one, other), key=id)  # the order doesn't matter
        key, versions = (id(one), id(other)), (one._version, other._version)
        known = self._known.get(key)
        if known is None or not known.is_of(one, other):
            found = torch.equal(one, other)
            known = Compared(weakref.ref(one), weakref.ref(other), versions, found)
            self._known.put(key, known)
        return known.equal
