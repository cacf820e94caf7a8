"""Stacks: the matrices of all adapters of a batch, layer by layer, and which rows they apply to."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from maskfx.ir.lru import LruCache
from maskfx.ir.programs.program import derive
from maskfx.ir.programs.sources import (
    Down,
    OwnBiases,
    OwnGroups,
    OwnWeights,
    RankGroups,
    Up,
    Updated,
)
from maskfx.runtime.lora.layers import AdapterSet, LayerUpdate

BATCHES = 2  # combinations of adapters whose stacks are kept
TABLES = 1024  # kept: rows and ranks of one layer and batch
BUCKET = 8  # on a GPU ranks are padded to a multiple, as grouped products want them


@dataclass(frozen=True, eq=False)
class NamedSet:
    """The adapters of a member, by the names of weights in its program's graph.

    `inside` has the updates of layers of modules that stay whole: all members of a batch must have
    the same.
    """

    own: AdapterSet
    layers: Mapping[str, LayerUpdate]
    inside: AdapterSet | None = None

    def changes_whole(self, name: str | None) -> bool:
        """Return True if a full difference of this parameter is in the set."""
        found = None if name is None else self.layers.get(name)
        return found is not None and bool(found.differences)


@dataclass
class Stacks:
    """The stacks of one combination of adapters, made layer by layer when they are first read.

    Args:
        sets: the adapters, each of one or more members.
        originals: the graph's weights by name.
        device: of the batch.
    """

    sets: Sequence[NamedSet]
    originals: Mapping[str, Tensor]
    device: torch.device
    _made: dict[Hashable, Tensor] = field(default_factory=dict)
    _ranks: dict[str, tuple[tuple[int, int], ...]] = field(default_factory=dict)
    _tables: LruCache[Hashable, Tensor] = field(default_factory=lambda: LruCache(TABLES))

    def read(self, source: Down | Up | OwnWeights | OwnBiases) -> Tensor:
        """Return the matrices of all sets."""
        if source not in self._made:
            if isinstance(source, Down | Up):
                self._made[source] = self._stacked(source)
            else:
                self._made[source] = self._own(source)
        return self._made[source]

    def _own(self, source: OwnWeights | OwnBiases) -> Tensor:
        """Return the parameters of the sets that have a difference of this one, in their order."""
        name, found = source.weight if isinstance(source, OwnWeights) else source.bias, []
        for own in self.sets:
            if not own.changes_whole(name):
                continue
            value = own.layers[name].whole().to(self.device)
            if isinstance(source, OwnWeights) and source.shape:
                value = derive(value, source.order, source.shape)
            found.append(value)
        if len(found) == 1:
            return found[0][None]
        empty = self.originals[name].new_empty(0, 1, device=self.device)
        return torch.stack(found) if found else empty

    def _owned(self, name: str | None) -> list[int]:
        """Return, for each set, the index of its own parameter, past the end if it has none."""
        has = [own.changes_whole(name) for own in self.sets]
        return [sum(has[:i]) if own else len(has) for i, own in enumerate(has)]

    def updated(self, source: Updated, owners: Sequence[int | None]) -> Tensor:
        """Return the weight of a layer that requests have in common.

        Args:
            source: the layer.
            owners: for each request, the index of its set; None without adapters.
        """
        named = {own for own in owners if own is not None}
        changing = [own for own in sorted(named) if source.weight in self.sets[own].layers]
        assert len(changing) < 2, "members with different updates of this weight run apart"
        key = (source, *changing)
        if key not in self._made:
            weight = self.originals[source.weight].detach()
            for own in changing:
                weight = self.sets[own].layers[source.weight].whole()
            weight = weight.to(self.device)
            self._made[key] = derive(weight, source.order, source.shape) if source.shape else weight
        return self._made[key]

    def _stacked(self, source: Down | Up) -> Tensor:
        weight = self.originals[source.weight]
        like = weight.new_empty(0, device=self.device)
        parts = []
        for own, (low, high) in zip(self.sets, self.ranks(source.weight), strict=True):
            update = own.layers.get(source.weight)
            if update is None or update.differences:
                continue
            part = update.up(like) if isinstance(source, Up) else update.down(source.order, like)
            missing = high - low - part.shape[0]
            parts += [part, part.new_zeros(missing, part.shape[1])] if missing else [part]
        if parts:
            return torch.cat(parts)
        size = weight.shape[0] if isinstance(source, Up) else weight[0].numel()
        return like.new_empty(0, size)

    def ranks(self, weight: str) -> tuple[tuple[int, int], ...]:
        """Return where the ranks of each set begin and end in the stacks of a layer."""
        if weight not in self._ranks:
            found = (own.layers.get(weight) for own in self.sets)
            sizes = [0 if u is None or u.differences else u.rank for u in found]
            if self.device.type == "cuda":
                padded = -(-max(sizes) // BUCKET) * BUCKET
                sizes = [padded if size else 0 for size in sizes]
            out, at = [], 0
            for size in sizes:
                out.append((at, at + size))
                at += size
            self._ranks[weight] = tuple(out)
        return self._ranks[weight]

    def groups(
        self, source: RankGroups, counts: Sequence[tuple[int, ...]], owners: Sequence[int | None]
    ) -> Tensor:
        """Return which rows get which ranks.

        Args:
            source: the layer, and its row set.
            counts: for each segment, the number of rows of each request.
            owners: for each request, the index of its set; None without adapters.
        """
        ranks = self.ranks(source.weight)
        key = (ranks, *map(tuple, counts), tuple(owners))
        pairs = [(low, high) if low < high else None for low, high in ranks]
        return self._tables.find(key, lambda: table_of(pairs, counts, owners))

    def own_groups(
        self, source: OwnGroups, counts: Sequence[tuple[int, ...]], owners: Sequence[int | None]
    ) -> Tensor:
        """Return which rows get which weight and bias; the arguments are those of `groups`."""
        none = len(self.sets), len(self.sets)
        found = zip(self._owned(source.weight), self._owned(source.bias), strict=True)
        pairs = [None if pair == none else pair for pair in found]
        key = (source.weight, source.bias, *map(tuple, counts), tuple(owners))
        return self._tables.find(key, lambda: table_of(pairs, counts, owners))


def table_of(
    pairs: Sequence[tuple[int, int] | None],
    counts: Sequence[Sequence[int]],
    owners: Sequence[int | None],
) -> Tensor:
    """Return (groups, 4): rows, and what is theirs; adjacent rows with the same are one group.

    Args:
        pairs: for each set, the two numbers that its rows get; None for none.
        counts: for each segment, the number of rows of each request.
        owners: for each request, the index of its set; None without adapters.
    """
    out: list[list[int]] = []
    at = 0
    for segment in counts:
        for count, owner in zip(segment, owners, strict=True):
            own = None if owner is None else pairs[owner]
            if count and own is not None:
                if out and out[-1][1] == at and tuple(out[-1][2:]) == own:
                    out[-1][1] = at + count
                else:
                    out.append([at, at + count, *own])
            at += count
    return torch.tensor(out, dtype=torch.long).view(-1, 4)


class StackCache:
    """Keeps the stacks of the latest combinations of adapters, whichever rows they apply to."""

    def __init__(self) -> None:
        self.kept: LruCache[tuple[str, torch.device, tuple[Hashable, ...]], Stacks]
        self.kept = LruCache(BATCHES)

    def of(
        self,
        code: str,
        sets: Sequence[NamedSet | None],
        originals: Mapping[str, Tensor],
        device: torch.device,
    ) -> tuple[Stacks, list[int | None]]:
        """Return the stacks of a batch, and the index of each member's set in them.

        Stacks with more sets serve too, so nothing is copied when a request leaves.
        """
        named = {own.own.key: own for own in sets if own is not None}
        for place, known in self.kept.items():
            if place[:2] == (code, device) and named.keys() <= set(place[2]):
                self.kept.get(place)
                keys, found = place[2], known
                break
        else:
            keys = tuple(sorted(named, key=repr))
            found = Stacks([named[key] for key in keys], originals, device)
            self.kept.put((code, device, keys), found)
        return found, [None if own is None else keys.index(own.own.key) for own in sets]

    def drop(self, gone: Collection[int]) -> None:
        """Release the stacks with updates of these ids (of their `Layers`)."""
        for place, known in self.kept.items():
            if any(one.own.has(gone) for one in known.sets):
                self.kept.remove(place)
