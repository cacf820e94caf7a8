"""Modules around the denoisers, such as text encoders, with low-rank updates for one call.

A copy of the module shares all weights with the original; the layers that have updates add their
products. Calls with other adapters, or none, use other copies, or the original.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from maskfx.errors import InputError
from maskfx.runtime.lora.adapter import LowRank, WeightedLayers


class AdaptedLinear(nn.Module):
    """A linear layer with low-rank products added to its result."""

    def __init__(self, base: nn.Linear, updates: Sequence[tuple[LowRank, float]]) -> None:
        super().__init__()
        self.base = base
        weight = base.weight
        self.products = [
            (update.down.to(weight), update.up.to(weight), factor * update.scale)
            for update, factor in updates
        ]

    @property
    def weight(self) -> Tensor:
        return self.base.weight

    def forward(self, rows: Tensor) -> Tensor:
        found: Tensor = self.base(rows)
        for down, up, factor in self.products:
            found = found + factor * nn.functional.linear(nn.functional.linear(rows, down), up)
        return found


@torch.no_grad()
def adapted_module(module: nn.Module, updates: Sequence[WeightedLayers]) -> Any:
    """Return a copy of a module that shares its weights and applies updates of its layers."""
    kept: dict[int, Any] = {id(tensor): tensor for tensor in module.parameters()}
    kept |= {id(tensor): tensor for tensor in module.buffers()}
    made = copy.deepcopy(module, kept)
    by_layer: dict[str, list[tuple[LowRank, float]]] = defaultdict(list)
    for one in updates:
        for layer, update in one.layers.items():
            by_layer[layer].append((update, one.weight))
    for layer, own in by_layer.items():
        base = made.get_submodule(layer)
        if not isinstance(base, nn.Linear):
            raise InputError(
                f"{type(module).__name__}: {layer} is a {type(base).__name__}; adapters of modules "
                "around the denoiser may change linear layers only"
            )
        parent, _, name = layer.rpartition(".")
        setattr(made.get_submodule(parent), name, AdaptedLinear(base, own))
    return made
