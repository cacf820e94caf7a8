"""Random adapters for any module or pipeline, and the oracle: the module with merged weights."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from maskfx.runtime.lora.adapter import Adapter, Layers, LowRank, WeightedLayers

KINDS = (nn.Linear, nn.Conv2d)


def layers_of(
    module: nn.Module, rank: int, seed: int, share: float = 1.0, gain: float = 0.3
) -> Layers:
    """Return updates of a share of the layers, each `gain` times as long as the layer's weight."""
    draw = torch.Generator().manual_seed(seed)
    found: dict[str, LowRank] = {}
    for path, layer in module.named_modules():
        if not isinstance(layer, KINDS) or float(torch.rand(1, generator=draw)) >= share:
            continue
        weight = layer.weight
        down = torch.randn(rank, *weight.shape[1:], generator=draw)
        up = torch.randn(weight.shape[0], rank, generator=draw)
        length = float(weight.detach().norm() / (up @ down.flatten(1)).norm())
        found[path] = LowRank(down, up, gain * length)
    return found


def update_of(
    module: nn.Module, rank: int, seed: int, share: float = 1.0, weight: float = 1.0
) -> WeightedLayers:
    return WeightedLayers(layers_of(module, rank, seed, share), weight, f"{rank}.{seed}.{share}")


def adapter_of(pipe: Any, rank: int, seed: int, *names: str, share: float = 1.0) -> Adapter:
    """Return an adapter of these components of a pipeline."""
    parts = {name: layers_of(getattr(pipe, name), rank, seed, share) for name in names}
    return Adapter(f"adapter {seed}", f"{rank}.{seed}.{share}", parts)


def merge(module: nn.Module, updates: Sequence[WeightedLayers]) -> nn.Module:
    """Add updates to a module's weights, and return it."""
    with torch.no_grad():
        for one in updates:
            for path, layer in one.layers.items():
                weight = module.get_submodule(path).weight
                assert isinstance(weight, nn.Parameter)
                change = layer.up @ layer.down.flatten(1)
                weight.add_(change.view(weight.shape), alpha=one.weight * layer.scale)
    return module


def merged(module: nn.Module, updates: Sequence[WeightedLayers]) -> nn.Module:
    """Return a copy of a module with updates in its weights."""
    return merge(copy.deepcopy(module), updates)


def merge_into(pipe: Any, adapters: Sequence[tuple[Adapter, float]]) -> Any:
    """Add adapters to the weights of a pipeline's components, and return it."""
    for adapter, weight in adapters:
        for name, layers in adapter.parts.items():
            merge(getattr(pipe, name), [WeightedLayers(layers, weight, adapter.digest)])
    return pipe
