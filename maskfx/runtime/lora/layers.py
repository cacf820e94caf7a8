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
from maskfx.runtime.lora.adapter import Difference, LayerChange, LowRank, Updates, WeightedLayers

SETS = 64  # kept per module: checked sets of adapters
KINDS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)

Digests = tuple[tuple[str, float], ...]  # of a set: each adapter's digest and weight


@dataclass(frozen=True, eq=False)
class LayerUpdate:
    """All updates of one parameter by one request's adapters; they add up.

    Args:
        weight: the parameter, such as a layer's weight or bias.
        terms: each low-rank update, and the factor beside its scale.
        packed: the layer, if its weight holds packed numbers: its result is added to.
        differences: each full difference, and its factor.
    """

    weight: Tensor
    terms: tuple[tuple[LowRank, float], ...] = ()
    packed: nn.Linear | None = None
    differences: tuple[tuple[Tensor, float], ...] = ()
    _made: dict[Hashable, tuple[Tensor, Tensor]] = field(default_factory=dict, repr=False)

    def matrices(self, like: Tensor) -> tuple[Tensor, Tensor]:
        """Return (inputs, ranks) and (ranks, outputs), kept for calls of the layer."""
        key = like.dtype, like.device
        if key not in self._made:
            self._made[key] = self.down((), like).t(), self.up(like)
        return self._made[key]

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
        """Return the parameter with its updates."""
        weight = self.with_differences()
        if not self.terms:
            return weight
        down, up = self.matrices(weight)
        found = torch.addmm(weight.flatten(1), up.t(), down.t())
        return found.view(weight.shape)

    def with_differences(self) -> Tensor:
        """Return the parameter without its low-rank updates."""
        weight = self.weight.detach()
        for change, factor in self.differences:
            weight = torch.add(weight, change.to(weight).view(weight.shape), alpha=factor)
        return weight

    def difference(self, like: Tensor) -> Tensor:
        """Return the sum of the full differences."""
        found = sum(change.to(like) * factor for change, factor in self.differences)
        assert isinstance(found, Tensor), "there is a difference"
        return found


@dataclass(frozen=True, eq=False)
class AdapterSet:
    """The adapters of one request in one module.

    Args:
        key: equal for the same updates with the same factors.
        digests: what recordings keep of them.
        updates: what the set was made from; held, because ids are in the key.
        layers: the updates of each parameter.
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
    """Checks the adapters of a module's members, once for each set of them.

    `written` is the key of the set whose updates are in the weights now: it has none left to add.
    """

    module: nn.Module
    written: Hashable = None
    known: LruCache[Hashable, AdapterSet] = field(default_factory=lambda: LruCache(SETS))
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def of(self, updates: Updates) -> AdapterSet | None:
        """Return the checked set; None if nothing acts."""
        acting = tuple(one for one in updates if one.weight and one.layers)
        if not acting:
            return None
        key = tuple((one.digest, one.weight, id(one.layers)) for one in acting)
        with self._lock:  # requests are checked in their threads, beside steps
            found = self.known.find(key, lambda: check_updates(self.module, acting, key))
        if self.written is not None and key == self.written:
            return replace(found, key=("in the weights", key), layers=())
        return found

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
    found: dict[int, ParameterUpdate] = {}

    def of(layer: nn.Module, name: str) -> ParameterUpdate:
        parameter = getattr(layer, name)
        return found.setdefault(id(parameter), ParameterUpdate(layer, name))

    for one in updates:
        if not isfinite(one.weight):
            raise InputError(f"adapters: weight={one.weight!r}: give a finite number")
        factor = float(one.weight)
        for path, change in one.layers.items():
            layer = check_layer(module, path, change)
            if isinstance(change, LowRank):
                of(layer, "weight").terms.append((change, factor))
            elif change.weight is not None:
                of(layer, "weight").differences.append((change.weight, factor))
            if change.bias is not None:
                of(layer, "bias").differences.append((change.bias, factor))
    layers = tuple(own.joined() for own in found.values())
    return AdapterSet(key, digests_of(updates), tuple(updates), layers)


@dataclass(eq=False)
class ParameterUpdate:
    """The updates of one parameter, while they are collected."""

    layer: nn.Module
    name: str
    terms: list[tuple[LowRank, float]] = field(default_factory=list)
    differences: list[tuple[Tensor, float]] = field(default_factory=list)

    def joined(self) -> LayerUpdate:
        parameter = getattr(self.layer, self.name)
        packed = self.layer if self.name == "weight" and is_packed(self.layer) else None
        return LayerUpdate(parameter, tuple(self.terms), packed, tuple(self.differences))


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


def check_layer(module: nn.Module, path: str, change: LayerChange) -> nn.Module:
    """Return the layer at `path`, which the update must fit."""
    where = f"adapters: layer {path!r} of {type(module).__name__}"
    try:
        found = module.get_submodule(path)
    except AttributeError:
        raise InputError(
            f"{where}: there is no such layer; the adapter may be for another model, or its names "
            "need converting (load it with the pipeline it was made for)"
        ) from None
    base = getattr(found, "base_layer", found)  # of a layer that PEFT has wrapped
    assert isinstance(base, nn.Module)
    if isinstance(change, LowRank):
        check_low_rank(where, found, base, change)
    for name, own in (("weight", whole_weight(change)), ("bias", change.bias)):
        if own is not None:
            check_difference(where, base, name, own)
    return base


def whole_weight(change: LayerChange) -> Tensor | None:
    return change.weight if isinstance(change, Difference) else None


def check_low_rank(where: str, found: nn.Module, base: nn.Module, layer: LowRank) -> None:
    weight = getattr(found, "weight", None)
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


def check_difference(where: str, base: nn.Module, name: str, change: Tensor) -> None:
    parameter = getattr(base, name, None)
    if not isinstance(parameter, Tensor):
        raise InputError(
            f"{where} is a {type(base).__name__} without a {name}, and the update has a difference "
            "for it; the adapter was made for another model"
        )
    packed = name == "weight" and is_packed(base)
    wanted = weight_shape(base) if packed else tuple(parameter.shape)
    if tuple(change.shape) != wanted:
        raise InputError(
            f"{where} has a {name} of {wanted}, and the update's difference is "
            f"{tuple(change.shape)}{wider_input(tuple(change.shape), wanted)}"
        )


def wider_input(seen: tuple[int, ...], wanted: tuple[int, ...]) -> str:
    """Return what to do about a difference that doesn't fit the parameter."""
    others = seen[:1] + seen[2:] == wanted[:1] + wanted[2:]
    if len(seen) == len(wanted) > 1 and others and seen[1] != wanted[1]:
        return (
            f": it is for a layer with {seen[1]} input channels, and the pipeline's denoiser gives "
            f"{wanted[1]}; load a pipeline whose denoiser takes {seen[1]} channels"
        )
    return "; the adapter was made for another model"
