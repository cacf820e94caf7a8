"""ActiveSites: which sites of one request are active at every level, and index tables for them.

All tables depend on a mask and the request's sizes alone, not on a step's values, so they are built
once per mask. Tables of a full grid depend on its size alone and are shared.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from maskfx.ir.geometry.cuts import piece_of
from maskfx.ir.geometry.grids import full_window, window_weights
from maskfx.ir.geometry.lanes import (
    filled,
    fixed_count,
    grid_level,
    is_image,
    padded,
    segment_region,
)
from maskfx.ir.geometry.pyramid import Pyramid, Window
from maskfx.ir.lru import LruCache
from maskfx.runtime.sites.mask import Mask

# a level (None: packed tokens; or the name of a part of these) and a region
Place = tuple[int | str | None, int]


class ActiveSites:
    """Computes the active sites of one request and their index tables, at their first use.

    Args:
        pyramid: The levels of the picture.
        sizes: The request's sizes by role.
        mask: The active sites of the finest level; None makes all sites active.
        regions: The active sites of regions that have others than the mask's, by number.
    """

    def __init__(
        self,
        pyramid: Pyramid,
        sizes: dict[str, int],
        mask: Mask | None,
        regions: Mapping[int, Mask] | None = None,
    ) -> None:
        self.pyramid, self.sizes, self.mask = pyramid, sizes, mask
        self.regions = regions or {}
        self._alike = alike(mask, self.regions)
        self._grids: dict[int, tuple[int, int]] = {}
        self._places: dict[str, Place] = {}
        self._levels: dict[Place, Mask] = {}
        self._windows: dict[tuple[Window, int, int], tuple[Tensor, Tensor]] = {}
        self._entries: dict[tuple[Place, Place], tuple[Tensor, Tensor]] = {}

    @property
    def full(self) -> bool:
        return self.mask is None

    @property
    def are_known(self) -> bool:
        """Return True if the active sites of all regions can be read."""
        return True

    @cached_property
    def counts(self) -> tuple[int, ...]:
        """Return sizes and active-site counts; equal for requests with as many rows and keys."""
        levels = self.pyramid.levels if "y" in self.sizes else []
        segments = [f"grid{n}" for n, level in enumerate(levels) if not level.region]
        segments += self.pyramid.cuts.parts("image") if "tokens" in self.sizes else []
        regions = (self.regions[region].count for region in sorted(self.regions))
        return (*self.sizes.values(), *map(self.active_count, segments), *regions)

    def grid(self, level: int) -> tuple[int, int]:
        """Return the height and width of a level."""
        if level not in self._grids:
            spec = self.pyramid.levels[level]
            base = (self.sizes["y"], self.sizes["x"])
            self._grids[level] = base if spec.parent is None else spec.size(self.grid(spec.parent))
        return self._grids[level]

    def count(self, segment: str) -> int:
        """Return the number of sites of a segment, active or not."""
        level, fixed, filling = grid_level(segment), fixed_count(segment), filled(segment)
        if filling is not None:
            return -sum(map(self.count, filling[1].split("+"))) % filling[0]
        padding = padded(segment)
        if padding is not None:
            return padding[0] - self.count(padding[1])
        if level is not None:
            h, w = self.grid(level)
            return self.pyramid.frames * h * w
        if fixed is not None:
            return fixed
        if piece_of(segment) is not None:
            return self.pyramid.cuts.size(segment, self.sizes)
        return self.sizes["tokens" if is_image(segment) else segment]

    def place(self, segment: str) -> Place:
        """Return the key of an image segment's active sites: a level, or tokens, and a region.

        Regions with the same sites share the number of the first of them; 0 is the mask itself.
        """
        found = self._places.get(segment)
        if found is None:
            level = grid_level(segment)
            if level is None:
                part = segment.split("@")[0] if piece_of(segment) is not None else None
                found = part, self._number(segment_region(segment))
            else:
                found = self._base(level), self._number(self.pyramid.levels[level].region)
            self._places[segment] = found
        return found

    def firsts(self, regions: Sequence[int]) -> list[int]:
        """Return, for each region, the first one with the same sites; 0 is the mask."""
        return [self._alike.get(region, 0) for region in regions]

    def flags(self, base: str, regions: Sequence[int]) -> list[bytes]:
        """Return which sites of a segment without a region are active, for each region.

        One byte for each site: 1 if it is active, else 0.
        """
        level: int | str | None = base if piece_of(base) is not None else grid_level(base)
        if padded(base) is not None:  # active with all sites of the image
            return [bytes([self.full]) * self.count(base)] * len(regions)
        derived = isinstance(level, str) or (
            level is not None and self.pyramid.levels[level].parent is not None
        )
        if self.mask is None or derived:
            return [self.mask_at((level, region)).content for region in regions]
        return [self.regions.get(region, self.mask).content for region in regions]

    def _number(self, region: int) -> int:
        return self._alike.get(region, 0)

    def _base(self, level: int) -> int:
        """Return the level that has the same sites and no region."""
        spec = self.pyramid.levels[level]
        return spec.parent if spec.region and spec.parent is not None else level

    def mask_at(self, place: Place) -> Mask:
        """Return a region's mask at a level, or over packed tokens."""
        if place not in self._levels:
            self._levels[place] = self._mask_at(*place)
        return self._levels[place]

    def _mask_at(self, level: int | str | None, region: int) -> Mask:
        if isinstance(level, str):
            start, stop = self.pyramid.cuts.span(level, self.sizes)
            return Mask(self.mask_at((None, region)).sites[start:stop])
        if self.mask is None:
            own = self.pyramid
            shape = (self.sizes["tokens"],) if level is None else own.sites_shape(self.grid(level))
            return Mask(torch.ones(shape, dtype=torch.bool))
        parent = None if level is None else self.pyramid.levels[level].parent
        if level is None or parent is None:
            return self.regions.get(region, self.mask)
        return self.mask_at((parent, region)).at(self.pyramid.levels[level], self.grid(level))

    def active(self, segment: str) -> Tensor:
        """Return the indices of the active sites of a segment, in order."""
        if not is_image(segment):
            return torch.arange(self.count(segment))
        if padded(segment) is not None:
            return torch.arange(self.count(segment) if self.full else 0)
        return self.mask_at(self.place(segment)).active

    def active_count(self, segment: str) -> int:
        if self.mask is None or not is_image(segment):
            return self.count(segment)
        return self.active(segment).shape[0]

    def rest(self, segment: str) -> Tensor:
        """Return the indices of the inactive sites of a segment."""
        if not is_image(segment):
            return torch.arange(0)
        if padded(segment) is not None:
            return torch.arange(0 if self.full else self.count(segment))
        return self.mask_at(self.place(segment)).rest

    def laid_out(self, segments: Sequence[str], pick: Callable[[str], Tensor]) -> Tensor:
        """Return the indices that `pick` returns for each segment, in the concatenated segments."""
        out, base = [], 0
        for segment in segments:
            out.append(pick(segment) + base if base else pick(segment))
            base += self.count(segment) if len(segments) > 1 else 0
        return out[0] if len(out) == 1 else torch.cat(out)

    def enter(self, before: str, after: str) -> tuple[Tensor, Tensor]:
        """Return where each active site of `after` lies in [active of `before` | loaded].

        Also returns the sites whose rows are loaded.
        """
        if padded(before) is not None:
            return torch.arange(self.active_count(before)), torch.arange(0)
        key = (self.place(before), self.place(after))
        if key not in self._entries:
            here, there = self.active(before), self.active(after)
            place = torch.full((self.count(before),), -1)
            place[here] = torch.arange(len(here))
            missing = there[place[there] < 0]
            place[missing] = torch.arange(len(here), len(here) + len(missing))
            self._entries[key] = place[there], missing
        return self._entries[key]

    def window(self, window: Window) -> tuple[Tensor, Tensor]:
        """Return a window's (active targets, places) indices into [active | halo | zero] sources.

        Also returns the halo: the inactive sites that the windows of active targets read.
        """
        bare = replace(window, source=self._base(window.source), target=self._base(window.target))
        regions = [self.place(f"grid{n}")[1] for n in (window.source, window.target)]
        key = bare, regions[0], regions[1]
        if key not in self._windows:
            source, target = self.grid(window.source), self.grid(window.target)
            frames = self.pyramid.frames
            places = full_window(bare, source, target, frames)
            sites = frames * source[0] * source[1]
            here = self.active(f"grid{window.source}")
            if self.mask is None:
                self._windows[key] = torch.from_numpy(places), here[:0]
            else:
                read = places[self.active(f"grid{window.target}").numpy()]
                need = np.zeros(sites + 1, dtype=bool)
                need[read] = True
                need[here.numpy()] = need[sites] = False
                halo = need.nonzero()[0]
                code = np.empty(sites + 1, dtype=np.int64)
                code[here.numpy()] = np.arange(len(here))
                code[halo] = np.arange(len(here), len(here) + len(halo))
                code[sites] = len(here) + len(halo)
                self._windows[key] = torch.from_numpy(code[read]), torch.from_numpy(halo)
        return self._windows[key]

    def weights(self, window: Window) -> Tensor:
        """Return the (targets, places) weights of a window on the full grid."""
        bare = replace(window, source=self._base(window.source), target=self._base(window.target))
        sizes = self.grid(window.source), self.grid(window.target)
        return torch.from_numpy(np.tile(window_weights(bare, *sizes), (self.pyramid.frames, 1)))

    def parents(self, source: int, target: int) -> Tensor:
        """Return, for each active finer site, its row among the coarser level's active ones."""
        (hs, ws), (ht, wt) = self.grid(source), self.grid(target)
        y, x = np.divmod(self.active(f"grid{target}").numpy(), wt)
        return torch.from_numpy(self._place(source)[y * hs // ht * ws + x * ws // wt])

    def subsites(self, coarse: int, fine: int, patch: int) -> Tensor:
        """Return, for each active finer site, its index into (coarse row, patch, patch)."""
        (_, wc), (_, wf) = self.grid(coarse), self.grid(fine)
        y, x = np.divmod(self.active(f"grid{fine}").numpy(), wf)
        row = self._place(coarse)[y // patch * wc + x // patch]
        return torch.from_numpy((row * patch + y % patch) * patch + x % patch)

    def _place(self, level: int) -> NDArray[np.int64]:
        here = self.active(f"grid{level}").numpy()
        place = np.full(self.count(f"grid{level}"), -1)
        place[here] = np.arange(len(here))
        return place


def alike(mask: Mask | None, regions: Mapping[int, Mask]) -> dict[int, int]:
    """Return, for each region, the first one with the same sites; 0 is the mask."""
    if mask is None:
        return {}
    first = {mask: 0}
    return {region: first.setdefault(regions[region], region) for region in sorted(regions)}


class ActiveSitesCache:
    """Caches the ActiveSites of the most recently used masks."""

    def __init__(self, limit: int = 128) -> None:
        self._known: LruCache[object, ActiveSites] = LruCache(limit)

    def get(
        self,
        program: str,
        pyramid: Pyramid,
        sizes: dict[str, int],
        mask: Mask | None,
        regions: Mapping[int, Mask] | None = None,
    ) -> ActiveSites:
        key = program, frozenset(sizes.items()), mask, frozenset((regions or {}).items())
        return self._known.find(key, lambda: ActiveSites(pyramid, sizes, mask, regions))
