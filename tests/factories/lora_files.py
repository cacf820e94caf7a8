"""LoRA files for tiny pipelines, and stores that are slow, hang or fail."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from maskfx.runtime.lora.layers import KINDS


def is_query(layer: str) -> bool:
    return layer.endswith(".to_q")


def lora_tensors(
    part: str,
    module: nn.Module,
    *,
    seed: int = 0,
    rank: int = 2,
    scale: float = 1.0,
    chosen: Callable[[str], bool] = is_query,
) -> dict[str, Tensor]:
    """Updates of a module's chosen layers, under peft's names."""
    draw = torch.Generator().manual_seed(seed)
    found = {}
    for layer, own in module.named_modules():
        if isinstance(own, KINDS) and chosen(layer):
            shape = own.weight.shape
            down = torch.randn(rank, *shape[1:], generator=draw)
            up = scale * torch.randn(shape[0], rank, *[1] * (len(shape) - 2), generator=draw)
            found[f"{part}.{layer}.lora_A.weight"] = down
            found[f"{part}.{layer}.lora_B.weight"] = up
    assert found, "no layer was chosen"
    return found


def save_lora(path: Path, pipe: Any, **more: Any) -> Path:
    """Write a LoRA of a pipeline's denoiser."""
    part = "unet" if getattr(pipe, "unet", None) is not None else "transformer"
    save_file(lora_tensors(part, getattr(pipe, part), **more), path)
    return path


# Read functions of loading processes; `STORE` is how they behave.

STORE = "MASKFX_TEST_STORE"


def throttled(path: str) -> bytes:
    """Read after a number of seconds."""
    time.sleep(float(os.environ.get(STORE, "0")))
    return Path(path).read_bytes()


def hanging(path: str) -> bytes:
    time.sleep(3600)
    return b""


def gated(path: str) -> bytes:
    """Read once a file `<path>.open` exists; count the reads in `<path>.reads`."""
    with open(f"{path}.reads", "a") as log:
        log.write("x")
    while not os.path.exists(f"{path}.open"):
        time.sleep(0.01)
    return Path(path).read_bytes()


def dying_once(path: str) -> bytes:
    """End the process at the first read of a file."""
    marker = Path(f"{path}.died")
    if not marker.exists():
        marker.touch()
        os._exit(9)
    return Path(path).read_bytes()


def dying(path: str) -> bytes:
    os._exit(9)


def unreliable(path: str) -> bytes:
    """Hang, end the process, fail or read, by the name of the file."""
    name = Path(path).name
    if name.startswith("hangs"):
        time.sleep(3600)
    if name.startswith("ends"):
        os._exit(9)
    if name.startswith("fails"):
        raise OSError(5, "the store failed")
    return Path(path).read_bytes()
