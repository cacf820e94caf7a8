"""Ranks: how many processes share a step, where each computes, and what they exchange with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from maskfx.distributed.exchanges.world import BACKENDS, NCCL, RINGS
from maskfx.errors import InputError
from maskfx.ir.argument_checks import check_whole
from maskfx.runtime.hardware.devices import CPU, device_named, visible_devices


@dataclass(frozen=True)
class RankPlaces:
    """Where the ranks of one denoiser compute.

    Args:
        own: The device of the denoiser in the process that asks the ranks.
        devices: That of each rank.
        backend: What they exchange with.
    """

    own: torch.device
    devices: tuple[torch.device, ...]
    backend: str


@dataclass(frozen=True)
class Ranks:
    """Processes that share the steps of each denoiser.

    Args:
        count: Their number; by default that of `devices`.
        devices: Where each computes, such as ("cuda:0", "cuda:1"); several may name the same one.
            By default the denoiser's device, and then the others of its type in their order; on a
            CPU all compute there.
        backend: What they exchange with: "nccl" between CUDA devices, of which each rank has one of
            its own; "rings" in memory that they share; or "gloo" of torch.distributed. Tensors of
            devices pass through host memory in the latter two. By default NCCL where it serves,
            else rings; gloo takes the place of rings where there is no C compiler.
    """

    count: int = 0
    devices: Sequence[str | torch.device] = ()
    backend: str | None = None

    def __post_init__(self) -> None:
        given = self.devices
        if isinstance(given, str | torch.device) or not isinstance(given, Sequence):
            raise InputError(
                f'Ranks: devices={given!r:.80}: give a list, such as ["cuda:0", "cuda:1"]'
            )
        object.__setattr__(self, "devices", tuple(device_named("Ranks", one) for one in given))
        if not given or self.count:
            check_whole("Ranks", "count", self.count, 1)
        elif not self.count:
            object.__setattr__(self, "count", len(given))
        if given and self.count != len(given):
            raise InputError(
                f"Ranks: count={self.count} with {len(given)} devices: name a device for each "
                "rank, where several may name the same one, or leave count out"
            )
        if self.backend is not None and self.backend not in BACKENDS:
            raise InputError(
                f"Ranks: backend={self.backend!r:.40}: give one of {', '.join(BACKENDS)}, or None"
            )

    @classmethod
    def of(cls, given: int | Ranks) -> Ranks:
        """Return settings that may be given as a number alone."""
        if not isinstance(given, Ranks):
            check_whole("Ranks", "count", given, 1)
            return cls(given)
        return given

    def placed(self, own: torch.device) -> RankPlaces:
        """Return where the ranks of a denoiser on a device compute; raise InputError if nowhere."""
        devices = tuple(map(torch.device, self.devices)) or self._default(own)
        wrong = sorted({str(one) for one in devices if one.type != own.type})
        if wrong:
            raise InputError(
                f"Ranks: devices={', '.join(wrong)} for a denoiser on {own}: name devices of its "
                "type, or move it"
            )
        return RankPlaces(own, devices, self._backend(devices))

    def _default(self, own: torch.device) -> tuple[torch.device, ...]:
        if own.type == "cpu":
            return (CPU,) * self.count
        there = visible_devices(own.type)
        if self.count > len(there):
            raise InputError(
                f"Ranks: {self.count} ranks, and {len(there)} devices of type {own.type} are "
                f"visible: give count={len(there)}, or name the device of each rank, where "
                f'several may name the same one, such as devices=["{own}"] * {self.count}'
            )
        return (own, *(one for one in there if one != own))[: self.count]

    def _backend(self, devices: Sequence[torch.device]) -> str:
        why = ""
        if {device.type for device in devices} != {"cuda"}:
            why = "it connects CUDA devices only"
        elif len(set(devices)) < len(devices):
            why = "each rank needs a device of its own for it"
        elif not dist.is_nccl_available():
            why = "this build of PyTorch lacks it"
        if self.backend == NCCL and why:
            raise InputError(f'Ranks: backend="nccl": {why}; give "rings" or "gloo", or None')
        return self.backend or (RINGS if why else NCCL)
