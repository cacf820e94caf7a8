"""Mask: the edited sites of one request, with the coarser levels that follow from them."""

from __future__ import annotations

from collections.abc import Hashable, MutableMapping
from functools import cached_property
from math import prod

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from maskfx.ir.geometry.grids import Size, mask_at
from maskfx.ir.geometry.pyramid import Level
from maskfx.ir.weak_memo import WeakMemo

PARTS = 64  # masks whose parts are kept


class Mask:
    """An immutable boolean tensor in host memory; masks of equal shape and sites are equal.

    Args:
        sites: The tensor, which is copied; `flags` are the same values, flattened.
    """

    def __init__(self, sites: Tensor) -> None:
        self.sites = sites.detach().cpu().clone(memory_format=torch.contiguous_format)
        self.flags: NDArray[np.bool_] = self.sites.numpy().reshape(-1)
        self._bytes: bytes | None = None
        self._levels: dict[Hashable, Mask] = {}

    def __eq__(self, other: object) -> bool:
        if self is other or not isinstance(other, Mask):
            return self is other
        return self.content == other.content and self.shape == other.shape

    def __hash__(self) -> int:
        return hash(self.content)

    def __repr__(self) -> str:
        return f"Mask({self.count} of {'x'.join(map(str, self.shape))} sites)"

    def __or__(self, other: Mask) -> Mask:
        return Mask(self.sites | other.sites)

    @property
    def content(self) -> bytes:
        """Return one byte for each site, 1 for active ones."""
        if self._bytes is None:  # read for each stretch of each request
            self._bytes = self.flags.tobytes()
        return self._bytes

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.sites.shape)

    @cached_property
    def count(self) -> int:
        return int(np.count_nonzero(self.flags))

    @property
    def is_empty(self) -> bool:
        return self.count == 0

    @property
    def is_full(self) -> bool:
        return self.count == self.sites.numel()

    def covers(self, other: Mask) -> bool:
        return not bool((other.sites & ~self.sites).any())

    @cached_property
    def active(self) -> Tensor:
        """Return the indices of the active sites, in order."""
        return torch.from_numpy(np.flatnonzero(self.flags))

    @cached_property
    def rest(self) -> Tensor:
        """Return the indices of the inactive sites, in order."""
        return torch.from_numpy(np.flatnonzero(~self.flags))

    @cached_property
    def everywhere(self) -> Mask:
        """Return the mask of all sites."""
        return self if self.is_full else Mask(torch.ones_like(self.sites))

    def at(self, level: Level, size: Size) -> Mask:
        """Return the mask at a level derived from this one's: a site is active if any it covers is.

        Args:
            level: The derived level.
            size: Its height and width.
        """
        moves = level.offset, level.roll, level.roll_part, level.fill_front, level.turn
        key = level.times, level.divide, moves, size
        if key not in self._levels:
            self._levels[key] = Mask(torch.from_numpy(mask_at(self.sites.numpy(), level, size)))
        return self._levels[key]


class MaskCache:
    """Returns the Mask of a tensor, and the same one for as long as the tensor is unchanged."""

    def __init__(self) -> None:
        self._known: MutableMapping[Tensor, tuple[int, Mask]] = WeakIdKeyDictionary()
        self._parts: WeakMemo[list[Tensor]] = WeakMemo(PARTS)

    def of(self, sites: Tensor) -> Mask:
        if sites.is_inference():  # in-place changes can't be detected
            return Mask(sites)
        known = self._known.get(sites)
        if known is None or known[0] != sites._version:
            known = self._known[sites] = sites._version, Mask(sites)
        return known[1]

    def parts(self, sites: Tensor, shapes: tuple[tuple[int, ...], ...]) -> list[Tensor]:
        """Return the parts of a flat mask that these shapes have, one after another."""

        def parts() -> list[Tensor]:
            flat = sites.detach().split(list(map(prod, shapes)))
            return [part.view(shape).detach() for part, shape in zip(flat, shapes, strict=True)]

        return self._parts.made_of([sites], parts, shapes)
