"""The active sites of one call at every level, and index tables over them.

All tables follow from the mask and the sizes alone. Sites count row by row from the upper left.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from maskfx.export.host.arrays import Bools, Index
from maskfx.export.host.layout import HostLayout, Size
from maskfx.ir.geometry.grids import Floats, full_window, mask_at, window_weights
from maskfx.ir.geometry.lines import (
    Numbered,
    by_count,
    is_apart,
    line_count,
    lines_of,
    lines_of_each,
)

Place = tuple[int | None, int]  # a level (None: packed tokens), and a region


class Sites:
    """Computes the active sites of one call and its tables, each at its first use.

    Args:
        layout: the levels and segments.
        sizes: the sizes of the call by role.
        mask: the active sites of the finest level, or of the packed tokens; None for all.
        regions: the active sites of regions that have others than the mask's, by number.
    """

    def __init__(
        self,
        layout: HostLayout,
        sizes: Mapping[str, int],
        mask: Bools | None,
        regions: Mapping[int, Bools] | None = None,
    ) -> None:
        self.layout, self.sizes, self.mask = layout, dict(sizes), mask
        self.regions = dict(regions or {})
        self._first = first_alike(mask, self.regions)
        self._masks: dict[Place, Bools] = {}
        self._active: dict[Place, Index] = {}
        self._rest: dict[Place, Index] = {}
        self._windows: dict[tuple[str, int], tuple[Index, Index]] = {}
        self._entries: dict[tuple[Place, Place], tuple[Index, Index]] = {}

    @property
    def full(self) -> bool:
        return self.mask is None

    # Sizes.

    @property
    def frames(self) -> int:
        """The frames of a video, each with the sites of every level."""
        return self.sizes.get("frames", 1)

    def grid(self, level: int) -> Size:
        """Return the height and width of a level."""
        spec = self.layout.levels[level]
        if spec.parent is None:
            return self.sizes["y"], self.sizes["x"]
        return spec.size(self.grid(spec.parent))

    def count(self, name: str) -> int:
        """Return the number of sites of a segment, active or not."""
        segment = self.layout.segments[name]
        match segment.kind:
            case "grid":
                height, width = self.grid(segment.level)
                return self.frames * height * width
            case "fixed":
                return segment.count
            case "each":
                return segment.count * self.count(segment.of)
            case "fill":
                return -self.count(segment.of) % segment.multiple
            case "tokens":
                return self.sizes["tokens"]
        return self.sizes[segment.role]

    def active_count(self, name: str) -> int:
        return len(self.active(name))

    def rest_count(self, name: str) -> int:
        return self.count(name) - self.active_count(name)

    # Active sites.

    def place(self, name: str) -> Place:
        """Return the key of a segment's active sites; regions with the same sites share it."""
        segment = self.layout.segments[name]
        if segment.kind == "tokens":
            return None, self._first.get(segment.region, 0)
        region = self.layout.levels[segment.level].region
        return self._base(segment.level), self._first.get(region, 0)

    def _base(self, level: int) -> int:
        """Return the level that has the same sites and no region."""
        spec = self.layout.levels[level]
        return spec.parent if spec.region and spec.parent is not None else level

    def mask_at(self, place: Place) -> Bools:
        """Return the active sites of a region at a level, or of the packed tokens."""
        if place not in self._masks:
            self._masks[place] = self._mask_at(*place)
        return self._masks[place]

    def _mask_at(self, level: int | None, region: int) -> Bools:
        if self.mask is None:
            shape = (self.sizes["tokens"],) if level is None else self.grid(level)
            video = level is not None and self.frames > 1
            return np.ones((self.frames, *shape) if video else shape, dtype=bool)
        spec = None if level is None else self.layout.levels[level]
        if spec is None or spec.parent is None or level is None:
            return self.regions.get(region, self.mask)
        return mask_at(self.mask_at((spec.parent, region)), spec, self.grid(level))

    def active(self, name: str) -> Index:
        """Return the indices of a segment's active sites, in order; of a text, all."""
        if not self.layout.segments[name].is_image:
            return np.arange(self.count(name))
        place = self.place(name)
        if place not in self._active:
            self._active[place] = np.flatnonzero(self.mask_at(place))
        return self._active[place]

    def rest(self, name: str) -> Index:
        """Return the indices of a segment's inactive sites, in order; of a text, none."""
        if not self.layout.segments[name].is_image:
            return np.arange(0)
        place = self.place(name)
        if place not in self._rest:
            self._rest[place] = np.flatnonzero(~self.mask_at(place))
        return self._rest[place]

    def laid_out(self, segments: Sequence[str], pick: Callable[[str], Index]) -> Index:
        """Return the indices that `pick` returns, counted through all segments."""
        out, base = [np.arange(0)], 0
        for name in segments:
            out.append(pick(name) + base)
            base += self.count(name)
        return np.concatenate(out)

    def numbered(self, name: str, axis: str, rest: bool = False, window: str = "") -> Numbered:
        """Return the line of each active site, or of each of the rest, and how many lines are."""
        segment = self.layout.segments[name]
        if segment.kind == "each":
            return lines_of_each(segment.count, 0 if rest else self.count(segment.of))
        grid = self.grid(segment.level)
        count = line_count(axis, grid, self.frames)
        if not rest:
            index = self.active(name)
        else:
            index = self.window(window)[1] if window else self.rest(name)
        found = lines_of(axis, index, grid)
        if not is_apart(axis):
            return found, count
        masked = np.flatnonzero(self.mask_at((self._base(segment.level), 0)))
        return by_count((lines_of(axis, masked, grid), count), found), count

    # Tables of one request.

    def enter(self, before: str, after: str) -> tuple[Index, Index]:
        """Return where each active site of `after` lies in [active of `before` | loaded].

        Also return the sites whose rows are loaded.
        """
        key = (self.place(before), self.place(after))
        if key not in self._entries:
            here, there = self.active(before), self.active(after)
            place = np.full(self.count(before), -1)
            place[here] = np.arange(len(here))
            missing = there[place[there] < 0]
            place[missing] = np.arange(len(here), len(here) + len(missing))
            self._entries[key] = place[there], missing
        return self._entries[key]

    def missing(self, before: Sequence[str], after: Sequence[str]) -> Index:
        """Return the sites that are active in `after` but not in `before`, counted through."""
        out, base = [np.arange(0)], 0
        for old, new in zip(before, after, strict=True):
            if self.layout.segments[old].is_image:
                out.append(self.enter(old, new)[1] + base)
                base += self.count(old)
        return np.concatenate(out)

    def window(self, name: str) -> tuple[Index, Index]:
        """Return a window's (active targets, places) indices into [active | halo | zero] sources.

        Also return the halo: the inactive sites that the windows of active targets read.
        """
        window = self.layout.windows[name]
        source = self._segment_of(window.source)
        key = name, self.place(source)[1]
        if key not in self._windows:
            grids = self.grid(window.source), self.grid(window.target)
            places = full_window(window, *grids, self.frames)
            here, sites = self.active(source), self.count(source)
            read = places[self.active(self._segment_of(window.target))]
            need = np.zeros(sites + 1, dtype=bool)
            need[read] = True
            need[here] = need[sites] = False
            halo = np.flatnonzero(need)
            code = np.empty(sites + 1, dtype=np.int64)
            code[here] = np.arange(len(here))
            code[halo] = np.arange(len(here), len(here) + len(halo))
            code[sites] = len(here) + len(halo)
            self._windows[key] = code[read], halo
        return self._windows[key]

    def weights(self, name: str) -> Floats:
        """Return the (active targets, places) weights of a window."""
        window = self.layout.windows[name]
        each = window_weights(window, self.grid(window.source), self.grid(window.target))
        whole = np.tile(each, (self.frames, 1))
        found: Floats = whole[self.active(self._segment_of(window.target))]
        return found

    def parents(self, source: int, target: int) -> Index:
        """Return, for each active finer site, its row among the coarser level's active ones."""
        (hs, ws), (ht, wt) = self.grid(source), self.grid(target)
        y, x = np.divmod(self.active(self._segment_of(target)), wt)
        found: Index = self._row_of(source)[y * hs // ht * ws + x * ws // wt]
        return found

    def subsites(self, coarse: int, fine: int, patch: int) -> Index:
        """Return, for each active finer site, its index into (coarse row, patch, patch)."""
        (_, wc), (_, wf) = self.grid(coarse), self.grid(fine)
        y, x = np.divmod(self.active(self._segment_of(fine)), wf)
        row = self._row_of(coarse)[y // patch * wc + x // patch]
        found: Index = (row * patch + y % patch) * patch + x % patch
        return found

    def _row_of(self, level: int) -> Index:
        """Return the row of each site of a level among the active ones, or -1."""
        name = self._segment_of(level)
        here = self.active(name)
        row = np.full(self.count(name), -1)
        row[here] = np.arange(len(here))
        return row

    def _segment_of(self, level: int) -> str:
        return f"grid{level}"


def first_alike(mask: Bools | None, regions: Mapping[int, Bools]) -> dict[int, int]:
    """Return, for each region, the first one with the same sites; 0 is the mask."""
    if mask is None:
        return {}
    first = {mask.tobytes(): 0}
    return {n: first.setdefault(regions[n].tobytes(), n) for n in sorted(regions)}
