"""Which denoisers ranks can't compute."""

from __future__ import annotations

from maskfx.runtime.denoiser import CompiledDenoiser


def why_unsupported(denoiser: CompiledDenoiser) -> str | None:
    """Return why ranks can't compute a denoiser, and what to do; None if they can."""
    if type(denoiser) is not CompiledDenoiser:
        return (
            "has exported graphs, which run in one process: use the module that they were "
            "exported from, or leave ranks out"
        )
    devices = {weight.device for weight in denoiser.module.parameters()}
    if other := sorted(str(device) for device in devices if device.type not in ("cpu", "meta")):
        return (
            f"is on {', '.join(other)}, and ranks compute on the CPU: move it there, or leave "
            "ranks out"
        )
    return None
