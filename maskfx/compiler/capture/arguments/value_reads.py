"""Value reads: the arguments whose contents decide sizes, or numbers that Python reads.

A size that depends on what a tensor holds can't be traced. An eager run shows which arguments such
sizes follow from. A capture that holds the values of these (`held_values.py`) serves calls with
equal values only.

This file knows nothing about lanes, passes or the runtime.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils.weak import WeakIdKeyDictionary

from maskfx.compiler.capture.arguments.roles import Argument, flatten
from maskfx.ir.geometry.lanes import NotLaned
from maskfx.ir.objects import copied_tree

LARGEST = 1 << 16  # numbers of an argument that a capture may hold
READS = frozenset(
    [
        *("item", "tolist", "numpy", "__bool__", "__int__", "__index__", "__float__"),
        *("nonzero", "argwhere", "masked_select", "bincount"),
    ]
)
# functions whose arguments behind the first one are sizes
SIZED = frozenset(["reshape", "view", "expand", "repeat", "narrow", "split", "unflatten"])
MADE = frozenset(["arange", "zeros", "ones", "empty", "full"])
INDEXED = frozenset(["__getitem__", "__setitem__", "index_put", "index_put_"])


class ValueReads(TorchFunctionMode):
    """Notes which of some tensors decide sizes, or numbers that Python reads.

    Args:
        named: the tensors by number; what is computed from them counts as them.
    """

    def __init__(self, named: Mapping[int, Tensor]) -> None:
        super().__init__()
        self.read: set[int] = set()
        self._sources: Any = WeakIdKeyDictionary()
        for number, value in named.items():
            self._sources[value] = frozenset((number,))

    def __torch_function__(
        self,
        func: Callable[..., object],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        named, name = kwargs or {}, getattr(func, "__name__", "")
        given = list(tensors_in((args, named)))
        own = self._of(given)
        if not own:
            return func(*args, **named)
        self.read |= self._of(list(deciding(name, args, given)))
        found = func(*args, **named)
        written = given[:1] if writes_first(name) else []
        for value in (*tensors_in(found), *written):
            self._sources[value] = own | self._of([value])
        return found

    def _of(self, tensors: Sequence[Tensor]) -> frozenset[int]:
        none = frozenset[int]()
        return none.union(*(self._sources.get(tensor, none) for tensor in tensors))


def writes_first(name: str) -> bool:
    """Return True for the name of a function that writes into its first argument."""
    return name == "__setitem__" or name.rstrip("_") == name[:-1]


def tensors_in(tree: object) -> Iterator[Tensor]:
    """Yield the tensors of a tree, and those that are bounds of its slices."""
    for leaf in pytree.tree_leaves(tree):
        if isinstance(leaf, Tensor):
            yield leaf
        elif isinstance(leaf, slice):
            yield from tensors_in((leaf.start, leaf.stop, leaf.step))


def deciding(name: str, args: Sequence[Any], given: Sequence[Tensor]) -> Iterator[Tensor]:
    """Yield the tensors whose contents decide the size of a function's result, or are read."""
    alone = name == "where" and len(args) == 1
    if alone or name in READS or name.removeprefix("_").startswith("unique"):
        yield from given
    elif name == "repeat_interleave" or name in SIZED:
        yield from tensors_in(args[1:])
    elif name in MADE:
        yield from tensors_in(args)
    elif name in INDEXED:
        parts = args[1] if isinstance(args[1], (tuple, list)) else (args[1],)
        for part in parts:
            if isinstance(part, slice) or isinstance(part, Tensor) and part.dtype == torch.bool:
                yield from tensors_in(part)


def depends_on_values(error: Exception) -> bool:
    """Return True if an export failed because a size depends on what a tensor holds."""
    return isinstance(error, GuardOnDataDependentSymNode | NotLaned) or "unbacked" in str(error)


def is_holdable(leaf: Argument, value: object) -> bool:
    """Return True for an argument of the request that consists of a few whole numbers."""
    if not isinstance(value, Tensor) or leaf.step or not 0 < value.numel() <= LARGEST:
        return False
    plain = type(value) is Tensor and not value.is_meta and not value.is_complex()
    return plain and bool((value == value.round()).all() if value.is_floating_point() else True)


def with_held(
    module: nn.Module,
    leaves: Sequence[Argument],
    values: Sequence[object],
    spec: pytree.TreeSpec,
    sides: bool = False,
) -> list[Argument]:
    """Return the arguments; those are held whose contents decide sizes or are read by Python.

    None is held if the samples of a call differ in one of them, or if the module fails. Tensors
    with sides of the picture are held with `sides` only.
    """
    free = {i for i, leaf in enumerate(leaves) if leaf.sides and not sides}
    pairs = enumerate(zip(leaves, values, strict=True))
    own = {i for i, (leaf, value) in pairs if is_holdable(leaf, value)} - free
    read = read_of(module, own, values, spec)
    alike = all(held_value(leaves[i], values[i]) is not None for i in read)
    return [replace(leaf, held=alike and i in read) for i, leaf in enumerate(leaves)]


def read_numbers(module: nn.Module, inputs: Mapping[str, object]) -> set[str]:
    """Return the paths of the tensors of a few whole numbers that Python reads, or sizes need."""
    paths, values, spec = flatten(inputs)
    few = {i for i, v in enumerate(values) if isinstance(v, Tensor) and 0 < v.numel() <= LARGEST}
    own = {i for i in few if not values[i].is_floating_point() and not values[i].is_meta}
    return {paths[i] for i in read_of(module, own, values, spec)}


def read_of(
    module: nn.Module, own: set[int], values: Sequence[object], spec: pytree.TreeSpec
) -> set[int]:
    """Return which of some arguments a run of the module reads; none if it fails."""
    inputs = copied_tree(values, spec)
    given = pytree.tree_leaves(inputs)
    reads = ValueReads({i: given[i] for i in own})
    try:
        with torch.no_grad(), reads:
            _ = module(**inputs) if own else None
    except (torch.OutOfMemoryError, MemoryError):
        raise
    except Exception:  # what it is, a run of the module shows
        return set()
    return reads.read


def held_value(leaf: Argument, value: Any) -> Tensor | None:
    """Return what a capture holds of an argument: one sample's value; None if samples differ."""
    for axis, role in enumerate(leaf.roles):
        if role == "batch":
            first: Tensor = value.narrow(axis, 0, 1).clone()
            return first if bool((value == first).all()) else None
    held: Tensor = value.clone()
    return held


def is_held(leaf: Argument, held: Tensor, value: object) -> bool:
    """Return True if an argument has the value that a capture holds, in each of its samples."""
    if not isinstance(value, Tensor) or value.dtype != held.dtype or value.dim() != held.dim():
        return False
    sizes = zip(leaf.roles, held.shape, value.shape, strict=True)
    if any(n != m and role != "batch" for role, n, m in sizes):
        return False
    same = value == held.to(value.device)
    if leaf.sides and not leaf.held:  # other pictures have other sides, and all samples the same
        alike = value == (value[:1] if leaf.roles[0] == "batch" else value)
        sides = torch.tensor([bool(role) for role in leaf.sides], device=value.device)
        same = alike & (same | sides.view(held.shape))
    return bool(same.all())
