"""Tensors that two processes exchange once: later messages refer to them by number.

One end (`TensorSender`) numbers the tensors that it sends, and reports those that it no longer has;
the other (`TensorHolder`) holds them, and gives a later message the same objects, so that results
that were computed from them are still valid. A tensor that was changed in place is sent again. The
holder may number tensors of its own in an answer: when they are sent back, their numbers suffice.
"""

from __future__ import annotations

import io
import itertools
import pickle
import weakref
from collections import deque
from collections.abc import Callable, Collection, Hashable, MutableMapping, Sequence
from functools import partial
from typing import Any, SupportsIndex, TypeAlias

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from maskfx.runtime.processes.channel import Part
from maskfx.runtime.transport.tensor_transport import (
    SMALL,
    TensorPickler,
    Unsendable,
    contents,
    pack,
    rebuilt,
)

KNOWN, NEW, VIEW = "known", "new", "view"
Referral = tuple[Any, ...]  # KNOWN, NEW or VIEW, a tensor's number, and what makes it
Gone: TypeAlias = "weakref.finalize[[Hashable], Tensor]"


class PackedMessage:
    """A message within a message; its parts are sent without a copy."""

    def __init__(self, parts: Sequence[Part]) -> None:
        self.parts = list(parts)

    def __reduce_ex__(self, protocol: SupportsIndex) -> tuple[type[PackedMessage], tuple[object]]:
        return PackedMessage, ([pickle.PickleBuffer(part) for part in self.parts],)

    @property
    def nbytes(self) -> int:
        return sum(memoryview(part).nbytes for part in self.parts)


class TensorSender:
    """The end that numbers tensors as it sends them; holds none of them."""

    def __init__(self) -> None:
        # number and version of each tensor that the other end holds
        self._numbers: MutableMapping[Tensor, tuple[Hashable, int, Gone]] = WeakIdKeyDictionary()
        self._count = itertools.count()
        self._fresh: list[Tensor] = []  # numbered by the last message
        self._dropped: deque[Hashable] = deque()

    def pack(self, value: object) -> PackedMessage:
        """Return a value as a message, or raise Unsendable."""
        self._fresh.clear()
        try:
            return packed(value, self._reference)
        except Unsendable:
            self.undo()
            raise

    def unpack(self, message: PackedMessage) -> Any:
        """Return the value of an answer; tensors that the other end has numbered count as sent."""
        self._fresh.clear()
        return unpacked(message, self._received)

    def dropped(self) -> list[Hashable]:
        """Return the numbers of tensors that no longer exist, or have changed, once each."""
        return [self._dropped.popleft() for _ in range(len(self._dropped))]

    def drop(self, numbers: Collection[Hashable]) -> None:
        """Report numbers as dropped, again if a message with them may not have arrived."""
        self._dropped.extend(numbers)

    def undo(self) -> None:
        """Forget the numbers of the last message: it is unknown whether its tensors arrived."""
        for tensor in self._fresh:
            known = self._numbers.pop(tensor, None)
            if known is not None:
                known[2].detach()
                self._dropped.append(known[0])
        self._fresh.clear()

    def clear(self) -> None:
        """Forget all numbers: the other end holds nothing any more."""
        self._fresh.clear()
        for *_, gone in self._numbers.values():
            gone.detach()
        self._numbers.clear()
        self._dropped.clear()

    def _reference(self, value: Tensor) -> Referral | None:
        known = self._numbers.get(value)
        if known is not None and known[1] == value._version:
            return KNOWN, known[0]
        if known is not None:
            known[2].detach()
            self._dropped.append(known[0])
        base = value._base
        held = None if base is None else self._numbers.get(base)
        held = held if held is not None and held[1] == value._version else None
        if base is not None and held and base.is_contiguous() and base.dtype == value.dtype:
            offset = value.storage_offset() - base.storage_offset()
            return VIEW, held[0], tuple(value.shape), value.stride(), offset
        number = next(self._count)
        self._note(value, number)
        self._fresh.append(value)
        return NEW, number, *contents(value)

    def _received(self, kind: str, number: Hashable, *rest: Any) -> Tensor:
        if kind != NEW:
            raise pickle.UnpicklingError(f"an answer refers to tensor {number}")
        value = rebuilt(*rest)
        self._note(value, number)
        return value

    def _note(self, value: Tensor, number: Hashable) -> None:
        gone = weakref.finalize(value, self._dropped.append, number)
        gone.atexit = False
        self._numbers[value] = number, value._version, gone


class TensorHolder:
    """The end that holds the tensors.

    Args:
        name: Part of its own numbers, other than those of earlier holders of the same sender.
    """

    def __init__(self, name: Hashable = 0) -> None:
        self.held: dict[Hashable, Tensor] = {}
        self._name, self._count = name, itertools.count()

    def unpack(self, message: PackedMessage) -> Any:
        """Return the value of a message, or raise Unsendable."""
        return unpacked(message, self._received)

    def pack(self, value: object, kept: Collection[int] = ()) -> PackedMessage:
        """Return a value as a message; hold and number the tensors whose ids are in `kept`."""

        def reference(tensor: Tensor) -> Referral | None:
            if id(tensor) not in kept:
                return None
            number = (self._name, next(self._count))
            self.held[number] = tensor
            return NEW, number, *contents(tensor)

        return packed(value, reference)

    def drop(self, numbers: Collection[Hashable]) -> None:
        """Release tensors; ignore unknown numbers."""
        for number in numbers:
            self.held.pop(number, None)

    def _received(self, kind: str, number: Hashable, *rest: Any) -> Tensor:
        if kind == NEW:
            self.held[number] = rebuilt(*rest)
            return self.held[number]
        found = self.held.get(number)
        if found is None:
            raise pickle.UnpicklingError(f"tensor {number} isn't in this process")
        if kind == KNOWN:
            return found
        shape, stride, offset = rest
        return found.as_strided(shape, stride, offset)


Reference = Callable[[Tensor], Referral | None]


class ReferringPickler(TensorPickler):
    """Pickles large CPU tensors by what `reference` returns for them, if it isn't None."""

    def __init__(self, reference: Reference, stream: io.BytesIO, **options: Any) -> None:
        super().__init__(stream, **options)
        self._reference = reference
        self._done: dict[int, tuple[Tensor, Referral | None]] = {}

    def persistent_id(self, value: object) -> object:
        if type(value) is not Tensor or value.nbytes < SMALL or not is_plain(value):
            return None
        found = self._done.get(id(value))
        if found is None:
            found = self._done[id(value)] = value, self._reference(value)
            return found[1]
        # a second time in one message: the first one is there already
        return (KNOWN, found[1][1]) if found[1] is not None and found[1][0] == NEW else found[1]


class ReferringUnpickler(pickle.Unpickler):
    """Makes the tensors that a `ReferringPickler` referred to."""

    def __init__(self, parts: Sequence[Any], received: Callable[..., Tensor]) -> None:
        super().__init__(io.BytesIO(parts[0]), buffers=parts[1:])
        self._received = received
        self._done: dict[Hashable, Tensor] = {}

    def persistent_load(self, reference: Referral) -> Tensor:
        kind, number, *_ = reference
        if kind == KNOWN and number in self._done:
            return self._done[number]
        found = self._received(*reference)
        if kind == NEW:
            self._done[number] = found
        return found


def is_plain(value: Tensor) -> bool:
    """Return True for a dense CPU tensor that counts its changes in place."""
    if value.device.type != "cpu" or value.layout is not torch.strided:
        return False
    return not value.is_inference() and not value.is_quantized


def packed(value: object, reference: Reference) -> PackedMessage:
    return PackedMessage(pack(value, partial(ReferringPickler, reference)))


def unpacked(message: PackedMessage, received: Callable[..., Tensor]) -> object:
    try:
        return ReferringUnpickler(message.parts, received).load()
    except Exception as error:
        raise Unsendable(f"it can't be unpickled: {type(error).__name__}: {error}") from error
