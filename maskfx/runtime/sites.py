"""Sites: which sites of one request are active at every level, and the tables that follow.

Everything here depends on a mask and the request's sizes alone, not on a step's values, so it is
built once per mask. Tables of a full grid depend on its size alone and are shared.
"""

from __future__ import annotations

from collections import OrderedDict
from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor

from maskfx.lanes import Pyramid, Window, filled, fixed_count, grid_level


class Sites:
    """The active sites of one request."""

    def __init__(self, pyramid: Pyramid, sizes: dict[str, int], mask: Tensor | None) -> None:
        self.pyramid, self.sizes, self.mask = pyramid, sizes, mask
        self._grids: dict[int, tuple[int, int]] = {}
        self._active: dict[str, Tensor] = {}
        self._rest: dict[str, Tensor] = {}
        self._windows: dict[Window, tuple[Tensor, Tensor]] = {}

    @property
    def full(self) -> bool:
        return self.mask is None

    def grid(self, level: int) -> tuple[int, int]:
        """Height and width of a level."""
        if level not in self._grids:
            spec = self.pyramid.levels[level]
            base = (self.sizes["y"], self.sizes["x"])
            self._grids[level] = base if spec.parent is None else spec.size(self.grid(spec.parent))
        return self._grids[level]

    def count(self, segment: str) -> int:
        """All sites of a segment."""
        level, fixed, filling = grid_level(segment), fixed_count(segment), filled(segment)
        if filling is not None:
            return -self.count(filling[1]) % filling[0]
        if level is not None:
            h, w = self.grid(level)
            return h * w
        if fixed is not None:
            return fixed
        return self.sizes["tokens" if segment == "image" else segment]

    def mask_at(self, level: int) -> Tensor:
        """The mask at a level: a coarser site is active if any site it covers is."""
        assert self.mask is not None
        spec = self.pyramid.levels[level]
        if spec.parent is None:
            return self.mask.view(self.grid(0))
        parent, (h, w) = self.mask_at(spec.parent), self.grid(level)
        if spec.times != (1, 1):
            up = parent.repeat_interleave(spec.times[0], 0).repeat_interleave(spec.times[1], 1)
            return up[:h, :w]
        pooled = F.max_pool2d(parent[None].float(), spec.divide, ceil_mode=True)[0]
        missing = (max(0, h - pooled.shape[0]), max(0, w - pooled.shape[1]))
        if any(missing):
            pooled = F.pad(pooled[None], (0, missing[1], 0, missing[0]), mode="replicate")[0]
        return pooled[:h, :w] > 0

    def active(self, segment: str) -> Tensor:
        """Indices of the active sites of a segment, in order."""
        if segment not in self._active:
            if self.mask is None or not (segment == "image" or segment.startswith("grid")):
                found = torch.arange(self.count(segment))
            elif segment == "image":
                found = self.mask.view(-1).nonzero()[:, 0]
            else:
                level = grid_level(segment)
                assert level is not None
                found = self.mask_at(level).reshape(-1).nonzero()[:, 0]
            self._active[segment] = found
        return self._active[segment]

    def active_count(self, segment: str) -> int:
        if self.mask is None or not (segment == "image" or segment.startswith("grid")):
            return self.count(segment)
        return self.active(segment).shape[0]

    def rest(self, segment: str) -> Tensor:
        """Indices of the inactive sites of an image segment."""
        if segment not in self._rest:
            keep = torch.ones(self.count(segment), dtype=torch.bool)
            keep[self.active(segment)] = False
            self._rest[segment] = keep.nonzero()[:, 0]
        return self._rest[segment]

    def window(self, window: Window) -> tuple[Tensor, Tensor]:
        """(active targets, places) indices into [active | halo | zero] sources; and the halo."""
        if window not in self._windows:
            source, target = self.grid(window.source), self.grid(window.target)
            places = full_window(window, source, target)
            sites = source[0] * source[1]
            here = self.active(f"grid{window.source}")
            if self.mask is None:
                self._windows[window] = places, here[:0]
            else:
                read = places.index_select(0, self.active(f"grid{window.target}"))
                need = torch.zeros(sites + 1, dtype=torch.bool)
                need[read.view(-1)] = True
                need[here] = False
                need[sites] = False
                halo = need.nonzero()[:, 0]
                code = torch.empty(sites + 1, dtype=torch.long)
                code[here] = torch.arange(len(here))
                code[halo] = torch.arange(len(here), len(here) + len(halo))
                code[sites] = len(here) + len(halo)
                self._windows[window] = code[read], halo
        return self._windows[window]

    def parents(self, source: int, target: int) -> Tensor:
        """For each active finer site, its row among the coarser level's active ones."""
        (hs, ws), (ht, wt) = self.grid(source), self.grid(target)
        fine = self.active(f"grid{target}")
        return self._place(source)[(fine // wt * hs // ht) * ws + fine % wt * ws // wt]

    def subsites(self, coarse: int, fine: int, patch: int) -> Tensor:
        """For each active finer site, its index into (coarse row, patch, patch)."""
        _, wc = self.grid(coarse)
        _, wf = self.grid(fine)
        sites = self.active(f"grid{fine}")
        y, x = sites // wf, sites % wf
        row = self._place(coarse)[(y // patch) * wc + x // patch]
        return (row * patch + y % patch) * patch + x % patch

    def _place(self, level: int) -> Tensor:
        here = self.active(f"grid{level}")
        place = torch.full((self.count(f"grid{level}"),), -1)
        place[here] = torch.arange(len(here))
        return place


@lru_cache(maxsize=256)
def full_window(window: Window, source: tuple[int, int], target: tuple[int, int]) -> Tensor:
    """(targets, places) site indices of a whole grid's window; outside is one past the last."""

    def axis(i: int) -> tuple[Tensor, Tensor]:
        if window.rounding:
            at = torch.arange(target[i])[:, None]
            if window.rounding == "nearest-exact":  # the centre of the finer site decides
                at = (2 * at + 1) * source[i] // (2 * target[i])
            else:
                at = at * source[i] // target[i]
            return at, at >= 0
        at = torch.arange(target[i])[:, None] * window.stride[i] - window.before[i]
        at = at + torch.arange(window.kernel[i])[None] * window.dilation[i]
        return at, (at >= 0) & (at < source[i])

    (y, in_y), (x, in_x) = axis(0), axis(1)
    index = y[:, None, :, None] * source[1] + x[None, :, None, :]
    inside = in_y[:, None, :, None] & in_x[None, :, None, :]
    outside = torch.tensor(source[0] * source[1])
    return torch.where(inside, index, outside).reshape(target[0] * target[1], -1)


class SitesMemo:
    """Sites of the masks seen last."""

    def __init__(self, limit: int = 128) -> None:
        self.limit = limit
        self._seen: OrderedDict[object, Sites] = OrderedDict()

    def get(
        self, program: str, pyramid: Pyramid, sizes: dict[str, int], mask: Tensor | None
    ) -> Sites:
        content = None if mask is None else mask.numpy().tobytes()
        key = (program, tuple(sorted(sizes.items())), content)
        found = self._seen.get(key)
        if found is None:
            found = self._seen[key] = Sites(pyramid, sizes, mask)
            if len(self._seen) > self.limit:
                self._seen.popitem(last=False)
        else:
            self._seen.move_to_end(key)
        return found
