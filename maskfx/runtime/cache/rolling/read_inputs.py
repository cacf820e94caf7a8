"""ReadInputs: the inputs of stretches as these last read them, and how far new ones differ.

A request whose stretches are chosen while its step runs compares each stretch's input with the one
that the stretch read when it last computed a patch. All requests of a batch are compared together,
with one gather and one sum per stretch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from maskfx.ir.geometry.grids import Floats
from maskfx.ops import put_all
from maskfx.runtime.cache.rolling.patch_changes import ChangeMeter, boundary_taps, reading_sets
from maskfx.runtime.cache.rolling.places import Batched
from maskfx.runtime.cache.rolling.rolling_cache import RollingCache, RowBlock
from maskfx.runtime.hardware.devices import moved

Sums = NDArray[np.float64]


class ReadInputs:
    """Buffers beside those of a block, with the rows that stretches last read.

    Args:
        block: The block.
        rows: The buffers, by tap; by default new ones.
    """

    def __init__(self, block: RowBlock, rows: dict[str, Tensor] | None = None) -> None:
        boundaries = boundary_taps(block.interface)
        sets = reading_sets(block.interface, boundaries)
        self.sets = {tap: segments for tap, segments in sets.items() if tap in block.rows}
        self.rows = rows or {tap: torch.empty_like(block.rows[tap]) for tap in self.sets}

    def start(self, block: RowBlock, cache: RollingCache) -> None:
        """Take a request's present rows as those that its stretches last read."""
        for tap, rows in self.rows.items():
            group = block.group_of(block.interface.taps[tap].segments)
            start = cache.starts[group]
            stop = start + cache.totals[group] * cache.sizes["batch"]
            rows[start:stop].copy_(block.rows[tap][start:stop])

    def read(self, block: RowBlock, layout: Batched, caches: Mapping[int, RollingCache]) -> None:
        """Take the rows of the sites that stretches computed in a step, after these are written."""
        places = block.places(layout, caches)
        for tap, segments in self.sets.items():
            rows = block.rows[tap]
            target = places.written(segments).target
            if target.shape[0]:
                put_all([self.rows[tap]], [target], [rows.index_select(0, target)])


@dataclass
class InputChanges:
    """Compares the inputs of stretches during one step of a batch.

    Args:
        layout: The batch; only the sites of stretches that were computed are read.
        caches: The caches of the members to compare, by the number of the member.
    """

    layout: Batched
    caches: Mapping[int, RollingCache]
    _meters: dict[int, ChangeMeter] = field(default_factory=dict)

    def at(self, stretch: int, rows_of: Callable[[str], Tensor]) -> dict[int, Sums]:
        """Return, by member, (patches, 2) sums: changes of a stretch's input, and values before.

        Args:
            stretch: The number of the stretch, from 2.
            rows_of: Returns the rows that the batch has computed of a tap.
        """
        found: dict[int, Sums] = {}
        for block, caches in self._by_block():
            found |= self._compared(block, caches, stretch, rows_of)
        return found

    def _by_block(self) -> list[tuple[RowBlock, dict[int, RollingCache]]]:
        blocks: dict[int, tuple[RowBlock, dict[int, RollingCache]]] = {}
        for number, cache in self.caches.items():
            blocks.setdefault(id(cache.block), (cache.block, {}))[1][number] = cache
        return list(blocks.values())

    def _compared(
        self,
        block: RowBlock,
        caches: Mapping[int, RollingCache],
        stretch: int,
        rows_of: Callable[[str], Tensor],
    ) -> dict[int, Sums]:
        if id(block) not in self._meters:
            self._meters[id(block)] = ChangeMeter(list(caches.values()), True)
        places, meter = block.places(self.layout, caches), self._meters[id(block)]
        assert block.inputs is not None, "members that compare inputs keep them"
        for tap, kept in block.inputs.rows.items():
            if meter.boundaries.get(tap) != stretch:
                continue
            segments, new = block.interface.taps[tap].segments, rows_of(tap)
            place = places.written(segments)
            table = block.patch_of.get(block.group_of(segments))
            if table is not None and place.target.shape[0]:
                old = kept.index_select(0, place.target)
                meter.add(tap, segments, place, table, (old, place.of(moved(new, old.device))))
        found = dict(zip(caches, meter.sums_at(stretch), strict=True))
        for number, cache in caches.items():
            owners = None if cache.changes is None else cache.changes.owners.get(stretch)
            if owners is not None:
                found[number] = found[number][owners]
        return found


def relative(sums: Sums) -> Floats:
    """Return the relative change by patch; not a number where nothing was compared."""
    change, before = sums.T
    found = np.full(change.shape, np.nan, np.float32)
    with np.errstate(over="ignore"):
        np.divide(change, before, out=found, where=before > 0, casting="same_kind")
    found[np.isnan(change) | np.isnan(before)] = np.inf
    found[(before == 0) & (change > 0)] = np.inf
    return found
