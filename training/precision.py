"""In which numbers a training computes: 16 bits where the machine multiplies them itself."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch


def quick_numbers(device: torch.device) -> AbstractContextManager[object]:
    """Autocast to bfloat16, save on CPUs without its instructions: there it is ten times slower."""
    if device.type == "cpu" and not (
        torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    ):
        return nullcontext()
    return torch.autocast(device.type, torch.bfloat16)
