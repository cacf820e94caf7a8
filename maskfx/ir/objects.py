"""Objects that hold tensors, such as a pipeline's cache of keys and values, as nodes of pytrees.

A pipeline may pass one object to many calls, some of which write into it. So a tree that is taken
apart and put together unchanged has the same objects as before; one with other leaves has new ones.
"""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import torch
from torch.utils import _pytree as pytree

from maskfx.ir.values import copies

PLAIN = (torch.Tensor, int, float, str, type(None), torch.dtype, torch.device, Enum)
ANEW: ContextVar[bool] = ContextVar("ANEW", default=False)  # whether all objects are new ones
OPENED: set[type] = set()  # the classes that pytrees take apart


@dataclass(frozen=True)
class ObjectForm:
    """The class of an object and the names of its attributes; equal for objects alike."""

    kind: type
    names: tuple[str, ...]
    origin: Callable[[], object] = field(compare=False, repr=False)  # returns None once it is gone

    def __reduce__(self) -> tuple[type, tuple[object, ...]]:  # weak references can't be pickled
        return ObjectForm, (self.kind, self.names, nothing)


def nothing() -> None:
    """Return None, as the origin of a form that no object of this process has."""


def open_objects(tree: object) -> str:
    """Let pytrees take apart the objects of a tree that consist of tensors and plain values.

    Returns:
        The type name of the first object that is known by its identity alone, or "".
    """
    if isinstance(tree, PLAIN):
        return ""
    if (parts := parts_of_tree(tree)) is not None:
        return next(filter(None, map(open_objects, parts)), "")
    if holds_values(tree):
        open_kind(type(tree))
        return open_objects(list(vars(tree).values()))
    equals: object = type(tree).__eq__
    return type(tree).__name__ if equals is object.__eq__ and not callable(tree) else ""


def made_object(result: object) -> str:
    """Return the type name of the first object in a result that belongs to its call, or "".

    That is what isn't a tensor or a plain value, and an object that holds tensors, unless it is a
    dataclass.
    """
    kinds = (kind for kind in kinds_in(pytree.tree_structure(result)) if kind in OPENED)
    held = next((kind.__name__ for kind in kinds if not dataclasses.is_dataclass(kind)), "")
    return closed_object(result) or held


def closed_object(result: object) -> str:
    """Return the type name of the first object in a result that can't be made again, or "".

    That is what isn't a tensor, a plain value or an object that pytrees take apart.
    """
    plain = (torch.Tensor, int, float, str, type(None))
    leaves = pytree.tree_leaves(result)
    return next((type(leaf).__name__ for leaf in leaves if not isinstance(leaf, plain)), "")


def kinds_in(spec: pytree.TreeSpec) -> Iterator[type]:
    """Yield the classes of a tree's nodes, the outer ones first."""
    if spec.type is not None:
        yield spec.type
    for child in spec.children():
        yield from kinds_in(child)


def holds_objects(spec: pytree.TreeSpec) -> bool:
    """Return True if a tree of this structure has an object that was taken apart."""
    return not OPENED.isdisjoint(kinds_in(spec))


def parts_of_tree(tree: object) -> Collection[object] | None:
    """Return the elements of a container of Python, or None for anything else."""
    if isinstance(tree, Mapping):
        return tree.values()
    return tree if isinstance(tree, (list, tuple)) else None


def holds_values(value: object, within: tuple[int, ...] = ()) -> bool:
    """Return True for an object whose attributes are tensors, plain values or such objects."""
    if type(value) in OPENED:
        return True
    if not has_attributes_alone(value) or id(value) in within:
        return False

    def fits(held: object) -> bool:
        if isinstance(held, PLAIN):
            return True
        parts = parts_of_tree(held)
        if parts is not None and type(held) in pytree.SUPPORTED_NODES:
            return all(map(fits, parts))
        return holds_values(held, (*within, id(value)))

    return all(map(fits, vars(value).values()))


def has_attributes_alone(value: object) -> bool:
    """Return True for an object of a class of Python that is nothing but its attributes."""
    kind = type(value)
    if kind in pytree.SUPPORTED_NODES or isinstance(value, (torch.nn.Module, type)):
        return False
    own = [base for base in kind.__mro__ if base is not object]
    if any(vars(base).get("__slots__") or base.__module__ == "builtins" for base in own):
        return False
    return bool(getattr(value, "__dict__", None)) and not callable(value)


def open_kind(kind: type) -> None:
    """Let pytrees take apart the objects of a class."""
    if kind in pytree.SUPPORTED_NODES:
        name_kind(kind)
        return

    def flattened(value: object) -> tuple[list[object], ObjectForm]:
        form = ObjectForm(kind, tuple(vars(value)), weakref.ref(value))
        return list(vars(value).values()), form

    def named(value: object) -> tuple[list[tuple[pytree.KeyEntry, object]], ObjectForm]:
        parts, form = flattened(value)
        keys = map(pytree.GetAttrKey, form.names)
        return list(zip(keys, parts, strict=True)), form

    def read(names: Sequence[str]) -> ObjectForm:
        return ObjectForm(kind, tuple(names), nothing)

    pytree.register_pytree_node(
        kind,
        flattened,
        put_together,
        serialized_type_name=f"{kind.__module__}.{kind.__qualname__}",
        flatten_with_keys_fn=named,
        to_dumpable_context=lambda form: list(form.names),
        from_dumpable_context=read,
    )
    OPENED.add(kind)


def name_kind(kind: type) -> None:
    """Let trees of a registered class be written, under its full name if it has no name for that.

    `torch.utils._pytree.register_dataclass` gives none.
    """
    known = pytree.SUPPORTED_SERIALIZED_TYPES.get(kind)
    if known is None or known.serialized_type_name != pytree.NO_SERIALIZED_TYPE_NAME_FOUND:
        return
    name = f"{kind.__module__}.{kind.__qualname__}"
    pytree.SUPPORTED_SERIALIZED_TYPES[kind] = known._replace(serialized_type_name=name)
    pytree.SERIALIZED_TYPE_TO_PYTHON_TYPE[name] = kind


def put_together(parts: Iterable[object], form: ObjectForm) -> object:
    """Return the object that was taken apart, if it holds these parts, or a new one."""
    known, parts = form.origin(), list(parts)
    if known is not None and not ANEW.get() and holds(known, parts):
        return known
    made: object = object.__new__(form.kind)
    vars(made).update(zip(form.names, parts, strict=True))
    return made


def holds(value: object, parts: Sequence[object]) -> bool:
    """Return True if the attributes of an object are these, down to each leaf."""
    own, own_spec = pytree.tree_flatten(list(vars(value).values()))
    found, spec = pytree.tree_flatten(list(parts))
    return spec == own_spec and all(a is b for a, b in zip(own, found, strict=True))


@contextmanager
def new_objects() -> Iterator[None]:
    """Make all objects of trees anew, so that what is written into them stays there."""
    token = ANEW.set(True)
    try:
        yield
    finally:
        ANEW.reset(token)


def copied_tree(values: Sequence[object], spec: pytree.TreeSpec) -> Any:
    """Return a tree of copies, for a run that may write into its arguments."""
    with new_objects():
        return pytree.tree_unflatten(copies(values), spec)


def copy_tree(tree: object) -> Any:
    """Return a copy of a tree: of its tensors and of the objects that hold them."""
    return copied_tree(*pytree.tree_flatten(tree))


class Watched:
    """Notices what is written into the objects among a call's arguments."""

    def __init__(self, inputs: Mapping[str, object]) -> None:
        self.inputs = inputs
        self._before = {name: self._state(value) for name, value in inputs.items()}

    def written(self) -> str:
        """Return the name of the first argument whose objects differ from before, or ""."""
        for name, value in self.inputs.items():
            (spec, leaves, versions), (own, found, now) = self._before[name], self._state(value)
            if not holds_objects(own):
                continue
            if spec != own or versions != now:
                return name
            if any(a is not b for a, b in zip(leaves, found, strict=True)):
                return name
        return ""

    @staticmethod
    def _state(value: object) -> tuple[pytree.TreeSpec, list[object], list[int]]:
        leaves, spec = pytree.tree_flatten(value)
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        return spec, leaves, [0 if t.is_inference() else t._version for t in tensors]
