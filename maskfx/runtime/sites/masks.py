"""Masks: bounds on the masks of edits, and which rows of a recorded step such edits can read.

An edit reads keys and values (or their inputs) of inactive sites, windows' rows where the window of
an active site covers an inactive one, and statistics of active sites, to subtract them from the
sums. Active sites only grow with the mask, so two masks, one that contains every edit's mask and
one that every edit's mask covers, bound all of these.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from maskfx.errors import MaskError
from maskfx.ir.geometry.grids import full_window, mask_shape
from maskfx.ir.geometry.lanes import is_image
from maskfx.ir.geometry.pyramid import Window
from maskfx.ir.programs.program import Interface
from maskfx.ir.programs.sources import Halo, Kept, Loaded, Rest, RestStats, RestSum
from maskfx.runtime.sites.active import ActiveSites
from maskfx.runtime.sites.mask import Mask


@dataclass(frozen=True, eq=False)
class Masks:
    """The set of masks that lie inside of `ever` and cover `always`."""

    ever: Tensor
    always: Tensor

    def __post_init__(self) -> None:
        for name, mask in (("ever", self.ever), ("always", self.always)):
            if not isinstance(mask, Tensor) or mask.dtype != torch.bool:
                raise MaskError(f"Masks.{name}: expected a boolean mask, got {mask!r:.60}")
        if self.ever.shape != self.always.shape or bool((self.always & ~self.ever).any()):
            raise MaskError(
                f"Masks.always: expected a mask of shape {tuple(self.ever.shape)} inside of "
                f"`ever`, got shape {tuple(self.always.shape)}"
            )
        if not bool(self.ever.any()):
            raise MaskError("Masks.ever is empty: no edit could have a mask; name some sites")

    @staticmethod
    def anywhere(*size: int) -> Masks:
        """Return the set of all masks of this size."""
        if not size or any(type(side) is not int or side < 1 for side in size):
            raise MaskError(
                f"Masks.anywhere{size!r:.60}: give the latent's height and width, or its number "
                "of tokens"
            )
        return Masks(torch.ones(size, dtype=torch.bool), torch.zeros(size, dtype=torch.bool))

    @staticmethod
    def inside(ever: Tensor) -> Masks:
        """Return the set of all masks inside of this one."""
        always = torch.zeros_like(ever) if isinstance(ever, Tensor) else ever
        return Masks(ever, always)

    @staticmethod
    def exactly(mask: Tensor) -> Masks:
        """Return the set of this mask alone."""
        return Masks(mask, mask)

    @property
    def any_mask(self) -> bool:
        return bool(self.ever.all()) and not bool(self.always.any())

    @property
    def nbytes(self) -> int:
        shared = self.ever.data_ptr() == self.always.data_ptr()
        return self.ever.nbytes + (0 if shared else self.always.nbytes)

    def allow(self, mask: Tensor) -> bool:
        """Return True if an edit may have this mask.

        An empty and a full mask are always allowed, because such edits read nothing.
        """
        inside = not bool((mask & ~self.ever).any()) and not bool((self.always & ~mask).any())
        return inside or not bool(mask.any()) or bool(mask.all())


StatsKey = tuple[tuple[str, ...], int]


@dataclass(frozen=True)
class Reach:
    """The sites whose rows edits can read, int32, by tap; of a tap that isn't named, all sites.

    For statistics (by row set and groups): `active` are the sites that only some edits leave out of
    the sum, `always` those that all edits leave out.
    """

    rows: dict[str, Tensor] = field(default_factory=dict)
    active: dict[StatsKey, Tensor] = field(default_factory=dict)
    always: dict[StatsKey, Tensor] = field(default_factory=dict)


def find_reach(interface: Interface, sizes: dict[str, int], masks: Masks) -> Reach:
    """Return the sites that edits with these masks can read, with any plan."""
    wanted = mask_shape(sizes)
    if masks.ever.shape != wanted:
        raise MaskError(
            f"Masks are of size {tuple(masks.ever.shape)}, the recording is of {wanted}; give "
            "masks of the latent's size"
        )
    if masks.any_mask:
        return Reach()
    largest = Mask(masks.ever)
    regions = {r: largest.everywhere for r in range(1, len(interface.regions) + 1)}
    ever = ActiveSites(interface.pyramid, sizes, largest, regions)
    always = ActiveSites(interface.pyramid, sizes, Mask(masks.always))
    reach = Reach()
    reads: dict[str, list[Tensor]] = {}
    alike: dict[bytes, Tensor] = {}  # most taps of a level are read at the same sites

    def one(sites: Tensor) -> Tensor:
        return alike.setdefault(sites.numpy().tobytes(), sites.int())

    for source in interface.inputs.values():
        match source:
            case Rest(tap, segments):
                reads.setdefault(tap, []).append(always.laid_out(segments, always.rest))
            case Loaded(tap, before, _):
                images = tuple(filter(is_image, before))
                reads.setdefault(tap, []).append(always.laid_out(images, always.rest))
            case Kept(tap, segments):
                reads.setdefault(tap, []).append(ever.laid_out(segments, ever.active))
            case Halo(tap, window):
                reads.setdefault(tap, []).append(halo_of(window, ever, always))
            case RestSum(tap, segments):
                count = sum(map(always.count, segments))
                reads.setdefault(tap, []).append(torch.arange(count))
            case RestStats(tap, segments):
                key = segments, interface.taps[tap].stats
                images = tuple(filter(is_image, segments))
                fixed = always.laid_out(images, always.active)
                left = ever.laid_out(images, ever.active)
                reach.active[key] = one(left[~torch.isin(left, fixed)])
                reach.always[key] = one(fixed)
    for tap, sites in reads.items():
        read = torch.cat(sites).unique()
        if len(read) < sum(map(ever.count, filter(is_image, interface.taps[tap].segments))):
            reach.rows[tap] = one(read)
    return reach


def halo_of(window: Window, ever: ActiveSites, always: ActiveSites) -> Tensor:
    """Return the sites that can be inactive while the window of an active site reads them."""
    source, target = ever.grid(window.source), ever.grid(window.target)
    places = full_window(window, source, target, ever.pyramid.frames)
    read = torch.from_numpy(places)[ever.active(f"grid{window.target}")].unique()
    inside = read[read < ever.count(f"grid{window.source}")]
    found: Tensor = inside[~torch.isin(inside, always.active(f"grid{window.source}"))]
    return found
