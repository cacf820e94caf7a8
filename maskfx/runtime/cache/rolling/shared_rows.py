"""SharedRows: finds the rows of a batch's members where the buffers of one block hold them all."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from typing import Protocol

from torch import Tensor

from maskfx.ir.programs.sources import Cached
from maskfx.runtime.cache.rolling.places import Batched, Picks
from maskfx.runtime.cache.rolling.rolling_cache import RollingCache
from maskfx.runtime.cache.rolling.set_rows import RowsAhead
from maskfx.runtime.cache.step_cache import StepCache


class Reading(Protocol):
    """A member of a batch: what it reads and replaces."""

    @property
    def cache(self) -> StepCache | None: ...

    @property
    def written(self) -> RollingCache | None: ...


class SharedRows:
    """The rows of a batch's members, which lie in the buffers of one block.

    Holds no cache and no buffer, so that these are freed when the requests end.

    Args:
        layout: The batch.
        caches: The caches of the members that read rows, by number.
    """

    def __init__(self, layout: Batched, caches: Mapping[int, RollingCache]) -> None:
        block = next(iter(caches.values())).block
        self._block = weakref.ref(block)
        self._places = block.places(layout, caches)

    def ahead(self) -> RowsAhead | None:
        """Return what reads rows of several taps at once; None if they aren't in host memory."""
        block = self._block()
        assert block is not None, "a step holds the caches of its members"
        if block.device.type != "cpu" or not self._places.are_known:
            return None
        return RowsAhead(block.rows, block.by_sets, self._places)

    def find(self, source: Cached, picks: Picks) -> tuple[Tensor, Tensor] | None:
        """Return the buffer of a source's tap and the places that it reads; None without one."""
        block = self._block()
        assert block is not None, "a step holds the caches of its members"
        buffer = block.rows.get(source.tap)
        return None if buffer is None else (buffer, self._places.read(source, picks))


def shared_rows(layout: Batched, members: Sequence[Reading]) -> SharedRows | None:
    """Return the rows of several members together if one block holds them."""
    caches: dict[int, RollingCache] = {}
    for number, member in enumerate(members):
        # a member that computes all sites reads nothing, but may replace rows
        cache = member.written if member.cache is None else member.cache
        if isinstance(cache, RollingCache):
            caches[number] = cache
        elif cache is not None:
            return None
    blocks = {id(cache.block) for cache in caches.values()}
    return SharedRows(layout, caches) if len(caches) > 1 and len(blocks) == 1 else None
