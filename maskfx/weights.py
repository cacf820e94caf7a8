"""Weights: noticing that a module's weights changed since it was captured.

In-place changes show in a tensor's version, replaced or cast parameters in their identity, dtype
and address. A change through `.data` leaves no trace: `CompiledDenoiser.refresh()` tells of it.
"""

from __future__ import annotations

import enum
import hashlib
from collections.abc import Mapping

import torch
from torch import Tensor, nn


class Change(enum.Enum):
    """What happened to the weights since the last look."""

    NONE = enum.auto()
    VALUES = enum.auto()
    TENSORS = enum.auto()


class Weights:
    """Watches the parameters and buffers of one module."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.slots: list[tuple[Mapping[str, Tensor | None], str]] = []
        for part in module.modules():
            for table in (part._parameters, part._buffers):
                self.slots += [(table, name) for name, value in table.items() if value is not None]
        self.parts = [part._modules for part in module.modules()]
        self.tables = [part._parameters for part in module.modules()]
        self._identity, self._version = self._look()
        self._print: str | None = None

    def _look(self) -> tuple[list[tuple[int, int]], int]:
        identity, version = [], 0
        for parts in self.parts:
            identity += [(id(part), len(parts)) for part in parts.values()]
        identity.append((sum(map(len, self.tables)), 0))
        for table, name in self.slots:
            value = table.get(name)
            if value is None:
                identity.append((0, 0))
                continue
            identity.append((id(value), 0 if value.is_meta else value.data_ptr()))
            version += 0 if value.is_inference() else value._version
        return identity, version

    def change(self) -> Change:
        """What changed since the last call."""
        identity, version = self._look()
        same = identity == self._identity
        still = version == self._version
        self._identity, self._version = identity, version
        if same and still:
            return Change.NONE
        self._print = None
        return Change.VALUES if same else Change.TENSORS

    def settle(self) -> None:
        """The module itself ran: buffers that its forward replaces are no change of weights."""
        identity, version = self._look()
        if identity != self._identity:
            self._identity, self._version = identity, version

    def fingerprint(self) -> str:
        """A few numbers of every weight: caches of other weights are told apart by it."""
        if self._print is None:
            seen = hashlib.sha256()
            for table, name in self.slots:
                value = table[name]
                if value is None or value.is_meta or not value.numel():
                    continue
                places = torch.tensor([0, value.numel() // 2, value.numel() - 1])
                few = value.detach().reshape(-1)[places.to(value.device)].double().cpu()
                seen.update(few.numpy().tobytes())
            self._print = seen.hexdigest()
        return self._print

    def forget(self) -> None:
        """The values changed without a trace."""
        self._print = None
