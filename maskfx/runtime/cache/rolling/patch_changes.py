"""PatchChanges: how far the rows that a step replaces differ from the new ones, per patch.

A request that reuses its patches across steps reads it after each step. The sums of a batch are one
gather and one scatter per tap between stretches; no number is read from the device here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from maskfx.ir.geometry.lanes import grid_level, is_image, padded
from maskfx.ir.programs.program import STRETCH, Interface
from maskfx.ir.programs.sources import Loaded
from maskfx.ops import add_changes, wide
from maskfx.runtime.sites.active import ActiveSites
from maskfx.runtime.sites.patches import Ids, PatchGrid

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
        owners: By stretch, the patch whose changes are each patch's: at levels whose sites cover
            several patches, all of them change with the site. Stretches of other levels are absent.
    """

    patches: PatchGrid
    boundaries: Mapping[str, int]
    stretches: int
    since_read: bool = False
    owners: dict[int, Ids] = field(default_factory=dict)
    _parts: list[tuple[ChangeSums, slice]] = field(default_factory=list, repr=False)

    def put(self, sums: ChangeSums, patches: slice) -> None:
        """Add the sums of a batch, of which these patches are the request's.

        A call that runs as one call per sample adds once per sample.
        """
        self._parts.append((sums, patches))

    def read(self) -> NDArray[np.float32] | None:
        """Return the relative change of each stretch's input per patch, 0 where none was replaced.

        Return None if no step was made since the last call. Row 0 is what follows the last stretch.
        """
        parts, self._parts = self._parts, []
        if not parts:
            return None
        if len(parts) > 1:
            whole = ChangeSums(torch.stack([one.sums[:, own] for one, own in parts]).sum(0))
            found = whole.relative
        else:
            found = parts[0][0].relative[:, parts[0][1]]
        if self.owners:
            found = found.copy()
            for stretch, owners in self.owners.items():
                found[stretch] = found[stretch, owners]
        return found

    def note_level(self, tap: str, segments: Group, sites: ActiveSites) -> None:
        """Note which patches share sites of the level of a tap between stretches."""
        level = next((grid_level(segment) for segment in filter(is_image, segments)), None)
        if level is None or len(self.patches.shape) != 2:
            return
        owners = self.patches.owners(sites.grid(level))
        if (owners != np.arange(len(owners))).any():
            self.owners[self.boundaries[tap]] = owners


@dataclass(eq=False)
class ChangeSums:
    """(stretches + 1, patches, 2): sums of a batch's changes and of the values before."""

    sums: Tensor

    @cached_property
    def relative(self) -> NDArray[np.float32]:
        """Return the relative changes; all requests of a batch compute them once."""
        change, before = self.sums.detach().cpu().numpy().astype(np.float64).transpose(2, 0, 1)
        found = np.divide(change, before, out=np.zeros_like(change), where=before > 0)
        found[np.isnan(found)] = np.inf
        return np.asarray(found, np.float32)


class WatchedCache(Protocol):
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

    def __init__(self, caches: Sequence[WatchedCache], since_read: bool = False) -> None:
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
        self._ranges: dict[tuple[str, ...], tuple[Tensor, Tensor]] = {}
        self._firsts: dict[tuple[int, ...], Tensor] = {}

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
        before, new = rows
        summed = self.sums_of(tap, segments, place, table, new.dtype)
        add_changes(before, new, place.target, *summed)

    def sums_of(
        self,
        tap: str,
        segments: tuple[str, ...],
        place: Place,
        table: Tensor,
        dtype: torch.dtype,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return what `maskfx.ops.replace_all` takes after the rows of a tap."""
        if self._sums is None:
            size = self._stretches + 1, int(self._starts[-1]), 2
            self._sums = torch.zeros(size, dtype=wide(dtype), device=table.device)
        if segments not in self._ranges:
            sizes = torch.from_numpy(np.array(place.sizes, np.int64))
            self._ranges[segments] = sizes, self._firsts_of(place)
        return table, *self._ranges[segments], self._sums[self.boundaries[tap]]

    def sums_at(self, stretch: int) -> list[NDArray[np.float64]]:
        """Return each cache's sums by patch of the taps that a stretch reads."""
        if self._sums is None:
            sums = np.zeros((int(self._starts[-1]), 2))
        else:
            sums = self._sums[stretch].double().cpu().numpy()
        return [sums[a:b] for a, b in pairwise(self._starts)]

    def finish(self) -> None:
        """Give each cache the part of the sums that is about its rows."""
        if not any(self._watching):
            return
        size = self._stretches + 1, int(self._starts[-1]), 2
        sums = ChangeSums(torch.zeros(size) if self._sums is None else self._sums)
        for found, start, stop in zip(self._watching, self._starts, self._starts[1:], strict=False):
            if found is not None:
                found.put(sums, slice(start, stop))

    def _firsts_of(self, place: Place) -> Tensor:
        """Return the first patch of the request of each range of rows; -1 if it isn't watched."""
        key = (len(place.sizes), *place.batches)
        if key not in self._firsts:
            found = [
                -1 if watched is None else int(start)
                for watched, start in zip(self._watching, self._starts, strict=False)
            ]
            member = np.repeat(np.arange(len(place.batches)), place.batches)[place.elements]
            self._firsts[key] = torch.tensor(found)[torch.from_numpy(member)]
        return self._firsts[key]


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
