"""AdapterSet: the updates of one request, checked against a module and ordered by weight."""

from __future__ import annotations

import threading
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from math import isfinite

import torch
from torch import Tensor, nn

from maskfx.errors import InputError
from maskfx.ir.lru import LruCache
from maskfx.runtime.lora.adapter import LowRank, Updates, WeightedLayers

SETS = 64  # kept per module: checked sets of adapters
KINDS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)

Digests = tuple[tuple[str, float], ...]  # of a set: each adapter's digest and weight


@dataclass(frozen=True, eq=False)
class LayerUpdate:
    """All updates of one weight by one request's adapters; they add up.

    Args:
        weight: the layer's weight.
        terms: each update, and the factor beside its scale.
    """

    weight: Tensor
    terms: tuple[tuple[LowRank, float], ...]

    @property
    def rank(self) -> int:
        return sum(layer.rank for layer, _ in self.terms)

    def down(self, order: Sequence[int], like: Tensor) -> Tensor:
        """Return (ranks, inputs), inputs in the order of the weight's axes in `order`."""
        parts = [layer.down.to(like) for layer, _ in self.terms]
        parts = [part.permute(*order) if order else part for part in parts]
        return torch.cat([part.flatten(1) for part in parts])

    def up(self, like: Tensor) -> Tensor:
        """Return (ranks, outputs), scaled."""
        parts = [layer.up.detach().t() * (layer.scale * factor) for layer, factor in self.terms]
        return torch.cat([part.to(like) for part in parts])

    def whole(self) -> Tensor:
        """Return the weight with its updates."""
        weight = self.weight.detach()
        change = self.up(weight).t() @ self.down((), weight)
        return weight + change.view(weight.shape)


@dataclass(frozen=True, eq=False)
class AdapterSet:
    """The adapters of one request in one module.

    Args:
        key: equal for the same updates with the same factors.
        digests: what recordings keep of them.
        updates: what the set was made from; held, because ids are in the key.
        layers: the updates of each weight.
    """

    key: Hashable
    digests: Digests
    updates: tuple[WeightedLayers, ...]
    layers: tuple[LayerUpdate, ...]


@dataclass
class SetCache:
    """Checks the adapters of a module's members, once for each set of them."""

    module: nn.Module
    known: LruCache[Hashable, AdapterSet] = field(default_factory=lambda: LruCache(SETS))
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def of(self, updates: Updates) -> AdapterSet | None:
        """Return the checked set; None if nothing acts."""
        acting = tuple(one for one in updates if one.weight and one.layers)
        if not acting:
            return None
        key = tuple((one.digest, one.weight, id(one.layers)) for one in acting)
        with self._lock:  # requests are checked in their threads, beside steps
            return self.known.find(key, lambda: check_updates(self.module, acting, key))


def digests_of(updates: Updates) -> Digests:
    """Return what identifies adapters in keys."""
    return tuple((one.digest, float(one.weight)) for one in updates if one.weight and one.layers)


def check_updates(
    module: nn.Module, updates: Sequence[WeightedLayers], key: Hashable
) -> AdapterSet:
    """Check that the layers exist and the shapes fit; aliases of a layer are one."""
    terms: dict[int, list[tuple[LowRank, float]]] = {}
    weights: dict[int, Tensor] = {}
    for one in updates:
        if not isfinite(one.weight):
            raise InputError(f"adapters: weight={one.weight!r}: give a finite number")
        for path, layer in one.layers.items():
            weight = check_layer(module, path, layer)
            weights[id(weight)] = weight
            terms.setdefault(id(weight), []).append((layer, float(one.weight)))
    layers = tuple(LayerUpdate(weights[place], tuple(own)) for place, own in terms.items())
    return AdapterSet(key, digests_of(updates), tuple(updates), layers)


def joined_sets(sets: Sequence[AdapterSet]) -> AdapterSet:
    """Return one set with the updates of several modules."""
    return AdapterSet(
        tuple(own.key for own in sets),
        tuple(one for own in sets for one in own.digests),
        tuple(one for own in sets for one in own.updates),
        tuple(layer for own in sets for layer in own.layers),
    )


def check_layer(module: nn.Module, path: str, layer: LowRank) -> Tensor:
    """Return the weight of the layer at `path`, which the update must fit."""
    where = f"adapters: layer {path!r} of {type(module).__name__}"
    try:
        found = module.get_submodule(path)
    except AttributeError:
        raise InputError(
            f"{where}: there is no such layer; the adapter may be for another model, or its names "
            "need converting (load it with the pipeline it was made for)"
        ) from None
    weight = getattr(found, "weight", None)
    base = getattr(found, "base_layer", found)  # of a layer that PEFT has wrapped
    if not isinstance(base, KINDS) or not isinstance(weight, Tensor):
        raise InputError(
            f"{where} is a {type(found).__name__}; adapters change linear layers and convolutions: "
            "leave this layer out"
        )
    wanted = tuple(weight.shape)
    seen = (layer.up.shape[0], *layer.down.shape[1:])
    ranks = layer.down.shape[0], *layer.up.shape[1:]
    if seen != wanted or len(set(ranks)) != 1 or len(ranks) != 2:
        raise InputError(
            f"{where} has a weight of {wanted}, the update has down {tuple(layer.down.shape)} and "
            f"up {tuple(layer.up.shape)}; down must be (rank, {str(wanted[1:]).strip('()')}) and "
            f"up ({wanted[0]}, rank)"
        )
    return weight
