"""StretchSites: the active sites of a request whose stretches are chosen while its step runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from maskfx.ir.geometry.pyramid import Pyramid
from maskfx.runtime.sites.active import ActiveSites
from maskfx.runtime.sites.mask import Mask


class StretchSites(ActiveSites):
    """Active sites of regions that are chosen one after another; others can't be read before.

    Tables that were made for the first regions stay valid when later ones are chosen.

    Args:
        pyramid: The levels of the picture.
        sizes: The request's sizes by role.
        within: The sites that may be chosen.
    """

    def __init__(self, pyramid: Pyramid, sizes: dict[str, int], within: Mask) -> None:
        super().__init__(pyramid, sizes, within)
        self._chosen: dict[int, Mask] = {}
        self.regions: Mapping[int, Mask] = self._chosen

    @property
    def counts(self) -> tuple[int, ...]:
        """Return the sizes alone, since the sites aren't known before the step."""
        return tuple(self.sizes.values())

    @property
    def are_known(self) -> bool:
        """Return True if the last stretch is chosen, and with it the mask."""
        return 0 in self._chosen

    def choose(self, region: int, sites: Mask) -> None:
        """Set the active sites of a region; 0 stands for the mask, the sites of the output."""
        assert region not in self._chosen, f"the sites of region {region} were chosen before"
        alike = (known for known, mask in self._chosen.items() if mask == sites)
        self._alike[region] = next(alike, region)
        self._chosen[region] = sites

    def has(self, region: int) -> bool:
        """Return True if the sites of a region are chosen."""
        return region in self._chosen

    def chosen(self, region: int) -> Mask:
        return self._chosen[region]

    def firsts(self, regions: Sequence[int]) -> list[int]:
        """Return, for each region, the first one with the same sites; all have to be chosen."""
        return list(map(self._number, regions))

    def _number(self, region: int) -> int:
        assert region in self._chosen, f"the sites of region {region} are read before their choice"
        return self._alike[region]
