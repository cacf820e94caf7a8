"""How much of a step each level of a denoiser's pyramid takes, and what a mask costs by that.

Data and NumPy alone: a worker measures the shares, and servers without torch read them. A mask of
scattered strokes has more active sites at coarse levels than a square of as many sites.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from maskfx.ir.geometry.grids import Bools, Size, level_size, mask_at


@dataclass(frozen=True)
class LevelShare:
    """A level, as `maskfx.ir.geometry.pyramid.Level` has it, and what its sites take.

    Args:
        parent: The number of the level that it is derived from; None for the mask's.
        grow, divide, extra, times, offset: How its sites lie on its parent's.
        roll, fill, roll_part, fill_front, turn: How they are moved.
        per_site: FLOPs of a site, relative to those of a whole picture per site of the mask.
        per_pair: The same of attention, of a site and one that it attends to.
    """

    parent: int | None = None
    grow: Size = (0, 0)
    divide: Size = (1, 1)
    extra: Size = (0, 0)
    times: Size = (1, 1)
    offset: Size = (0, 0)
    roll: Size = (0, 0)
    fill: Size = (1, 1)
    roll_part: Size = (0, 0)
    fill_front: Size = (0, 0)
    turn: int = 0
    per_site: float = 1.0
    per_pair: float = 1.0


class MaskWork(NamedTuple):
    """What a mask computes in units of a whole picture's sites, and of their pairs."""

    sites: float
    pairs: float


def work_of(shares: Sequence[LevelShare], mask: Bools) -> MaskWork:
    """Return what the active sites of a mask take at all levels.

    With all sites masked it is about their number, and the number of their pairs.
    """
    masks: list[Bools] = []
    sites = pairs = 0.0
    for share in shares:
        if share.parent is None:
            masks.append(mask)
        else:
            parent = masks[share.parent]
            size = level_size(share, (parent.shape[0], parent.shape[1]))
            masks.append(mask_at(parent, share, size))
        active = float(np.count_nonzero(masks[-1]))
        sites += share.per_site * active
        pairs += share.per_pair * active * masks[-1].size
    return MaskWork(sites, pairs)
