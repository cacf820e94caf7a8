"""Which denoisers ranks can't compute."""

from __future__ import annotations

import torch

from maskfx.runtime.denoiser import CompiledDenoiser
from maskfx.runtime.hardware.devices import CPU
from maskfx.runtime.hardware.offload import device_of


def why_unsupported(denoiser: CompiledDenoiser) -> str | None:
    """Return why ranks can't compute a denoiser, and what to do; None if they can."""
    if type(denoiser) is not CompiledDenoiser:
        return (
            "has exported graphs, which run in one process: use the module that they were "
            "exported from, or leave ranks out"
        )
    devices = {weight.device for weight in denoiser.module.parameters() if not weight.is_meta}
    if len(devices) > 1:
        return (
            f"has weights on {', '.join(sorted(map(str, devices)))}, and a rank computes on one "
            "device: move them to one, or leave ranks out"
        )
    if denoiser.settings.inductor and devices - {CPU}:
        return (
            f"is compiled by Inductor on {devices.pop()}, and ranks run its code on CPUs only: "
            "compile without inductor=True, or leave ranks out"
        )
    there = device_of(denoiser.module)
    if there.type != own_device(denoiser).type:
        return (
            f"is offloaded: its weights are moved to {there} for a step, and ranks hold theirs "
            "where they compute; move it there without offloading, or leave ranks out"
        )
    return None


def own_device(denoiser: CompiledDenoiser) -> torch.device:
    """Return the device that a denoiser's weights lie on."""
    weights = denoiser.module.parameters()
    return next((weight.device for weight in weights if not weight.is_meta), CPU)
