"""Residual blocks and text encoders of diffusers and transformers that train quicker on CPUs.

The numbers stay those that they give in inference; blocks without dropout have no others.
"""

from __future__ import annotations

from typing import Any

from diffusers.models.resnet import ResnetBlock2D
from torch import nn


def quicken_residuals(module: nn.Module) -> None:
    """Let residual blocks keep their inputs as they lie in memory.

    In training mode diffusers copies the inputs of their shortcuts out of channels-last, for the
    sake of distributed training; then sums of both layouts are slow too.
    """
    for block in module.modules():
        if isinstance(block, ResnetBlock2D):
            if block.dropout.p:
                raise ValueError("a residual block with dropout must know that it is trained")
            block.eval()
            block.__dict__["train"] = _staying(block)


def _staying(block: nn.Module) -> Any:
    def train(mode: bool = True) -> nn.Module:
        return block

    return train


def quicken_text(encoder: Any) -> None:
    """Plain products instead of the fused attention, whose backward pass is slow for few words."""
    encoder.set_attn_implementation("eager")
