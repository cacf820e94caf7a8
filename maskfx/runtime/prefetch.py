"""Prefetcher: loads the cached rows that a step of a batch reads, from its start or before."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from torch import Tensor

from maskfx.ir.program import Program
from maskfx.runtime.backends.eager import Fetch, first_uses
from maskfx.runtime.batch.frame import Frame, Member
from maskfx.runtime.cache.loader import Loader, Loading


@dataclass
class Stopwatch:
    """Records when a graph requested each of its inputs, and when it received it."""

    started: float = 0.0
    stopped: float = 0.0
    marks: list[tuple[str, float, float]] = field(default_factory=list)

    def over(self, fetch: Fetch) -> Fetch:
        self.marks.clear()
        self.started = time.perf_counter()

        def timed(name: str) -> Tensor:
            asked = time.perf_counter()
            value = fetch(name)
            self.marks.append((name, asked, time.perf_counter()))
            return value

        return timed

    def stop(self) -> None:
        self.stopped = time.perf_counter()


AHEAD = 4  # steps whose loads may be in flight; a further one cancels the oldest


@dataclass(frozen=True)
class StartedLoad:
    """Prefetched loads of a later step."""

    frame: Frame
    caches: tuple[int, ...]
    loading: Loading


@dataclass
class Prefetcher:
    """Manages the loads of one denoiser; without a loader the graph picks rows on demand."""

    loader: Loader | None = None
    _begun: list[StartedLoad] = field(default_factory=list)
    _orders: dict[str, list[str]] = field(default_factory=dict)

    @contextmanager
    def step(
        self, program: Program, frame: Frame, members: Sequence[Member]
    ) -> Iterator[Loading | None]:
        """Provide the loads of the running step; cancel those that it leaves unread."""
        if self.loader is None or all(m.cache is None for m in members):
            yield None
            return
        loading = self._found(frame, members) or self._begin(program, frame, members)
        try:
            yield loading
        finally:
            loading.cancel()

    def ahead(self, program: Program, frame: Frame, members: Sequence[Member]) -> Loading:
        """Start the loads of a later step, unless they are in flight already."""
        known = self._of(frame, members)
        if known is not None:
            return known.loading
        loading = self._begin(program, frame, members)
        self._begun.append(StartedLoad(frame, caches_of(members), loading))
        while len(self._begun) > AHEAD:
            self._begun.pop(0).loading.cancel()
        return loading

    def forget_others(self, batches: Sequence[tuple[Program, Frame, Sequence[Member]]]) -> None:
        """Cancel the prefetched loads of steps other than these."""
        wanted = [self._of(frame, members) for _, frame, members in batches]
        for begun in self._begun:
            if begun not in wanted:
                begun.loading.cancel()
        self._begun = [begun for begun in self._begun if begun in wanted]

    def _found(self, frame: Frame, members: Sequence[Member]) -> Loading | None:
        begun = self._of(frame, members)
        if begun is None:
            return None
        self._begun.remove(begun)
        return begun.loading

    def _of(self, frame: Frame, members: Sequence[Member]) -> StartedLoad | None:
        caches = caches_of(members)
        same = (b for b in self._begun if b.frame is frame and b.caches == caches)
        return next(same, None)

    def _begin(self, program: Program, frame: Frame, members: Sequence[Member]) -> Loading:
        assert self.loader is not None, "nothing loads without a loader"
        if program.code not in self._orders:
            uses = first_uses(program.module.graph)
            self._orders[program.code] = [name for _, names in uses for name in names]
        return self.loader.begin(frame.jobs(members, self._orders[program.code]), frame.device)


def caches_of(members: Sequence[Member]) -> tuple[int, ...]:
    """Return the ids of the caches; loads in flight hold theirs, so an id isn't reused."""
    return tuple(id(m.cache) for m in members)
