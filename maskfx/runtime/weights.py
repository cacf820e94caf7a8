"""Weights: detects that a module's weights changed since it was captured.

In-place changes show in a tensor's version, replaced or cast parameters in their identity, dtype
and address. A change through `.data` shows in none of them: pipelines compare three numbers of
every tensor before each run, and after changes of other numbers `CompiledDenoiser.refresh()` is to
be called.
"""

from __future__ import annotations

import enum
import hashlib
from collections.abc import Callable, Iterable, Mapping
from itertools import chain
from operator import attrgetter
from weakref import ref

import torch
from torch import Tensor, nn

from maskfx.runtime.offload import whole_hook


class WeightChange(enum.Enum):
    """How the weights changed since the last check."""

    NONE = enum.auto()
    VALUES = enum.auto()
    TENSORS = enum.auto()


PLAIN = (Tensor, nn.Parameter)
WORD, PARTS = 8, 64  # bytes that are summed as one number; sums of a tensor
Slot = tuple[Mapping[str, Tensor | None], str]
version_of = attrgetter("_version")


def named_slots(tables: Iterable[Mapping[str, Tensor | None]]) -> list[Slot]:
    return [(t, name) for t in tables for name, value in t.items() if value is not None]


def look_at(slots: Iterable[Slot]) -> list[int]:
    """Return the identities and addresses of the tensors that the slots hold now."""
    found = [table.get(name) for table, name in slots]
    kept = [value for value in found if value is not None]
    return [*map(id, found), *map(Tensor.data_ptr, kept)]


class Weights:
    """Detects changes of the parameters and buffers of one module.

    Args:
        module: the module.
        fingerprint: of the weights, if they are not in the module but in exported graphs.
    """

    def __init__(self, module: nn.Module, fingerprint: str | None = None) -> None:
        self.module, self._given = module, fingerprint
        self.restart()

    def restart(self) -> None:
        """Find the parameters and buffers that the module has now, and remember them."""
        parts = list(self.module.modules())
        self.parts = [part._modules for part in parts]
        self.tables = [part._parameters for part in parts]
        self.slots = named_slots(part._parameters for part in parts)
        self.buffers = named_slots(part._buffers for part in parts)
        self._print: str | None = None
        self._samples: list[list[Tensor]] | None = None  # views of a few numbers of each tensor
        self._sampled: list[bytes] | None = None  # these numbers before the last run
        # by id: the tensor's state, itself, its checksum
        self._sums: dict[int, tuple[object, Callable[[], object], bytes]] = {}
        self._remember()

    def change(self) -> WeightChange:
        """Return how the weights changed since the last call."""
        if self._look() != self._seen or self._look_at_buffers() != self._seen_buffers:
            if self._moved():
                self._remember()
                return WeightChange.NONE
            change = WeightChange.TENSORS
        else:
            change = WeightChange.NONE if self._count() == self._version else WeightChange.VALUES
        if change is not WeightChange.NONE:
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
        if self._identities() != self._seen_identities or self._count() != self._version:
            return False
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
        if self._look() != self._seen or self._look_at_buffers() != self._seen_buffers:
            self._samples = self._sampled = None
            return False
        samples = self._samples or samples_of(
            table.get(name) for table, name in (*self.slots, *self.buffers)
        )
        now = [as_bytes(torch.stack(few).view(torch.uint8)) for few in samples]
        before, self._sampled, self._samples = self._sampled, now, samples
        return before not in (None, now)

    def accept(self) -> None:
        """Accept the tensors' present addresses: the same numbers were moved."""
        self._remember()

    def settle(self) -> None:
        """Accept the buffers that the module's forward replaced; call it after the module ran.

        Such replacements are no change of weights.
        """
        if self._look_at_buffers() != self._seen_buffers:
            self._remember()

    # Every step runs these checks, so the loops over all weights are in C (map, chain).

    def _remember(self, other_tensors: bool = True) -> None:
        if other_tensors:
            self._samples = self._sampled = None
        self._seen, self._seen_buffers = self._look(), self._look_at_buffers()
        self._seen_identities, self._seen_places = self._identities(), self._places()
        found = [table.get(name) for table, name in (*self.slots, *self.buffers)]
        self._versioned = [v for v in found if v is not None and not v.is_inference()]
        self._version = self._count()

    def _count(self) -> int:
        return sum(map(version_of, self._versioned))

    def _look(self) -> list[int]:
        """Return the identity of every layer, and identity and address of every parameter."""
        layers = chain.from_iterable(map(dict.values, self.parts))
        return [
            *map(id, layers),
            *map(len, self.parts),
            *map(len, self.tables),
            *look_at(self.slots),
        ]

    def _identities(self) -> list[int]:
        """Return the identity of every layer and parameter."""
        layers = chain.from_iterable(map(dict.values, self.parts))
        return [*map(id, layers), *(id(table.get(name)) for table, name in self.slots)]

    def _places(self) -> list[object]:
        """Return device, dtype and shape of every parameter and buffer."""
        found = (table.get(name) for table, name in (*self.slots, *self.buffers))
        return [(v.device, v.dtype, v.shape) if v is not None else None for v in found]

    def _look_at_buffers(self) -> list[int]:
        return look_at(self.buffers)

    def fingerprint(self) -> str:
        """Return a hash of all weights; it identifies caches of other weights.

        Only tensors that changed since the last time are read again.
        """
        if self._given is not None:
            return self._given
        if self._print is None:
            seen, sums = hashlib.sha256(), dict[int, tuple[object, Callable[[], object], bytes]]()
            for table, name in (*self.slots, *self.buffers):
                value = table[name]
                if value is None or value.is_meta or not value.numel():
                    continue
                state = state_of(value)
                known = self._sums.get(id(value))
                if known is None or state is None or known[0] != state or known[1]() is not value:
                    known = state, ref(value), checksum(value)
                sums[id(value)] = known
                seen.update(known[2])
            self._print, self._sums = seen.hexdigest(), sums
        return self._print

    def forget(self) -> None:
        """Drop the fingerprint; call it after values changed in a way that isn't detected."""
        self._print = None
        self._sums.clear()


def samples_of(values: Iterable[Tensor | None]) -> list[list[Tensor]]:
    """Return three numbers of each tensor, as views, by device and type."""
    found: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for value in values:
        if value is None or type(value) not in PLAIN or value.is_meta or value.is_quantized:
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
    if value.is_inference():
        return None
    return value._version, value.data_ptr(), value.dtype, value.shape


def checksum(value: Tensor) -> bytes:
    """Return sums of all bytes of a tensor, eight bytes at a time, in parts of equal length."""
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
