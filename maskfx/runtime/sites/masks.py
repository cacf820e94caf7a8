"""What edits can read of a recorded step, if their masks are known to some extent.

An edit reads keys and values (or their inputs) where it is inactive, windows' rows where an active
site looks at an inactive one, and statistics of active sites, to take them off the sums. Active
sites only grow with the mask, so two masks, one that every edit lies in and one that every edit
covers, bound all of these.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from maskfx.errors import MaskError
from maskfx.ir.lanes import is_image
from maskfx.ir.program import Halo, Interface, Loaded, Rest, RestStats, RestSum
from maskfx.ir.pyramid import Window
from maskfx.runtime.sites.active import ActiveSites, full_window


@dataclass(frozen=True, eq=False)
class Masks:
    """All masks that lie inside of `ever` and cover `always`."""

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
        """Every mask of this size."""
        return Masks(torch.ones(size, dtype=torch.bool), torch.zeros(size, dtype=torch.bool))

    @staticmethod
    def inside(ever: Tensor) -> Masks:
        """Every mask inside of this one."""
        return Masks(ever, torch.zeros_like(ever))

    @staticmethod
    def exactly(mask: Tensor) -> Masks:
        """This mask alone."""
        return Masks(mask, mask)

    @property
    def any_mask(self) -> bool:
        return bool(self.ever.all()) and not bool(self.always.any())

    @property
    def nbytes(self) -> int:
        shared = self.ever.data_ptr() == self.always.data_ptr()
        return self.ever.nbytes + (0 if shared else self.always.nbytes)

    def allow(self, mask: Tensor) -> bool:
        """May an edit have this mask? One of nothing and one of everything read nothing."""
        inside = not bool((mask & ~self.ever).any()) and not bool((self.always & ~mask).any())
        return inside or not bool(mask.any()) or bool(mask.all())

    def same_as(self, other: Masks | None) -> bool:
        return (
            other is not None
            and torch.equal(self.ever, other.ever)
            and torch.equal(self.always, other.always)
        )


StatsKey = tuple[tuple[str, ...], int]


@dataclass(frozen=True)
class Reach:
    """Per tap the sites whose rows can be read, int32; a tap that isn't named: all of its sites.

    Of statistics (by row set and groups): the sites that some edits leave out of the sum, and those
    that all of them do.
    """

    rows: dict[str, Tensor] = field(default_factory=dict)
    active: dict[StatsKey, Tensor] = field(default_factory=dict)
    always: dict[StatsKey, Tensor] = field(default_factory=dict)


def find_reach(interface: Interface, sizes: dict[str, int], masks: Masks) -> Reach:
    """What edits under these masks, whatever their plans, can read."""
    wanted = (sizes["y"], sizes["x"]) if "y" in sizes else (sizes["tokens"],)
    if masks.ever.shape != wanted:
        raise MaskError(
            f"Masks are of size {tuple(masks.ever.shape)}, the recording is of {wanted}; give "
            "masks of the latent's size"
        )
    if masks.any_mask:
        return Reach()
    everything = torch.ones_like(masks.ever)
    regions = {r: everything for r in range(1, len(interface.regions) + 1)}
    ever = ActiveSites(interface.pyramid, sizes, masks.ever, regions)
    always = ActiveSites(interface.pyramid, sizes, masks.always)
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
    """Sites that a window of some active site looks at while they are inactive."""
    source, target = ever.grid(window.source), ever.grid(window.target)
    places = full_window(window, source, target)
    read = places[ever.active(f"grid{window.target}")].unique()
    inside = read[read < source[0] * source[1]]
    found: Tensor = inside[~torch.isin(inside, always.active(f"grid{window.source}"))]
    return found
