"""Tensors that two processes exchange once: later messages refer to them by number.

One end (`TensorSender`) numbers the tensors that it sends, and reports those that it no longer has;
the other (`TensorHolder`) holds them, and gives a later message the same objects, so that results
that were computed from them are still valid. A tensor that was changed in place is sent again. The
holder may number tensors of its own in an answer: when they are sent back, their numbers suffice.

A tensor of a device is copied to the host beside the message, with all others of it, and lies on
the device of the end that receives it.
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

from maskfx.ir.values import PLAIN_TENSORS, octets
from maskfx.runtime.cache.movers import in_host_memory, wait
from maskfx.runtime.hardware.devices import CPU, moved
from maskfx.runtime.hardware.queued_work import QueuedWork
from maskfx.runtime.processes.channel import Part
from maskfx.runtime.transport.tensor_transport import (
    SMALL,
    TensorPickler,
    Unsendable,
    contents,
    pack,
    rebuilt,
)

KNOWN, NEW, VIEW, ONCE = "known", "new", "view", "once"
Referral = tuple[Any, ...]  # one of these, a tensor's number, None for ONCE, and what makes it
Gone: TypeAlias = "weakref.finalize[[Hashable], Tensor]"


class PackedMessage:
    """A message within a message; its parts are sent without a copy.

    Args:
        parts: Its pickle and the buffers beside it.
        copies: The bytes of tensors of a device.
    """

    def __init__(self, parts: Sequence[Part], copies: Sequence[Part] = ()) -> None:
        self.parts, self.copies = list(parts), list(copies)

    def __reduce_ex__(self, protocol: SupportsIndex) -> tuple[type[PackedMessage], tuple[Any, ...]]:
        held = ([pickle.PickleBuffer(one) for one in own] for own in (self.parts, self.copies))
        return PackedMessage, tuple(held)

    @property
    def nbytes(self) -> int:
        return sum(memoryview(part).nbytes for part in (*self.parts, *self.copies))


class TensorSender:
    """The end that numbers tensors as it sends them; holds none of them.

    Args:
        device: Where tensors of the other end's device arrive.
    """

    def __init__(self, device: torch.device = CPU) -> None:
        self._device = device
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
        return unpacked(message, self._received, self._device)

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
            # not by storage offsets: a device may place views by their addresses alone
            offset = (value.data_ptr() - base.data_ptr()) // value.itemsize
            return VIEW, held[0], tuple(value.shape), value.stride(), offset
        number = next(self._count)
        self._note(value, number)
        self._fresh.append(value)
        return NEW, number

    def _received(self, kind: str, number: Hashable, *rest: Any) -> Tensor:
        if kind != NEW:
            raise pickle.UnpicklingError(f"an answer refers to tensor {number}")
        value: Tensor = rest[0]()
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
        device: Where tensors of the sender's device arrive.
    """

    def __init__(self, name: Hashable = 0, device: torch.device = CPU) -> None:
        self.held: dict[Hashable, Tensor] = {}
        self._name, self._count, self._device = name, itertools.count(), device

    def unpack(self, message: PackedMessage) -> Any:
        """Return the value of a message, or raise Unsendable."""
        return unpacked(message, self._received, self._device)

    def pack(self, value: object, kept: Collection[int] = ()) -> PackedMessage:
        """Return a value as a message; hold and number the tensors whose ids are in `kept`."""

        def reference(tensor: Tensor) -> Referral | None:
            if id(tensor) not in kept:
                return None
            number = (self._name, next(self._count))
            self.held[number] = tensor
            return NEW, number

        return packed(value, reference)

    def drop(self, numbers: Collection[Hashable]) -> None:
        """Release tensors; ignore unknown numbers."""
        for number in numbers:
            self.held.pop(number, None)

    def _received(self, kind: str, number: Hashable, *rest: Any) -> Tensor:
        if kind == NEW:
            self.held[number] = rest[0]()
            return self.held[number]
        found = self.held.get(number)
        if found is None:
            raise pickle.UnpicklingError(f"tensor {number} isn't in this process")
        if kind == KNOWN:
            return found
        shape, stride, offset = rest
        return found.as_strided(shape, stride, offset)


class HostCopies:
    """Copies of the tensors of one message that lie on a device."""

    def __init__(self) -> None:
        self._tensors: list[Tensor] = []
        self._devices: set[torch.device] = set()
        self._work = QueuedWork.of_thread()

    def add(self, value: Tensor) -> int:
        """Begin to copy a tensor; return the number of the copy."""
        work = self._work
        if work is not None and work.covers(value):
            with work.copying(value.device):
                self._tensors.append(in_host_memory(value.detach()))
        else:
            self._devices.add(value.device)
            self._tensors.append(in_host_memory(value.detach()))
        return len(self._tensors) - 1

    def parts(self) -> list[Part]:
        """Return the bytes of the copies when all are complete."""
        if self._work is not None:
            self._work.wait()
        for device in self._devices:
            wait(device)
        flat: list[Any] = [octets(copy).numpy() for copy in self._tensors]
        return [memoryview(one) for one in flat]


Reference = Callable[[Tensor], Referral | None]


class ReferringPickler(TensorPickler):
    """Pickles tensors by what `reference` returns for them, if it isn't None.

    Small ones of the host are pickled as they are; those of a device are added to `copies`.
    """

    def __init__(
        self, reference: Reference, copies: HostCopies, stream: io.BytesIO, **options: Any
    ) -> None:
        super().__init__(stream, **options)
        self._reference, self._copies = reference, copies
        self._done: dict[int, tuple[Tensor, Referral | None]] = {}

    def persistent_id(self, value: object) -> object:
        if not isinstance(value, Tensor):
            return None
        away = is_away(value)
        small = value.nbytes < SMALL or not counts_changes(value)
        if not away and (small or type(value) is not Tensor or not is_plain(value)):
            return None
        found = self._done.get(id(value))
        if found is None:
            referral = None if small else self._reference(value)
            if away and referral is None:
                referral = ONCE, None
            if referral is not None and referral[0] in (NEW, ONCE):
                referral = *referral, *self._contents(value)
            self._done[id(value)] = value, referral
            return referral
        # a second time in one message: the first one is there already
        return (KNOWN, found[1][1]) if found[1] is not None and found[1][0] == NEW else found[1]

    def _contents(self, value: Tensor) -> tuple[object, ...]:
        """Return the bytes of a tensor, or its place among the copies, with its type and shape."""
        if not is_away(value):
            return contents(value)
        return self._copies.add(value), value.dtype, tuple(value.shape)


class ReferringUnpickler(pickle.Unpickler):
    """Makes the tensors that a `ReferringPickler` referred to."""

    def __init__(
        self, message: PackedMessage, received: Callable[..., Tensor], device: torch.device
    ) -> None:
        super().__init__(io.BytesIO(message.parts[0]), buffers=message.parts[1:])
        self._received, self._copies, self._device = received, message.copies, device
        self._done: dict[Hashable, Tensor] = {}

    def persistent_load(self, reference: Referral) -> Tensor:
        kind, number, *rest = reference
        if kind == ONCE:
            number = ONCE, rest[0]
        if kind in (KNOWN, ONCE) and number in self._done:
            return self._done[number]
        if kind == ONCE:
            self._done[number] = self._made(*rest)
            return self._done[number]
        if kind == NEW:
            rest = [partial(self._made, *rest)]
        found = self._received(kind, number, *rest)
        if kind == NEW:
            self._done[number] = found
        return found

    def _made(self, held: Any, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
        if not isinstance(held, int):
            return rebuilt(held, dtype, shape)
        return moved(rebuilt(self._copies[held], dtype, shape), self._device)


def is_plain(value: Tensor) -> bool:
    """Return True for a dense CPU tensor that counts its changes in place."""
    if value.device.type != "cpu" or value.layout is not torch.strided:
        return False
    return counts_changes(value)


def is_away(value: Tensor) -> bool:
    """Return True for a dense tensor of numbers on a device that isn't the CPU."""
    if value.device.type in ("cpu", "meta") or value.layout is not torch.strided:
        return False
    return type(value) in PLAIN_TENSORS and not value.is_quantized


def counts_changes(value: Tensor) -> bool:
    return not value.is_inference() and not value.is_quantized


def packed(value: object, reference: Reference) -> PackedMessage:
    copies = HostCopies()
    parts = pack(value, partial(ReferringPickler, reference, copies))
    return PackedMessage(parts, copies.parts())


def unpacked(
    message: PackedMessage, received: Callable[..., Tensor], device: torch.device
) -> object:
    try:
        return ReferringUnpickler(message, received, device).load()
    except Exception as error:
        raise Unsendable(f"it can't be unpickled: {type(error).__name__}: {error}") from error
