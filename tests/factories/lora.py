"""Random adapters for any module or pipeline, and the oracle: the module with merged weights."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from maskfx.runtime.lora.adapter import (
    Adapter,
    Difference,
    LayerChange,
    Layers,
    LowRank,
    WeightedLayers,
)

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


def differences_of(
    module: nn.Module,
    seed: int,
    share: float = 1.0,
    gain: float = 0.3,
    kinds: tuple[type[nn.Module], ...] = (nn.Module,),
) -> Layers:
    """Return full differences of the weights and biases of a share of the layers."""
    draw = torch.Generator().manual_seed(seed)
    found: dict[str, Difference] = {}
    for path, layer in module.named_modules():
        if not isinstance(layer, kinds) or float(torch.rand(1, generator=draw)) >= share:
            continue
        own = {}
        for name in ("weight", "bias"):
            value = getattr(layer, name, None)
            if isinstance(value, nn.Parameter):
                change = torch.randn(value.shape, generator=draw)
                length = max(1e-2, float(value.detach().norm() / change.norm()))
                own[name] = gain * length * change
        if own:
            found[path] = Difference(**own)
    return found


def difference_of(
    module: nn.Module, seed: int, share: float = 1.0, weight: float = 1.0, **more: Any
) -> WeightedLayers:
    found = differences_of(module, seed, share, **more)
    return WeightedLayers(found, weight, f"whole {seed}.{share}.{more}")


def low_rank(change: LayerChange) -> LowRank:
    assert isinstance(change, LowRank)
    return change


def adapter_of(pipe: Any, rank: int, seed: int, *names: str, share: float = 1.0) -> Adapter:
    """Return an adapter of these components of a pipeline."""
    parts = {name: layers_of(getattr(pipe, name), rank, seed, share) for name in names}
    return Adapter(f"adapter {seed}", f"{rank}.{seed}.{share}", parts)


def merge(module: nn.Module, updates: Sequence[WeightedLayers]) -> nn.Module:
    """Add updates to a module's weights, and return it."""
    with torch.no_grad():
        for one in updates:
            for path, layer in one.layers.items():
                found = module.get_submodule(path)
                change = layer.weight if isinstance(layer, Difference) else product(layer)
                for name, own in (("weight", change), ("bias", layer.bias)):
                    if own is not None:
                        value = getattr(found, name)
                        assert isinstance(value, nn.Parameter)
                        value.add_(own.view(value.shape), alpha=one.weight)
    return module


def product(layer: LowRank) -> torch.Tensor:
    return layer.scale * layer.up @ layer.down.flatten(1)


def merged(module: nn.Module, updates: Sequence[WeightedLayers]) -> nn.Module:
    """Return a copy of a module with updates in its weights."""
    return merge(copy.deepcopy(module), updates)


def merge_into(pipe: Any, adapters: Sequence[tuple[Adapter, float]]) -> Any:
    """Add adapters to the weights of a pipeline's components, and return it."""
    for adapter, weight in adapters:
        for name, layers in adapter.parts.items():
            merge(getattr(pipe, name), [WeightedLayers(layers, weight, adapter.digest)])
    return pipe
