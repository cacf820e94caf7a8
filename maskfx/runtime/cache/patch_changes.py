"""PatchChanges: how far the rows that a step replaces differ from the new ones, per patch.

A request that reuses its patches across steps reads it after each step. The sums of a batch are one
gather and one scatter per tap between stretches; no number is read from the device here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from maskfx.ir.lanes import grid_level, is_image, padded
from maskfx.ir.program import STRETCH, Interface
from maskfx.ir.sources import Loaded
from maskfx.ops import wide
from maskfx.runtime.devices import moved
from maskfx.runtime.sites.active import ActiveSites
from maskfx.runtime.sites.patches import PatchGrid

Group = tuple[str, ...]


@dataclass(eq=False)
class PatchChanges:
    """The changes of one request's rows between stretches at its last step.

    Args:
        patches: The request's patches.
        boundaries: The taps of the values between stretches, and the stretch that reads each; 0 is
            what follows the last stretch.
        stretches: The number of stretches.
        since_read: Whether changes are those since a stretch last read its input, compared while a
            step runs (`read_inputs.InputChanges`); then nothing is summed after the step.
    """

    patches: PatchGrid
    boundaries: Mapping[str, int]
    stretches: int
    since_read: bool = False
    _sums: Tensor | None = field(default=None, repr=False)

    def put(self, sums: Tensor) -> None:
        """Add (stretches + 1, patches, 2): sums of changes and of the values before.

        A call that runs as one call per sample adds once per sample.
        """
        self._sums = sums if self._sums is None else self._sums + sums

    def read(self) -> NDArray[np.float32] | None:
        """Return the relative change of each stretch's input per patch, 0 where none was replaced.

        Return None if no step was made since the last call. Row 0 is what follows the last stretch.
        """
        sums, self._sums = self._sums, None
        if sums is None:
            return None
        change, before = sums.detach().cpu().numpy().astype(np.float64).transpose(2, 0, 1)
        found = np.divide(change, before, out=np.zeros_like(change), where=before > 0)
        return np.asarray(np.nan_to_num(found, nan=np.inf), np.float32)


class Watched(Protocol):
    """A cache whose changes are summed, if it has a table of its patches."""

    @property
    def changes(self) -> PatchChanges | None: ...


class Place(Protocol):
    """Which rows a batch writes: their places, and ranges by member and batch element."""

    @property
    def target(self) -> Tensor: ...

    @property
    def sizes(self) -> Sequence[int]: ...

    @property
    def elements(self) -> Sequence[int]: ...

    @property
    def batches(self) -> Sequence[int]: ...


class ChangeMeter:
    """Sums the changes of one batch's rows for the members that watch them.

    Args:
        caches: The caches that the batch writes, in order.
        since_read: Which of them are watched (`PatchChanges.since_read`).
    """

    def __init__(self, caches: Sequence[Watched], since_read: bool = False) -> None:
        found = [cache.changes for cache in caches]
        self._watching = [
            c if c is not None and c.since_read == since_read else None for c in found
        ]
        counts = [0 if found is None else found.patches.count for found in self._watching]
        self._starts = np.cumsum([0, *counts])
        known = [found for found in self._watching if found is not None]
        self.boundaries = known[0].boundaries if known else {}
        self._stretches = known[0].stretches if known else 0
        self._sums: Tensor | None = None
        self._ids: dict[tuple[str, ...], Tensor] = {}

    def reads(self, tap: str) -> bool:
        return tap in self.boundaries

    def add(
        self,
        tap: str,
        segments: tuple[str, ...],
        place: Place,
        table: Tensor,
        rows: Sequence[Tensor],
    ) -> None:
        """Add the changes of one tap.

        Args:
            tap: The tap.
            segments: Its row sets; taps of equal row sets have equal places.
            place: The rows that are written.
            table: The patch of each row in the buffers, counted within its request.
            rows: The rows before and the new ones.
        """
        before, new = (value.flatten(1).to(wide(value.dtype)) for value in rows)
        if self._sums is None:
            size = self._stretches + 1, int(self._starts[-1]) + 1, 2
            self._sums = new.new_zeros(size)
        if segments not in self._ids:
            self._ids[segments] = self._patches_of(place, table)
        ids = self._ids[segments]
        change = (new - before).abs_().mean(1)
        both = torch.stack([change, before.abs().mean(1)], 1)
        self._sums[self.boundaries[tap]].index_add_(0, ids, both)

    def sums_at(self, stretch: int) -> list[NDArray[np.float64]]:
        """Return each cache's sums by patch of the taps that a stretch reads."""
        if self._sums is None:
            sums = np.zeros((int(self._starts[-1]) + 1, 2))
        else:
            sums = self._sums[stretch].double().cpu().numpy()
        return [sums[a:b] for a, b in pairwise(self._starts)]

    def finish(self) -> None:
        """Give each cache the part of the sums that is about its rows."""
        for number, found in enumerate(self._watching):
            if found is None:
                continue
            start, stop = self._starts[number], self._starts[number + 1]
            if self._sums is None:
                found.put(torch.zeros(found.stretches + 1, found.patches.count, 2))
            else:
                found.put(self._sums[:, start:stop])

    def _patches_of(self, place: Place, table: Tensor) -> Tensor:
        """Return the patch of each written row, counted over the batch; the last one isn't read."""
        member = np.repeat(np.arange(len(place.batches)), place.batches)
        starts = self._starts[:-1][member]
        unread = np.array([found is None for found in self._watching])[member]
        shift = np.repeat(starts[place.elements], place.sizes)
        ids = table.index_select(0, place.target)
        ids = ids + moved(torch.from_numpy(shift), ids.device)
        if unread.any():
            skipped = torch.from_numpy(np.repeat(unread[place.elements], place.sizes))
            ids = ids.masked_fill(moved(skipped, ids.device), int(self._starts[-1]))
        return ids


def boundary_taps(interface: Interface) -> dict[str, int]:
    """Return the taps of the values between adjacent stretches, and the stretch that reads each."""
    stretches, stretch_of = interface.regions_of(STRETCH), interface.stretch_of
    crossing: dict[int, dict[int, list[str]]] = {}
    for source in interface.inputs.values():
        if isinstance(source, Loaded) and source.tap in interface.taps:
            before, after = stretch_of(source.before), stretch_of(source.after)
            if before != after and before in stretches and not interface.taps[source.tap].stats:
                crossing.setdefault(after, {}).setdefault(before, []).append(source.tap)
    found: dict[str, int] = {}
    for after, sources in crossing.items():
        last = after - 1 if after else stretches[-1]
        nearest = last if last in sources else max(sources)
        found |= dict.fromkeys(sources[nearest], after)
    return found


def reading_sets(interface: Interface, boundaries: Mapping[str, int]) -> dict[str, Group]:
    """Return the row set in which a stretch reads each of these taps."""
    found: dict[str, Group] = {}
    for source in interface.inputs.values():
        if not isinstance(source, Loaded) or source.tap not in boundaries:
            continue
        stretch = boundaries[source.tap]
        if stretch and interface.stretch_of(source.after) == stretch:
            first = interface.pyramid.region_in(source.after) == stretch
            if first or source.tap not in found:
                found[source.tap] = source.after
    return found


def patch_table(group: Group, patches: PatchGrid, sites: ActiveSites) -> Tensor:
    """Return the patch of each row of a row set of one batch element."""
    parts = []
    for segment in filter(is_image, group):
        level = grid_level(segment)
        found = patches.ids if level is None else patches.at(sites.grid(level))
        fits = padded(segment) is None and len(found) == sites.count(segment)
        parts.append(found if fits else np.zeros(sites.count(segment), np.int64))
    return torch.from_numpy(np.concatenate(parts))
