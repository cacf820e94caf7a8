"""Movers: copy recorded steps between the host and a device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from maskfx.ir.argument_checks import check_type
from maskfx.runtime.cache.step_cache import StepCache, with_tensors


class Mover(Protocol):
    """Copies steps between the host and the device."""

    def to_device(self, cache: StepCache) -> StepCache: ...

    def to_host(self, cache: StepCache) -> StepCache: ...


@dataclass(frozen=True)
class HostMover:
    """Copies steps that were recorded on a device to the host; has no device tier."""

    def to_device(self, cache: StepCache) -> StepCache:
        return cache

    def to_host(self, cache: StepCache) -> StepCache:
        devices: set[torch.device] = set()

        def hosted(value: Tensor) -> Tensor:
            if value.device.type != "cpu":
                devices.add(value.device)
            return in_host_memory(value)

        moved = with_tensors(cache, hosted)
        for device in devices:
            wait(device)
        return moved if devices else cache


@dataclass(frozen=True)
class DeviceMover(HostMover):
    """Copies steps between the host and one device.

    Host copies are pinned if it is a CUDA device, so that copies back don't block the host.
    """

    device: torch.device

    def __post_init__(self) -> None:
        wanted = 'a torch.device, such as torch.device("cuda")'
        check_type("DeviceMover", "device", self.device, torch.device, wanted)

    def to_device(self, cache: StepCache) -> StepCache:
        moved = with_tensors(cache, lambda t: t.to(self.device, non_blocking=True))
        wait(self.device)
        return moved

    def to_host(self, cache: StepCache) -> StepCache:
        pinned = self.device.type == "cuda"
        moved = with_tensors(cache, _pinned if pinned else in_host_memory)
        wait(self.device)
        return moved


def in_host_memory(value: Tensor) -> Tensor:
    """Return the tensor in host memory; `wait` for its device before it is read."""
    return _pinned(value) if value.is_cuda else value.cpu()


def _pinned(value: Tensor) -> Tensor:
    if value.is_pinned():
        return value
    target = torch.empty_like(value, device="cpu", pin_memory=True)
    return target.copy_(value, non_blocking=True)


def wait(device: torch.device) -> None:
    """Wait until the device work that this thread queued is done; others may read it then."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()
