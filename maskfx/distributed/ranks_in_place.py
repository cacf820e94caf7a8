"""RanksInPlace: adapters that all members of a step share, in the weights of the ranks.

Each rank writes into a copy of its own of the weights that they share. All ranks of a step have the
updates in their weights, or none: they are written before the step, and if one rank can't, the step
runs with low-rank terms. A rank takes the updates out at its next step without them.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from maskfx.distributed.messages import WriteResult
from maskfx.distributed.rank_pool import Lease, RankPool
from maskfx.distributed.requests import write_requests
from maskfx.distributed.sent_steps import adapters_of
from maskfx.runtime.denoiser import CompiledDenoiser
from maskfx.runtime.in_place import work_of
from maskfx.runtime.lora.adapter import Updates
from maskfx.runtime.lora.in_place_costs import Elsewhere, SharedStep
from maskfx.runtime.step_executor import SharedAdapters
from maskfx.runtime.steps import DenseStep

log = logging.getLogger(__name__)


class NotWritten(Exception):
    """Raised if a rank can't write adapters into its weights."""


class RanksInPlace:
    """Decides by measured costs what a set of ranks has in its weights.

    Args:
        denoiser: The denoiser.
        name: Of the ranks, for explanations.
        clock: Returns seconds.
    """

    def __init__(
        self,
        denoiser: CompiledDenoiser,
        name: str,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._denoiser, self._clock = denoiser, clock
        self.seen = denoiser.in_place.elsewhere.setdefault(name, Elsewhere())
        self._run: object = None  # key of the adapters of the latest steps
        self._failed: tuple[object, str] | None = None  # adapters that a rank can't write, and why
        self._written: Updates = ()  # of the step that runs; () if it has low-rank terms
        self._wrote = 0.0  # seconds of it

    @property
    def written(self) -> Updates:
        """The adapters that the ranks have in their weights for the step that runs."""
        return self._written

    @contextmanager
    def step(self, members: int, shared: SharedAdapters | None) -> Iterator[None]:
        """Choose for a step of some members, and measure it."""
        own = None
        if shared is not None:
            own = self._denoiser.adapters.checked(shared.updates)
        if own is not None:
            why = self._denoiser.in_place.refusal(own, private=True)
            if not why and self._failed is not None and self._failed[0] == own.key:
                why = self._failed[1]
            self.seen.refused = why
        costs = self.seen.costs
        if shared is None or own is None or self.seen.refused:
            costs.end()
            self._run, self.seen.written = None, False
            yield
            return
        work = work_of(own)
        kind = SharedStep.of(members, shared.sites, work)
        before = self.seen.written and self._run == own.key
        if self._run != own.key:
            self._run = own.key
            costs.begin(kind, shared.left)
        if costs.wants(kind, work, shared.sites, shared.left, before):
            self._written = shared.updates
        began, self._wrote = self._clock(), 0.0
        try:
            yield
        finally:
            took = self._clock() - began - self._wrote
            self.seen.written = bool(self._written)
            costs.written += self.seen.written and not before
            self._written = ()
        costs.add_step(kind, self.seen.written, shared.sites, took)
        if self._wrote:  # taking them out is counted as as much
            costs.add_write(work, 2 * self._wrote)

    def write(self, lease: Lease, pool: RankPool) -> bool:
        """Let the ranks of a step write what was chosen, if they haven't; return if it was chosen.

        Raises `NotWritten` if one of them can't.
        """
        if not self._written:
            return False
        began = self._clock()
        wanted = adapters_of(DenseStep({}, self._written))
        missing = {
            number: process
            for number in lease.ranks
            if (process := lease.processes.all[number]).written != wanted
        }
        if missing:
            found = lease.processes.ask(write_requests(pool, missing, self._written))
            self._check(found)
            for process in missing.values():
                process.written = wanted
            self._wrote += self._clock() - began
        return True

    def refuse(self, why: str) -> None:
        """Have the step that runs, and later ones with these adapters, computed with terms."""
        log.warning("adapters aren't written into the weights of ranks: %s", why)
        self._failed = self._run, why
        self.seen.refused, self._written = why, ()

    def _check(self, found: Mapping[int, WriteResult]) -> None:
        wrong = [f"rank {number}: {one.refused}" for number, one in found.items() if one.refused]
        if wrong:
            raise NotWritten("; ".join(wrong))
