"""The calls of a patch session: how each is executed, and what is known between them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from math import prod

import numpy as np
from torch import Tensor

from maskfx.ir.geometry.grids import Floats
from maskfx.runtime.cache.rolling.rolling_cache import RollingCache
from maskfx.runtime.reuse.judges import Bools
from maskfx.runtime.reuse.kept_outputs import KeptOutputs
from maskfx.runtime.reuse.patch_choice import PatchChoice
from maskfx.runtime.reuse.patches import PatchState
from maskfx.runtime.reuse.session import Times
from maskfx.runtime.sites.patches import PatchGrid


class PatchCall(Enum):
    """How one call is executed."""

    DENSE = "dense"  # in full; no later call reads it
    RECORD = "record"  # in full, as the first recording
    WHOLE = "whole"  # in full and not recorded, as the calls before read no rows
    PATCHES = "patches"  # its patches that changed, or all of them


@dataclass(frozen=True)
class PendingCall:
    """A call returned by `ask` whose result hasn't been passed to `take` yet."""

    kind: PatchCall
    number: int  # of the branch's calls, from 0
    inputs: Mapping[str, object]
    noise: float
    computed: Bools | None = None  # by stretch and patch
    everywhere: bool = True  # whether sites outside of the mask are computed too
    choice: PatchChoice | None = None  # of what is computed, made while the step runs

    @property
    def done(self) -> PendingCall:
        """Return the call with what its step has computed."""
        return self if self.choice is None else replace(self, computed=self.choice.computed)


def shares_of(pending: PendingCall, grid: PatchGrid, mask: Tensor | None) -> Floats:
    """Return the computed share of all sites, by stretch; one number for a call in full.

    Args:
        pending: The call.
        grid: The patches.
        mask: The sites to which calls are restricted unless they compute everywhere.
    """
    if pending.computed is None:
        return np.ones(1)
    sizes = grid.sizes
    if not pending.everywhere and mask is not None:
        inside = mask.reshape(-1).numpy()
        sizes = np.bincount(grid.ids, weights=inside, minlength=grid.count)
    return np.asarray((pending.computed * sizes).sum(1) / prod(grid.shape))


@dataclass(frozen=True)
class ObservedCall:
    """A call that computed all patches, as training of a judge reads it.

    Args:
        branch: The guidance branch.
        inputs: The denoiser's input, by site.
        outputs: The denoiser's output, by site.
        rates: The relative change of each stretch's input since the call before, by patch; infinite
            at the first call.
        noise: The time of the step divided by that of the first one.
    """

    branch: str
    inputs: Tensor
    outputs: Tensor
    rates: Floats
    noise: float


LISTED = 32  # stretches that are counted apart


@dataclass
class StretchCounts:
    """Sites of one stretch: those computed and all, summed over calls."""

    computed: float = 0.0
    total: float = 0.0


@dataclass
class Branch:
    """State of one guidance branch."""

    calls: int = 0
    first_time: float | None = None
    state: PatchState | None = None
    cache: RollingCache | None = None
    outputs: KeptOutputs | None = None
    read: Tensor | None = None  # the input as the first stretch last read it, by site
    full: int = 0  # number of the last call that computed all sites
    partial: bool = True  # whether the last call that kept patches computed some
    stale: bool = False  # whether a call was computed whose rows the cache lacks
    refused: bool = False

    def noise(self, times: Times) -> float:
        """Return the time of a call divided by that of the first one."""
        if self.first_time is None:
            self.first_time = times[0]
        return times[0] / self.first_time if self.first_time else 1.0

    def fits(self, found: Tensor | None) -> bool:
        """Return False for a call of another shape, as when guidance ends."""
        if self.read is None or found is None:
            return (self.read is None) == (found is None)
        return self.read.shape == found.shape

    def close(self) -> None:
        if self.cache is not None:
            self.cache.close()
        self.cache, self.state, self.read = None, None, None


@dataclass
class PatchCounts:
    """Sites whose patches were computed, mean over stretches, and all sites, summed over calls.

    `stretches` has the same of each stretch, from 1; those from `LISTED` on are counted together.
    Calls that compute everything without a choice aren't part of it.
    """

    computed: float = 0.0
    total: float = 0.0
    whole: PatchCounts | None = None  # which these are a part of
    stretches: dict[int, StretchCounts] = field(default_factory=dict)

    def add(self, shares: Floats, sites: int) -> None:
        """Add a call.

        Args:
            shares: The computed share of the sites, by stretch; one number for a call in full.
            sites: The number of sites.
        """
        self.computed += float(shares.mean()) * sites
        self.total += sites
        for number, share in enumerate(shares.tolist() if len(shares) > 1 else (), 1):
            own = self.stretches.setdefault(min(number, LISTED), StretchCounts())
            own.computed += share * sites
            own.total += sites
        if self.whole is not None:
            self.whole.add(shares, sites)

    def clear(self) -> None:
        """Forget all calls."""
        self.computed = self.total = 0.0
        self.stretches.clear()

    @property
    def share(self) -> float:
        return self.computed / self.total if self.total else 1.0
