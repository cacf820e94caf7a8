"""AdapterSet: the updates of one request, checked against a module and ordered by weight."""

from __future__ import annotations

import threading
from collections.abc import Collection, Hashable, Sequence
from dataclasses import dataclass, field, replace
from math import isfinite
from typing import TypeGuard

import torch
from torch import Tensor, nn

from maskfx.compiler.artifact.graphs import place_of
from maskfx.errors import InputError
from maskfx.ir.lru import LruCache
from maskfx.ir.values import is_wrapped
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
        packed: the layer, if its weight holds packed numbers: its result is added to.
    """

    weight: Tensor
    terms: tuple[tuple[LowRank, float], ...]
    packed: nn.Linear | None = None

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

    def has(self, gone: Collection[int]) -> bool:
        """Return True if it has updates with one of these ids (of their `Layers`)."""
        return any(id(one.layers) in gone for one in self.updates)


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

    def drop(self, gone: Collection[int]) -> None:
        """Release the sets with updates of these ids."""
        with self._lock:
            for key, own in self.known.items():
                if own.has(gone):
                    self.known.remove(key)


def digests_of(updates: Updates) -> Digests:
    """Return what identifies adapters in keys."""
    return tuple((one.digest, float(one.weight)) for one in updates if one.weight and one.layers)


def check_updates(
    module: nn.Module, updates: Sequence[WeightedLayers], key: Hashable
) -> AdapterSet:
    """Check that the layers exist and the shapes fit; aliases of a layer are one."""
    terms: dict[int, list[tuple[LowRank, float]]] = {}
    found: dict[int, nn.Module] = {}
    for one in updates:
        if not isfinite(one.weight):
            raise InputError(f"adapters: weight={one.weight!r}: give a finite number")
        for path, layer in one.layers.items():
            base = check_layer(module, path, layer)
            found[id(base.weight)] = base
            terms.setdefault(id(base.weight), []).append((layer, float(one.weight)))
    layers = tuple(update_of(found[place], own) for place, own in terms.items())
    return AdapterSet(key, digests_of(updates), tuple(updates), layers)


def update_of(layer: nn.Module, terms: Sequence[tuple[LowRank, float]]) -> LayerUpdate:
    assert isinstance(layer.weight, Tensor)
    return LayerUpdate(layer.weight, tuple(terms), layer if is_packed(layer) else None)


def is_packed(layer: nn.Module) -> TypeGuard[nn.Linear]:
    """Return True for a linear layer whose weight holds packed numbers, as in GGUF files."""
    weight = getattr(layer, "weight", None)
    if not isinstance(layer, nn.Linear) or not isinstance(weight, Tensor):
        return False
    return not weight.is_floating_point() and not is_wrapped(weight)


def weight_shape(layer: nn.Module) -> tuple[int, ...]:
    """Return the shape of a layer's weight; of packed numbers, what they are unpacked to."""
    if is_packed(layer):
        return layer.out_features, layer.in_features
    assert isinstance(layer.weight, Tensor)
    return tuple(layer.weight.shape)


def restricted(own: AdapterSet | None, places: Collection[Hashable]) -> AdapterSet | None:
    """Return the part of a set that changes these weights (`place_of`); None if nothing does."""
    layers = () if own is None else tuple(u for u in own.layers if place_of(u.weight) in places)
    return replace(own, layers=layers) if own is not None and layers else None


def joined_sets(sets: Sequence[AdapterSet]) -> AdapterSet:
    """Return one set with the updates of several modules."""
    return AdapterSet(
        tuple(own.key for own in sets),
        tuple(one for own in sets for one in own.digests),
        tuple(one for own in sets for one in own.updates),
        tuple(layer for own in sets for layer in own.layers),
    )


def check_layer(module: nn.Module, path: str, layer: LowRank) -> nn.Module:
    """Return the layer at `path`, which the update must fit."""
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
    wanted = weight_shape(base)
    seen = (layer.up.shape[0], *layer.down.shape[1:])
    ranks = layer.down.shape[0], *layer.up.shape[1:]
    if seen != wanted or len(set(ranks)) != 1 or len(ranks) != 2:
        raise InputError(
            f"{where} has a weight of {wanted}, the update has down {tuple(layer.down.shape)} and "
            f"up {tuple(layer.up.shape)}; down must be (rank, {str(wanted[1:]).strip('()')}) and "
            f"up ({wanted[0]}, rank)"
        )
    return base
