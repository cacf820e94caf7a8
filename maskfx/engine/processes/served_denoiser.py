"""ServedDenoiser: the process's side of a `StepProcess`; computes the steps of one denoiser.

Adapters that all members of a step share are written into the weights where that takes less time,
as in the engine's process: this one gets copies of its own of the weights that change.

On a device, recordings are in host memory, as templates are by default, and those that were read
last also on the device.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import cast

import torch
from torch import Tensor, nn

from maskfx.config import Settings
from maskfx.runtime.cache.movers import DeviceMover, HostMover
from maskfx.runtime.cache.step_cache import StepCache, has_unread, with_tensors
from maskfx.runtime.denoiser import CompiledDenoiser
from maskfx.runtime.hardware.devices import CPU, free_memory
from maskfx.runtime.hardware.offload import device_of
from maskfx.runtime.lora.adapter import Layers
from maskfx.runtime.lora.in_place_costs import Elsewhere
from maskfx.runtime.lora.sent import received_layers
from maskfx.runtime.step_executor import compute_steps
from maskfx.runtime.steps import AnyStep, EditStep, RecordStep
from maskfx.runtime.transport.sendable import bare
from maskfx.runtime.transport.sent_cache import received
from maskfx.runtime.transport.shared_tensors import PackedMessage, TensorHolder


@dataclass(frozen=True)
class Computed:
    """The results of a step, and what was chosen so far for adapters that members share."""

    results: PackedMessage
    in_place: Elsewhere


@dataclass
class Dropped:
    """Numbers of recordings and adapters, and of tensors, that are not sent any more."""

    contents: Sequence[int]
    tensors: Sequence[Hashable]


class ServedDenoiser:
    """A denoiser in its process; pickled as its module and settings, and compiled there.

    Args:
        module: The denoiser's module.
        settings: How it is compiled.
        name: Distinguishes its tensors' numbers from those of earlier processes.
    """

    def __init__(self, module: nn.Module, settings: Settings, name: int = 0) -> None:
        self.denoiser, self.name = CompiledDenoiser(module, settings), name
        self.device = device_of(module)
        self.caches: dict[int, StepCache] = {}
        self.near = CachesOnDevice(self.device)
        self.layers: dict[int, Layers] = {}
        self.tensors = TensorHolder(name, self.device)
        self.denoiser.in_place.private = True

    def __reduce__(self) -> tuple[type[ServedDenoiser], tuple[object, Settings, int]]:
        return ServedDenoiser, (
            bare(self.denoiser.module, hooks=False),
            self.denoiser.settings,
            self.name,
        )

    def compute(
        self, message: PackedMessage, dropped: Dropped, shared: tuple[int, int] = (0, 0)
    ) -> Computed:
        """Compute steps; return results whose edits are the computed rows only.

        The rows of recordings stay here, because edits of them follow.

        Args:
            message: The steps.
            dropped: What isn't sent any more.
            shared: Where all members have the same adapters, and recordings with these, the sites
                that they compute, and the steps that are left with these adapters.
        """
        for number in dropped.contents:
            self.near.drop(self.caches.pop(number, None))
            self.layers.pop(number, None)
        self.tensors.drop(dropped.tensors)
        sent: Sequence[AnyStep] = self.tensors.unpack(message)
        steps = [
            replace(step, adapters=received_layers(step.adapters, self.layers)) for step in sent
        ]
        steps = [self._read(received(step, self.caches)) for step in steps]
        in_place = self.denoiser.in_place
        with in_place.step(steps[0].adapters if shared[1] else (), len(steps), *shared) as written:
            results = compute_steps(self.denoiser, steps)
        recorded: set[int] = set()
        for place, step in enumerate(steps):
            if isinstance(step, RecordStep):
                output, cache = cast(tuple[object, StepCache], results[place])
                kept = self.near.mover.to_host(cache)
                results[place] = output, kept
                recorded |= tensor_ids(kept)
        programs = self.denoiser.settings.programs
        if programs is not None and self.device != CPU:  # none that were made on this device
            self.denoiser.save_programs(Path(programs))
        chosen = Elsewhere(in_place.costs, in_place.refused, written)
        return Computed(self.tensors.pack(list(results), recorded), chosen)

    def _read(self, step: AnyStep) -> AnyStep:
        """Return a step as it is computed: an edit reads its recording, and returns its rows."""
        if not isinstance(step, EditStep):
            return step
        return replace(step, cache=self.near.of(step.cache), rows=True)


class CachesOnDevice:
    """Copies of recordings on a device: those that were read last.

    They take a quarter of the memory that is free there when the first one is copied.
    """

    def __init__(self, device: torch.device) -> None:
        self.mover = HostMover() if device == CPU else DeviceMover(device)
        self._device, self._limit = device, -1.0
        # by the recording's id: the recording, and its copy; the least recently used first
        self._copies: dict[int, tuple[StepCache, StepCache]] = {}

    def of(self, cache: StepCache) -> StepCache:
        """Return a recording's copy; on the CPU, or if it has no room, the recording itself."""
        if self._device == CPU or has_unread(cache):
            return cache
        found = self._copies.pop(id(cache), None)
        if found is None:
            if not self._has_room(cache.nbytes()):
                return cache
            found = cache, self.mover.to_device(cache)
        self._copies[id(cache)] = found
        return found[1]

    def drop(self, cache: StepCache | None) -> None:
        """Free the copy of a recording that isn't read any more."""
        self._copies.pop(id(cache), None)

    def _has_room(self, nbytes: int) -> bool:
        """Free copies until one of these bytes has room; return False if it never has."""
        if self._limit < 0:
            self._limit = free_memory(self._device) / 4
        if nbytes > self._limit:
            return False
        while nbytes + sum(held.nbytes() for held, _ in self._copies.values()) > self._limit:
            del self._copies[next(iter(self._copies))]
        return True


def tensor_ids(cache: StepCache) -> set[int]:
    """Return the ids of a recording's tensors."""
    found: set[int] = set()

    def note(value: Tensor) -> Tensor:
        found.add(id(value))
        return value

    with_tensors(cache, note)
    return found
