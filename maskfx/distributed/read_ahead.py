"""ReadAhead: a rank reads rows in a store in a thread, ahead of the graph and of the next step.

Rows that the thread has read are in memory when the graph uses them; of others, and of what goes
wrong, the graph learns where it reads them itself. Knows nothing of messages.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from torch import Tensor

from maskfx.errors import CacheError
from maskfx.ir.programs.program import Program
from maskfx.ir.programs.sources import Cached, RestStats, RestSum
from maskfx.runtime.backends.eager import first_uses
from maskfx.runtime.batch.frame import Frame
from maskfx.runtime.batch.member import Member
from maskfx.runtime.cache.rows import Rows, in_memory, stored_parts
from maskfx.runtime.cache.step_cache import StepCache


@dataclass(frozen=True)
class ReadBatch:
    """Members of a program, whose rows are read in the order in which its graph uses them."""

    program: Program
    frame: Frame
    members: Sequence[Member]

    def rows(self) -> Iterator[tuple[Rows, Tensor]]:
        """Yield the rows that the graph reads, and their sites, in the order of its inputs."""
        for _, names in first_uses(self.program.module.graph):
            for name in names:
                yield from self._rows_of(name)

    def _rows_of(self, name: str) -> Iterator[tuple[Rows, Tensor]]:
        source = self.program.interface.inputs[name]
        if isinstance(source, Cached):
            yield from self.frame.stored(name, self.members)
        elif isinstance(source, RestStats):
            key = source.segments, self.program.interface.taps[source.tap].stats
            yield from self._active(lambda own: own.stats[key].values, source.segments)
        elif isinstance(source, RestSum):
            yield from self._active(lambda own: own.rows[source.tap], source.segments)

    def _active(
        self, rows_of: Callable[[StepCache], Rows], segments: tuple[str, ...]
    ) -> Iterator[tuple[Rows, Tensor]]:
        """Yield the rows of active sites, which are taken from sums over all sites."""
        recorded = self.frame.recorded
        for number, (member, index) in enumerate(
            zip(self.members, recorded.active(segments), strict=True)
        ):
            if member.cache is not None and recorded.rest_count(segments, number):
                yield rows_of(member.cache), index

    def with_caches(self, found: Callable[[StepCache], StepCache | None]) -> ReadBatch:
        """Return the members with other recordings; those without one read nothing."""
        members = [
            replace(one, cache=None if one.cache is None else found(one.cache))
            for one in self.members
        ]
        return replace(self, members=members)

    @property
    def is_stored(self) -> bool:
        """Whether rows are to be read from a store."""
        if self.frame.by_stretch:  # its sites are chosen while the step runs
            return False
        caches = [one.cache for one in self.members if one.cache is not None]
        return any(stored_parts(rows) for cache in caches for rows in cache.rows.values())


class ReadAhead:
    """Reads the rows of a step, and then those of the next one, until another step begins."""

    def __init__(self) -> None:
        self._ended = threading.Event()

    def begin(self, batches: Sequence[ReadBatch], then: Mapping[int, StepCache]) -> None:
        """Read ahead of a step that begins now.

        Args:
            batches: The batches of the step.
            then: The recording that the next step of a member reads, by the id of the recording
                that it reads now.
        """
        self.end()
        later = [batch.with_caches(lambda cache: then.get(id(cache))) for batch in batches]
        found = [batch for batch in [*batches, *later] if batch.is_stored]
        if found:
            self._ended = threading.Event()
            threading.Thread(
                target=read, args=(found, self._ended), daemon=True, name="maskfx reads ahead"
            ).start()

    def end(self) -> None:
        """Stop after the read in progress."""
        self._ended.set()


def read(batches: Sequence[ReadBatch], ended: threading.Event) -> None:
    """Read the rows of batches, unless this is ended; rows that can't be read end a batch."""
    for batch in batches:
        with suppress(CacheError):
            for rows, index in batch.rows():
                if ended.is_set():
                    return
                in_memory(rows, index)
