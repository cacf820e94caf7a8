"""Loads: which rows a step of one batch reads from its caches, begun when it starts or before."""

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
    """When a graph asked for each of its inputs, and when it got it."""

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


AHEAD = 4  # steps whose loads may be under way; the oldest is given up for another


@dataclass(frozen=True)
class StartedLoad:
    """Loads of a step that is still to come."""

    frame: Frame
    caches: tuple[int, ...]
    loading: Loading


@dataclass
class Prefetcher:
    """The loads of one denoiser; without a loader rows are picked where the graph asks for them."""

    loader: Loader | None = None
    _begun: list[StartedLoad] = field(default_factory=list)
    _orders: dict[str, list[str]] = field(default_factory=dict)

    @contextmanager
    def step(
        self, program: Program, frame: Frame, members: Sequence[Member]
    ) -> Iterator[Loading | None]:
        """The loads of the step that runs now; what it leaves unread is let go."""
        if self.loader is None or all(m.cache is None for m in members):
            yield None
            return
        loading = self._found(frame, members) or self._begin(program, frame, members)
        try:
            yield loading
        finally:
            loading.cancel()

    def ahead(self, program: Program, frame: Frame, members: Sequence[Member]) -> Loading:
        """Begin before the step comes, if it isn't begun already."""
        known = self._of(frame, members)
        if known is not None:
            return known.loading
        loading = self._begin(program, frame, members)
        self._begun.append(StartedLoad(frame, caches_of(members), loading))
        while len(self._begun) > AHEAD:
            self._begun.pop(0).loading.cancel()
        return loading

    def forget_others(self, batches: Sequence[tuple[Program, Frame, Sequence[Member]]]) -> None:
        """Give up what was begun for other steps than these."""
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
    """Which caches; loads under way hold theirs, so a number means one."""
    return tuple(id(m.cache) for m in members)
