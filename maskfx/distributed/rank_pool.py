"""RankPool: the rank processes of one denoiser, and which steps they compute for now.

Owns their start, their replacement, leases of disjoint sets of them, and that they have the weights
and programs. Knows nothing of how a batch is divided.
"""

from __future__ import annotations

import logging
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from maskfx.distributed.code_compiler import CodeCompiler
from maskfx.distributed.heartbeat import Waits
from maskfx.distributed.processes import RankFailure, RankProcesses
from maskfx.distributed.ranks import Ranks
from maskfx.distributed.restarts import Restarts
from maskfx.distributed.sent_steps import SentSteps
from maskfx.distributed.unsupported import own_device
from maskfx.errors import InputError
from maskfx.runtime.denoiser import CompiledDenoiser
from maskfx.runtime.hardware.devices import CPU
from maskfx.runtime.transport.sendable import can_be_sent
from maskfx.runtime.transport.tensor_transport import Unsendable
from maskfx.runtime.weights import WeightChange, Weights

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Lease:
    """Ranks that compute for one step, by their numbers in the world group."""

    processes: RankProcesses
    ranks: tuple[int, ...]


class NoRanks(Exception):
    """Raised if no rank can be had: none can start, none is left, or none is free in time."""


class RankPool:
    """Starts ranks at the first lease, and gives disjoint sets of them to threads.

    Args:
        denoiser: The denoiser; weights on a CPU are moved to memory that the ranks share.
        ranks: The number of processes, and their devices.
        threads: The number of threads of each.
        waits: The time that a step, an exchange and a start may take.
        restarts: Limits how many processes are started in place of failed ones.
        adapter_bytes: The bytes of adapters that a process may keep between steps.
    """

    def __init__(
        self,
        denoiser: CompiledDenoiser,
        ranks: Ranks,
        threads: int,
        waits: Waits,
        restarts: Restarts,
        adapter_bytes: int,
    ) -> None:
        self.denoiser, self.wanted, self.threads = denoiser, ranks.count, threads
        self.restarts, self.adapter_bytes = restarts, adapter_bytes
        self.waits, self._given = waits, ranks
        self.places = ranks.placed(own_device(denoiser))
        self.ranks: RankProcesses | None = None
        self._folder = tempfile.TemporaryDirectory(prefix="maskfx-ranks-")
        self.code: CodeCompiler | None = None
        if denoiser.settings.inductor:
            self.code = CodeCompiler(self._held, Path(self._folder.name), waits)
        self._watch = Weights(denoiser.module)
        self._sendable = type(denoiser) is CompiledDenoiser and self._shared_weights()
        if self.code is not None and self._sendable:
            denoiser.code.use(self.code)
        self.steps = SentSteps()
        self._changing = threading.Lock()  # guards the processes
        self._released = threading.Condition()  # guards what follows
        self._busy: set[int] = set()
        self._releases = 0
        self._stopped = False

    @property
    def size(self) -> int:
        """The number of ranks that steps can have now."""
        ranks = self.ranks
        if ranks is None:
            return self.wanted if self._sendable else 1  # this process computes
        return max(1, ranks.size)

    def _shared_weights(self) -> bool:
        """Return True if the ranks can have the weights, and move those of a CPU to shared memory.

        Weights of a device are copied to the device of each rank.
        """
        device = self.places.own
        if not can_be_sent(self.denoiser.module, copied=device != CPU):
            return False
        if device == CPU:
            self.denoiser.share_memory()
        self._watch.restart()
        return True

    def _placed(self) -> bool:
        """Find the places of the ranks for the device where the denoiser is now."""
        try:
            self.places = self._given.placed(own_device(self.denoiser))
            return True
        except InputError as error:
            log.warning("no ranks for %s: %s", type(self.denoiser.module).__name__, error)
            return False

    # Leases.

    @contextmanager
    def lease(self, wanted: Sequence[int] | None) -> Iterator[Lease]:
        """Reserve ranks, when they are free; raise `NoRanks` if none can be had.

        While the world group has to be formed again, all wait until the steps in flight end.

        Args:
            wanted: Their numbers, in order; None: all. Those that no longer exist are left out.
        """
        found = self._leased(wanted, time.monotonic() + self.waits.step + self.waits.exchange)
        try:
            yield found
        finally:
            self._release(found)

    def _leased(self, wanted: Sequence[int] | None, until: float) -> Lease:
        while True:
            with self._released:
                releases = self._releases
            with self._changing:
                processes = self._started()
                if processes.apart and not self._busy and not processes.recover():
                    raise NoRanks("none is left")
                if not processes.apart:
                    found = self._reserved(processes, wanted)
                    if found is not None:
                        return found
            with self._released:
                left = until - time.monotonic()
                if left <= 0:
                    raise NoRanks(f"none of {wanted or 'all'} is free in time")
                if self._releases == releases:
                    self._released.wait(left)

    @contextmanager
    def lease_now(self, wanted: Callable[[RankProcesses], Sequence[int]]) -> Iterator[Lease | None]:
        """Reserve those of some ranks that are there and free now; give None if none is.

        Args:
            wanted: Returns their numbers.
        """
        found: Lease | None = None
        if self._changing.acquire(blocking=False):
            try:
                ranks = self.ranks
                if ranks is not None and not (self._stopped or ranks.apart):
                    with self._released:
                        free = tuple(r for r in wanted(ranks) if r not in self._busy)
                        self._busy.update(free)
                    found = Lease(ranks, free) if free else None
            finally:
                self._changing.release()
        try:
            yield found
        finally:
            if found is not None:
                self._release(found)

    def _release(self, lease: Lease) -> None:
        with self._released:
            self._busy.difference_update(lease.ranks)
            self._releases += 1
            self._released.notify_all()

    def _reserved(self, processes: RankProcesses, wanted: Sequence[int] | None) -> Lease | None:
        alive = processes.alive
        chosen = tuple(r for r in (alive if wanted is None else wanted) if r in alive)
        chosen = chosen or tuple(alive[:1])
        with self._released:
            if not chosen or not self._busy.isdisjoint(chosen):
                return None
            self._busy.update(chosen)
        return Lease(processes, chosen)

    # Processes.

    def _started(self) -> RankProcesses:
        """Return the ranks, with the weights as they are now."""
        change = self._watch.change()
        if not change.same_numbers:
            self._end()  # they hold the earlier weights, or values computed from them
        if change is WeightChange.TENSORS:
            self._sendable = self._placed() and self._shared_weights()
            self._watch.restart()
        if self._stopped or not self._sendable:
            raise NoRanks("they were stopped" if self._stopped else "the module can't be sent")
        if self.ranks is None:
            self.denoiser.save_programs(Path(self._folder.name))
            try:
                self.ranks = RankProcesses(
                    self._held(),
                    self.places,
                    self.waits,
                    self._folder.name,
                    self.restarts,
                    self.adapter_bytes,
                )
            except (OSError, EOFError, Unsendable, RankFailure) as error:
                log.warning("no ranks for %s: %s", type(self.denoiser.module).__name__, error)
                self._sendable = False
                self._compile_here()
        elif self.ranks.size < self.wanted:
            try:
                self.ranks.refill()
            except (OSError, Unsendable) as error:
                log.warning("a rank can't be replaced: %s", error)
        if self.ranks is None or not self.ranks.size:
            raise NoRanks("none can start" if self.ranks is None else "none is left")
        return self.ranks

    def _compile_here(self) -> None:
        """Let this process compile again what it computes."""
        with self.denoiser.locked():
            self.denoiser.code.use(None)

    def _held(self) -> tuple[object, ...]:
        """Return what each process gets: the module, its settings and roles, and the threads."""
        settings = replace(self.denoiser.settings, programs=self._folder.name)
        return self.denoiser.module, settings, self.denoiser.roles, self.threads

    def _end(self) -> None:
        """End the ranks, after the steps that they compute."""
        if self.ranks is not None:
            with self._released:
                self._released.wait_for(lambda: not self._busy)
            self.ranks.stop()
        self.ranks = None

    def stop(self) -> None:
        """End the ranks; a step in flight fails, and later leases are refused."""
        self._stopped = True
        if self.code is not None:
            self.code.stop()
        ranks = self.ranks
        if ranks is not None:
            ranks.kill()  # a waiting step ends at once
        with self._changing:
            self._end()
        self._compile_here()
        weakref.finalize(self, self._folder.cleanup)()

    # What the processes hold.

    def save_programs(self) -> None:
        """Write what was compiled, for the ranks to read."""
        if self.denoiser.save_programs(Path(self._folder.name)):
            self.steps.programs_saved()
