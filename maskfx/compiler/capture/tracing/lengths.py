"""Lengths: numbers that Python reads from a tensor, such as how many tokens a text's mask keeps.

torch.export makes a symbol of such a number, about which nothing is known, so that slices up to it
have no size. A number that equals the length of a text, or of several texts together, is that
length in the graph. The condition that it does is kept with the branch conditions of the capture
(`branches.py`): a call whose tensors give another number needs another capture.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain, combinations
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.overrides import TorchFunctionMode
from torch.types import IntLikeType
from torch.utils import _pytree as pytree

from maskfx.compiler.capture.arguments.roles import Argument
from maskfx.errors import CaptureError

READERS = ("tolist", "item")
KINDS: tuple[type[Tensor], ...] = (Tensor, FakeTensor, FunctionalTensor)
MOST = 64  # the longest list of numbers that is compared with lengths

Read = Callable[[Tensor], object]


@contextlib.contextmanager
def reading(reply: Callable[[Tensor, Read], object]) -> Iterator[None]:
    """Let `reply` answer when Python reads whole numbers from a tensor, in this thread.

    It is called with the tensor, and with the function that reads it otherwise.
    """
    thread = threading.get_ident()
    inside: list[Tensor] = []  # reading a list may read its items
    before = [
        (kind, name, vars(kind).get(name), getattr(kind, name))
        for kind in KINDS
        for name in READERS
    ]

    def replaced(read: Read) -> Read:
        def answer(self: Tensor) -> object:
            if inside or threading.get_ident() != thread or not is_count(self):
                return read(self)
            inside.append(self)
            try:
                return reply(self, read)
            finally:
                inside.pop()

        return answer

    for kind, name, _, read in before:
        setattr(kind, name, replaced(read))
    try:
        with SliceBounds():
            yield
    finally:
        for kind, name, own, _ in before:
            if own is None:
                delattr(kind, name)
            else:
                setattr(kind, name, own)


class SliceBounds(TorchFunctionMode):
    """Reads the numbers in tensors that are bounds of a slice, as Python would."""

    def __torch_function__(
        self,
        func: Callable[..., object],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: dict[str, object] | None = None,
    ) -> object:
        if func in (Tensor.__getitem__, Tensor.__setitem__):
            source, index, *new = args
            parts = tuple(map(bounded, index)) if isinstance(index, tuple) else bounded(index)
            args = (source, parts, *new)
        return func(*args, **(kwargs or {}))


def bounded(index: object) -> object:
    """Return a slice with numbers in place of tensors that hold one, and other indices as is."""
    if not isinstance(index, slice):
        return index
    bounds = (index.start, index.stop, index.step)
    return slice(*(b.item() if is_single_count(b) else b for b in bounds))


def is_single_count(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dim() == 0 and is_count(value)


def is_count(value: Tensor) -> bool:
    """Return True for a number, or a short list of numbers, that may be lengths."""
    whole = not value.is_floating_point() and not value.is_complex() and value.dtype != torch.bool
    if not whole or value.dim() > 1:
        return False
    size = value.shape[0] if value.dim() else 1
    return isinstance(size, int) and 0 < size <= MOST


def text_lengths(leaves: Sequence[Argument], inputs: Mapping[str, object]) -> list[Any]:
    """Return the lengths of the texts among the arguments; under export they are symbolic."""
    values = pytree.tree_leaves(dict(inputs))
    if len(values) != len(leaves):
        raise CaptureError("under export its arguments have another structure")
    found: dict[str, object] = {}
    for leaf, value in zip(leaves, values, strict=True):
        for role, size in zip(leaf.roles, value.shape if leaf.tensor else (), strict=leaf.tensor):
            if role.startswith("text:"):
                found.setdefault(role, size)
    return list(found.values())


def counts_of(numbers: object) -> list[int]:
    """Return what was read, one number or several, as a list."""
    return [int(n) for n in numbers] if isinstance(numbers, list) else [int(numbers)]  # type: ignore[call-overload]


def as_lengths(
    counts: Sequence[int], hints: Sequence[int], lengths: Sequence[IntLikeType]
) -> list[IntLikeType]:
    """Return the lengths that these numbers are; empty if one of them is no length.

    A number may be the length of up to three texts together.

    Args:
        counts: numbers that a plain run read.
        hints: the lengths of the texts in that run.
        lengths: the same lengths under export.
    """
    known = dict(zip(hints, lengths, strict=True))
    for several in chain(*(combinations(range(len(hints)), many) for many in (2, 3))):
        known.setdefault(sum(hints[i] for i in several), sum(lengths[i] for i in several))
    return [known[n] for n in counts] if all(n in known for n in counts) else []


def equality(numbers: Tensor, lengths: Sequence[Any]) -> Tensor:
    """Return whether the numbers in a tensor are these lengths, as a tensor."""
    parts = numbers.reshape(-1).unbind(0)
    same = [n == length for n, length in zip(parts, lengths, strict=True)]
    return torch.stack(same).all()
