"""PatchGrid: the patches of a request, squares of sites that are computed or kept together."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from maskfx.errors import InputError

Ids = NDArray[np.int64]


@dataclass(frozen=True)
class PatchGrid:
    """Divides the sites of a denoiser call into patches, which are numbered row by row.

    Args:
        shape: The shape of a mask of the call: (height, width) of the latent, or (tokens,). That of
            a video has its frames first; a patch lies in one of them.
        side: The sites along a patch's side. Patches at the lower and right edges may be smaller.
        grid: The rows and columns that packed tokens form. Without it, packed tokens are divided
            into runs of `side` squared tokens.
        first: The first packed token of this grid. Tokens outside of the grid, such as those of
            reference pictures, form one patch, the last.
    """

    shape: tuple[int, ...]
    side: int = 8
    grid: tuple[int, int] | None = None
    first: int = 0

    def __post_init__(self) -> None:
        if type(self.side) is not int or self.side < 1:
            raise InputError(f"PatchGrid: side={self.side!r}: give a whole number, 1 or more")
        if self.grid is not None:
            tokens = self.grid[0] * self.grid[1]
            if len(self.shape) != 1 or not 0 <= self.first <= self.shape[0] - tokens:
                raise InputError(
                    f"PatchGrid: grid={self.grid} from token {self.first} on doesn't fit a mask of "
                    f"shape {self.shape}; give the rows and columns of packed tokens, or None"
                )

    def __reduce__(self) -> tuple[object, ...]:
        return PatchGrid, (self.shape, self.side, self.grid, self.first)  # not what follows of it

    @cached_property
    def ids(self) -> Ids:
        """Return the patch of each site, flattened."""
        if len(self.shape) > 1:
            return self._each_frame(squares(self.shape[-2:], self.side))
        if self.grid is None:
            return np.arange(self.shape[0]) // self.side**2
        inside = squares(self.grid, self.side)
        found = np.full(self.shape[0], inside[-1] + 1)
        found[self.first : self.first + len(inside)] = inside
        return found

    @cached_property
    def count(self) -> int:
        return int(self.ids.max()) + 1 if self.ids.size else 0

    @cached_property
    def sizes(self) -> Ids:
        """Return the number of sites of each patch."""
        return np.bincount(self.ids, minlength=self.count)

    def at(self, size: tuple[int, int]) -> Ids:
        """Return the patch of each site of another level: that of the first site which it covers.

        Args:
            size: The height and width of the level.
        """
        return self._each_frame(self._frame_at(size))

    def _frame_at(self, size: tuple[int, int]) -> Ids:
        height, width = self.shape[-2:]
        y = np.minimum(np.arange(size[0]) * height // size[0], height - 1)
        x = np.minimum(np.arange(size[1]) * width // size[1], width - 1)
        first = squares((height, width), self.side).reshape(height, width)
        return first[y][:, x].reshape(-1)

    def _each_frame(self, numbers: Ids) -> Ids:
        """Return patches of all frames from those of the first."""
        if len(self.shape) == 2:
            return numbers
        height, width = self.shape[-2:]
        each = -(-height // self.side) * -(-width // self.side)
        frames = np.arange(self.shape[0])[:, None] * each
        return (frames + numbers).reshape(-1)

    def owners(self, size: tuple[int, int]) -> Ids:
        """Return for each patch the one that `at` names for the site which covers its first site.

        At a level whose sites cover several patches, only the first of these has a site.

        Args:
            size: The height and width of the level.
        """
        height, width = self.shape[-2:]
        firsts = np.unique(squares((height, width), self.side), return_index=True)[1]
        covered = [
            np.searchsorted(np.arange(level) * whole // level, places, side="right") - 1
            for level, whole, places in zip(
                size, (height, width), np.divmod(firsts, width), strict=True
            )
        ]
        return self._each_frame(self._frame_at(size).reshape(size)[covered[0], covered[1]])

    def mask(self, computed: NDArray[np.bool_]) -> Tensor:
        """Return the mask of the sites of these patches."""
        return torch.from_numpy(computed[self.ids]).view(self.shape)

    def touched(self, mask: Tensor) -> NDArray[np.bool_]:
        """Return which patches contain a site of a mask."""
        inside = mask.detach().cpu().reshape(-1).numpy()
        return np.asarray(np.bincount(self.ids, weights=inside, minlength=self.count) > 0)


def squares(shape: tuple[int, ...], side: int) -> Ids:
    """Return the square of each site of a grid, flattened."""
    y, x = (np.arange(size) // side for size in shape)
    columns = -(-shape[1] // side)
    return (y[:, None] * columns + x).reshape(-1)
