"""Weights: detects that a module's weights changed since it was captured.

In-place changes show in a tensor's version, replaced or cast parameters in their identity, dtype
and address; those that the module's own run widens and narrows again lie elsewhere afterwards. A
change through `.data` shows in none of them: pipelines compare three numbers of every tensor before
each run, and after changes of other numbers `CompiledDenoiser.refresh()` is to be called.
"""

from __future__ import annotations

import enum
import hashlib
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from operator import attrgetter, is_
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn

from maskfx.ir.modules.part_hooks import widened_type
from maskfx.ir.values import PLAIN_TENSORS, parts_of
from maskfx.runtime.hardware.offload import numbers_elsewhere, whole_hook


class WeightChange(enum.Enum):
    """How the weights changed since the last check."""

    NONE = enum.auto()
    MOVED = enum.auto()  # the same numbers lie elsewhere
    VALUES = enum.auto()
    TENSORS = enum.auto()

    @property
    def same_numbers(self) -> bool:
        """Whether the weights have the numbers that they had."""
        return self in (WeightChange.NONE, WeightChange.MOVED)


WORD, PARTS = 8, 64  # bytes that are summed as one number; sums of a tensor
version_of = attrgetter("_version")

# Every step runs these checks, so the loops over all layers and weights are in C (map, chain).


class Contents:
    """What the layers of a module hold, compared with what they held before.

    Args:
        tables: A dictionary of each layer: its parts, its parameters or its buffers.
        cast: Ids of tensors that a run of the module widens and narrows again, which moves them.
    """

    def __init__(self, tables: Sequence[dict[str, Any]], cast: Collection[int] = ()) -> None:
        self._tables = tables
        self.values = self.now()
        self.tensors = [value for value in self.values if isinstance(value, Tensor)]
        self.still = [value for value in self.tensors if id(value) not in cast]
        self.cast = [value for value in self.tensors if id(value) in cast]
        self._addresses, self._cast_addresses = addresses(self.still), addresses(self.cast)

    @property
    def same_objects(self) -> bool:
        """Whether the layers hold the objects that they held."""
        now = self.now()
        return len(now) == len(self.values) and all(map(is_, now, self.values))

    @property
    def same(self) -> bool:
        """Whether the objects are the same, and tensors lie where they lay; not so those cast."""
        return self.same_objects and addresses(self.still) == self._addresses

    @property
    def was_cast(self) -> bool:
        """Whether tensors were widened and narrowed again."""
        return addresses(self.cast) != self._cast_addresses

    def now(self) -> list[Any]:
        """Return the objects that the layers hold now."""
        return list(chain.from_iterable(map(dict.values, self._tables)))


def addresses(tensors: Iterable[Tensor]) -> list[int]:
    return list(map(Tensor.data_ptr, tensors))


class Weights:
    """Detects changes of the parameters and buffers of one module.

    Args:
        module: the module.
        fingerprint: of the weights, if they are not in the module but in exported graphs.
    """

    def __init__(self, module: nn.Module, fingerprint: str | None = None) -> None:
        self.module, self._given = module, fingerprint
        self._writing, self._written = threading.RLock(), False
        self.runs = 0  # of the module itself in steps
        self.numbers: Callable[[], str] = str  # of its settings, that graphs read; see `recorded`
        self.restart()

    def restart(self) -> None:
        """Find the parameters and buffers that the module has now, and remember them."""
        layers = list(self.module.modules())
        self._parts = [layer._modules for layer in layers]
        self._tables = [layer._parameters for layer in layers]
        self._buffer_tables = [layer._buffers for layer in layers]
        cast = [layer for layer in layers if widened_type(layer) is not None]
        inner = [layer for part in cast for layer in part.modules()]
        tables = [held for layer in inner for held in (layer._parameters, layer._buffers)]
        self._cast = {id(value) for held in tables for value in held.values()}
        self._print: str | None = None
        self._samples: list[list[Tensor]] | None = None  # views of a few numbers of each tensor
        self._sampled: list[bytes] | None = None  # these numbers before the last run
        # by id: the tensor's state, itself, its checksum
        self._sums: dict[int, tuple[object, Callable[[], object], bytes]] = {}
        self._remember()

    def change(self) -> WeightChange:
        """Return how the weights changed since the last call; writes of `writing` end first."""
        with self._writing:
            return self._change()

    def _change(self) -> WeightChange:
        if not self._same:
            if self._moved():
                self._remember()
                return WeightChange.MOVED
            change = WeightChange.TENSORS
        elif self._count() != self._version:
            change = WeightChange.VALUES
        elif self._parameters.was_cast or self._buffers.was_cast:
            self._remember(False)
            return WeightChange.MOVED
        else:
            return WeightChange.NONE
        self._remember(change is WeightChange.TENSORS)
        self._print = None
        return change

    def _moved(self) -> bool:
        """Return True if a hook moved the same weights to the host and back.

        Layers and parameters are the same objects then, and all tensors are on the same device as
        before, with the same numbers.
        """
        if whole_hook(self.module) is None or self._print is None:
            return False
        if self._places() != self._seen_places:
            return False
        if not (self._layers.same_objects and self._parameters.same_objects):
            return False
        if self._count() != self._version:
            return False
        if self._written:  # the numbers of the fingerprint are elsewhere meanwhile
            return True
        known, self._print = self._print, None
        if self.fingerprint() == known:
            return True
        self._print = known
        return False

    def overwritten(self) -> bool:
        """Return True if one of a few numbers of each tensor has changed since the last call.

        Tensors that were replaced or moved meanwhile are for `change` to report.
        """
        if whole_hook(self.module) is not None:  # its weights move, and samples hold their memory
            return False
        with self._writing:
            return not self._written and self._overwritten()

    def _overwritten(self) -> bool:
        if not self._same:
            self._samples = self._sampled = None
            return False
        samples = self._samples or samples_of([*self._parameters.still, *self._buffers.still])
        cast = samples_of([*self._parameters.cast, *self._buffers.cast])  # views would hold memory
        now = [as_bytes(torch.stack(few).view(torch.uint8)) for few in (*samples, *cast)]
        before, self._sampled, self._samples = self._sampled, now, samples
        return before not in (None, now)

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Write other numbers into the weights within the context, which is no change of them.

        Until they are restored in the same way, the fingerprint is that of the numbers before.
        """
        with self._writing:
            self._written = not self._written
            yield
            self._version = self._count()

    def accept(self) -> None:
        """Accept the tensors' present addresses: the same numbers were moved."""
        self._remember()

    def settle(self, ran: bool = False) -> None:
        """Accept the buffers that the module's forward replaced; call it after the module ran.

        Such replacements are no change of weights. With `ran` the run is counted.
        """
        self.runs += ran
        if not self._buffers.same:
            self._remember()

    def _remember(self, other_tensors: bool = True) -> None:
        if other_tensors:
            self._samples = self._sampled = None
        self._layers = Contents(self._parts)
        self._parameters = Contents(self._tables, self._cast)
        self._buffers = Contents(self._buffer_tables, self._cast)
        self._seen_places = self._places()
        self._versioned = [value for value in self._tensors if not value.is_inference()]
        self._version = self._count()

    @property
    def _same(self) -> bool:
        return self._layers.same_objects and self._parameters.same and self._buffers.same

    @property
    def _tensors(self) -> list[Tensor]:
        return [*self._parameters.tensors, *self._buffers.tensors]

    def _count(self) -> int:
        return sum(map(version_of, self._versioned))

    def _places(self) -> list[object]:
        """Return device, dtype and shape of every parameter and buffer."""
        now = [*self._parameters.now(), *self._buffers.now()]
        return [(v.device, v.dtype, v.shape) if v is not None else None for v in now]

    def fingerprint(self) -> str:
        """Return a hash of all weights; it identifies caches of other weights.

        Only tensors that changed since the last time are read again.
        """
        if self._given is not None:
            return self._given
        with self._writing:  # weights that are written meanwhile would be read in part
            if self._print is None:
                self._print = self._computed()
            return self._print

    def recorded(self) -> str:
        """Return what recordings carry: the fingerprint, and numbers of settings that graphs read.

        Other numbers of the settings are constants of a graph.
        """
        return self.fingerprint() + self.numbers()

    def _computed(self) -> str:
        seen, sums = hashlib.sha256(), dict[int, tuple[object, Callable[[], object], bytes]]()
        elsewhere = numbers_elsewhere(self.module)
        for held in (*self._parameters.now(), *self._buffers.now()):
            value = elsewhere[id(held)]() if id(held) in elsewhere else held
            if value is None or value.is_meta or not value.numel():
                continue
            state = state_of(value)
            known = self._sums.get(id(value))
            if known is None or state is None or known[0] != state or known[1]() is not value:
                known = state, ref(value), checksum(value)
            sums[id(value)] = known
            seen.update(known[2])
        self._sums = sums
        return seen.hexdigest()

    def forget(self) -> None:
        """Drop the fingerprint; call it after values changed in a way that isn't detected."""
        self._print = None
        self._sums.clear()


def samples_of(values: Iterable[Tensor]) -> list[list[Tensor]]:
    """Return three numbers of each tensor, as views, by device and type."""
    found: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for value in values:
        if type(value) not in PLAIN_TENSORS or value.is_meta or value.is_quantized:
            continue
        if not value.numel() or not value.is_contiguous():
            continue
        flat = value.detach().view(-1)
        last = value.numel() - 1
        few = found.setdefault((value.device, value.dtype), [])
        few += [flat[place] for place in sorted({0, last // 2, last})]
    return list(found.values())


def state_of(value: Tensor) -> object:
    """Return what changes whenever a tensor's numbers do; None if nothing does."""
    held = parts_of(value).values()
    if any(one.is_inference() for one in held):
        return None
    return [(one._version, one.data_ptr(), one.dtype, one.shape) for one in held]


def checksum(value: Tensor) -> bytes:
    """Return sums of all bytes of a tensor, eight bytes at a time, in parts of equal length."""
    return b"".join(map(checksum_of_plain, parts_of(value).values()))


def checksum_of_plain(value: Tensor) -> bytes:
    value = value.int_repr() if value.is_quantized else value
    try:
        octets = value.detach().reshape(-1).view(torch.uint8)
        if octets.storage_offset() % WORD:
            octets = octets.clone()
        length = len(octets) // (WORD * PARTS) * WORD * PARTS
        sums = octets[:length].view(torch.int64).view(PARTS, -1).sum(1)
        return as_bytes(sums) + as_bytes(octets[length:])
    except (RuntimeError, NotImplementedError, TypeError):  # not an array of plain numbers
        places = torch.tensor([0, value.numel() // 2, value.numel() - 1])
        return as_bytes(value.detach().reshape(-1)[places.to(value.device)].double())


def as_bytes(value: Tensor) -> bytes:
    found: bytes = value.cpu().numpy().tobytes()
    return found
