"""Copying recorded steps between the host and a device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from maskfx.runtime.cache import StepCache, with_tensors


class Mover(Protocol):
    """Copies steps between the host and the device."""

    def to_device(self, cache: StepCache) -> StepCache: ...

    def to_host(self, cache: StepCache) -> StepCache: ...


@dataclass(frozen=True)
class HostMover:
    """No device: everything is where it should be."""

    def to_device(self, cache: StepCache) -> StepCache:
        return cache

    def to_host(self, cache: StepCache) -> StepCache:
        return cache


@dataclass(frozen=True)
class CudaMover:
    """One CUDA device; host copies are pinned, so that they move without a stop in between."""

    device: torch.device

    def to_device(self, cache: StepCache) -> StepCache:
        moved = with_tensors(cache, lambda t: t.to(self.device, non_blocking=True))
        torch.cuda.current_stream(self.device).synchronize()
        return moved

    def to_host(self, cache: StepCache) -> StepCache:
        moved = with_tensors(cache, _pinned)
        torch.cuda.current_stream(self.device).synchronize()
        return moved


def _pinned(value: Tensor) -> Tensor:
    if value.is_pinned():
        return value
    target = torch.empty_like(value, device="cpu", pin_memory=True)
    return target.copy_(value, non_blocking=True)
