"""Adapters that are sent to another process once and named by a number afterwards."""

from __future__ import annotations

import itertools
import weakref
from collections import OrderedDict
from collections.abc import Collection, Iterable, Mapping, MutableMapping
from dataclasses import dataclass, replace

from maskfx.errors import CacheError
from maskfx.runtime.lora.adapter import LayerChange, Layers, Updates


@dataclass(frozen=True)
class SentLayers:
    """An adapter's updates by their number, with their contents when they are sent first."""

    number: int
    contents: Layers | None


def received_layers(adapters: Updates, held: MutableMapping[int, Layers]) -> Updates:
    """Return adapters with their updates instead of numbers; add those that are new to `held`."""
    found = []
    for one in adapters:
        sent: object = one.layers
        assert isinstance(sent, SentLayers)
        if sent.contents is not None:
            held[sent.number] = sent.contents
        if sent.number not in held:
            raise CacheError(f"adapter {sent.number} isn't in this process; send it again")
        found.append(replace(one, layers=held[sent.number]))
    return tuple(found)


class LayerNumbers:
    """Numbers the updates of adapters, and holds none of them."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[int, list[weakref.ref[LayerChange]]]] = {}
        self._count = itertools.count()

    def of(self, layers: Layers) -> int:
        """Return the number of these updates, the same for as long as they exist."""
        place, updates = id(layers), list(layers.values())
        number, known = self._known.get(place, (-1, []))
        # an id may be that of earlier updates
        if number < 0 or [ref() for ref in known] != updates:
            number = next(self._count)
            self._known[place] = number, list(map(weakref.ref, updates))
        return number

    def alive(self) -> set[int]:
        """Return the numbers of the updates that exist, and forget the others."""
        self._known = {
            place: (number, refs)
            for place, (number, refs) in self._known.items()
            if all(ref() is not None for ref in refs[:1])
        }
        return {number for number, _ in self._known.values()}


class HeldAdapters:
    """The adapters that one other process holds, by number, the least recently used first.

    Args:
        limit: The bytes that they may take together. Those of one step may take more.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._sizes: OrderedDict[int, int] = OrderedDict()

    @property
    def nbytes(self) -> int:
        return sum(self._sizes.values())

    def __contains__(self, number: int) -> bool:
        return number in self._sizes

    def unneeded(self, needed: Mapping[int, int], alive: Collection[int]) -> tuple[int, ...]:
        """Return what to drop: updates that don't exist any more, and those beyond the limit.

        Args:
            needed: The updates of the next step, with their bytes.
            alive: The numbers of the updates that exist.
        """
        gone = [number for number in self._sizes if number not in alive and number not in needed]
        left = {n: size for n, size in self._sizes.items() if n not in gone}
        total = sum({**left, **needed}.values())
        for number, size in left.items():
            if total <= self.limit:
                break
            if number not in needed:
                gone.append(number)
                total -= size
        return tuple(gone)

    def note(self, sent: Iterable[SentLayers], dropped: Collection[int]) -> None:
        """Note what the process has got, and what it has dropped."""
        for number in dropped:
            self._sizes.pop(number, None)
        for one in sent:
            if one.contents is not None:
                self._sizes[one.number] = nbytes_of(one.contents)
            self._sizes.move_to_end(one.number)


def nbytes_of(layers: Layers) -> int:
    return sum(layer.nbytes for layer in layers.values())
