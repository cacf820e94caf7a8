"""Weights that are elsewhere until their part runs: on the host beside placeholders, or on disk."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import accelerate  # type: ignore[import-untyped,unused-ignore]
import pytest
import torch
from diffusers.hooks.group_offloading import apply_group_offloading
from torch import nn

from maskfx.runtime.weights import Weights
from tests.factories import emulated

DEVICE = torch.device(emulated.NAME, 0)
Offload = Callable[[nn.Module, Path], None]


def made(factor: float = 1.0) -> nn.Module:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(4, 8), nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 4)))
    module.register_buffer("table", torch.randn(9))
    module.requires_grad_(False)
    for parameter in module.parameters():
        parameter.mul_(factor)
    return module


def to_host(module: nn.Module, folder: Path) -> None:
    accelerate.cpu_offload(module, DEVICE, offload_buffers=True)


def with_inner_parts_to_host(module: nn.Module, folder: Path) -> None:
    accelerate.cpu_offload(module, DEVICE, preload_module_classes=["Sequential"])


def to_disk(module: nn.Module, folder: Path) -> None:
    apply_group_offloading(
        module, torch.device("cpu"), offload_type="leaf_level", offload_to_disk_path=str(folder)
    )


@pytest.mark.parametrize("offload", [to_host, with_inner_parts_to_host, to_disk])
def test_offloaded_weights_have_the_fingerprint_of_their_numbers(
    offload: Offload, tmp_path: Path
) -> None:
    own, x = made(), torch.ones(1, 4)
    wanted = Weights(own).fingerprint()
    offloaded, scaled = made(), made(2.0)
    offload(offloaded, tmp_path / "own")
    offload(scaled, tmp_path / "scaled")
    weights = Weights(offloaded)
    assert weights.fingerprint() == wanted
    found = offloaded(x if offload is to_disk else x.to(DEVICE))
    assert torch.allclose(found.cpu(), own(x))
    weights.change()
    assert weights.fingerprint() == wanted
    assert Weights(scaled).fingerprint() == Weights(made(2.0)).fingerprint() != wanted
