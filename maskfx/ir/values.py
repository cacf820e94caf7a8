"""Argument and result trees: copying, comparing, and detecting values without data."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from maskfx.ir.lru import LruCache

PLAIN_TENSORS = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)


def has_meta(module: torch.nn.Module, values: Sequence[object]) -> bool:
    """Return True if a weight or an input is a meta tensor, so that nothing can run."""
    tensors = [*module.parameters(), *module.buffers()]
    tensors += [v for v in values if isinstance(v, torch.Tensor)]
    return any(t.is_meta for t in tensors)


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

    Packages for quantization wrap integers and scales in a class that acts as one tensor, or give a
    tensor of packed integers a class of its own, with scales as attributes. Names of such parts
    begin with a dot.
    """
    if is_wrapped(value):
        names = value.__tensor_flatten__()[0]  # type: ignore[attr-defined]
        inner = {name: parts_of(getattr(value, name)) for name in names}
        return {f".{n}{rest}": part for n, parts in inner.items() for rest, part in parts.items()}
    if type(value) in PLAIN_TENSORS:
        return {"": value}
    found = {"": plain_view(value)}
    for name, held in vars(value).items():
        inside = {"": held} if isinstance(held, torch.Tensor) else getattr(held, "__dict__", {})
        tensors = {key: one for key, one in inside.items() if isinstance(one, torch.Tensor)}
        found.update({f".{name}.{key}": plain_view(one) for key, one in tensors.items()})
    return found


def plain_view(value: torch.Tensor) -> torch.Tensor:
    """Return a tensor of a class of its own as PyTorch's, with the same numbers in memory."""
    with torch._C.DisableTorchFunctionSubclass():
        return value.detach().as_subclass(torch.Tensor)


def octets(value: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a tensor, flat; a contiguous tensor isn't copied."""
    flat = value.detach().contiguous().flatten()
    # a single element may have any stride, such as the 0 of an expanded tensor
    return flat.as_strided((flat.numel(),), (1,)).view(torch.uint8)


ROUNDED = 5e-2  # relative difference that two runs in 16 bits may have


def same_values(found: object, wanted: object, within: float = 0.0) -> bool:
    """Return True if the trees are equal up to rounding, as two runs of the same model are.

    `within` is the relative difference of values that were rounded to fewer bits before.
    """
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
            bound = max(rounding(x), within)
            x, y = torch.nan_to_num(x.float()), torch.nan_to_num(y.float())
            if (x - y).norm() > bound * y.norm() + 1e-6:
                return False
        elif not torch.equal(x, y):
            return False
    return True


def rounding(value: torch.Tensor) -> float:
    """Return the relative difference that two runs may have; GPU convolutions may use TF32."""
    if value.dtype not in (torch.float32, torch.float64):
        return ROUNDED
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


def autocast_dtypes() -> list[str]:
    """Return the types that `torch.autocast` computes in around this call, by kind of device."""
    kinds = [kind for kind in ("cpu", "cuda") if torch.is_autocast_enabled(kind)]
    return [f"{kind} {torch.get_autocast_dtype(kind)}" for kind in kinds]
