"""SharedRows: finds the rows of a batch's members where the buffers of one block hold them all."""

from __future__ import annotations

import weakref
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from maskfx.runtime.cache.placement import placed
from maskfx.runtime.cache.rolling import Group, RollingCache, RowBlock
from maskfx.runtime.cache.step_cache import StepCache


class SharedRows:
    """The rows of a batch's members, which lie in the buffers of one block.

    Holds no cache, so that a cache without other references returns its rows to the pool.

    Args:
        caches: The cache of each member; None for members that read no rows.
    """

    def __init__(self, caches: Sequence[StepCache | None]) -> None:
        rolling = [cache for cache in caches if isinstance(cache, RollingCache)]
        self.reading = [cache is not None for cache in caches]
        self._caches = [weakref.ref(cache) for cache in rolling]
        self._starts: dict[Group, tuple[bytes, NDArray[np.int64]]] = {}
        self._repeats = [cache.sizes["batch"] for cache in rolling]

    @property
    def block(self) -> RowBlock:
        first = self._caches[0]()
        assert first is not None, "a step holds the caches of its members"
        return first.block

    def starts(self, tap: str) -> tuple[bytes, NDArray[np.int64]]:
        """Return where each batch element's rows of a tap start, and a key of these places."""
        block = self.block
        group = block.group_of(block.interface.taps[tap].segments)
        if group not in self._starts:
            caches = [cache for known in self._caches if (cache := known()) is not None]
            starts = block.starts_of(group, caches)
            self._starts[group] = starts.tobytes(), starts
        return self._starts[group]

    def places(self, starts: NDArray[np.int64], picks: Sequence[Tensor]) -> Tensor:
        """Return the places of these sites of each member in the buffers."""
        read = [index for index, reads in zip(picks, self.reading, strict=True) if reads]
        chosen = [index for index, n in zip(read, self._repeats, strict=True) for _ in range(n)]
        return placed(chosen, [index.numel() for index in chosen], starts)


def shared_rows(caches: Sequence[StepCache | None]) -> SharedRows | None:
    """Return the rows of several members together if one block holds them."""
    read = [cache for cache in caches if cache is not None]
    blocks = {id(cache.block) if isinstance(cache, RollingCache) else None for cache in read}
    return SharedRows(caches) if len(read) > 1 and len(blocks) == 1 and None not in blocks else None
