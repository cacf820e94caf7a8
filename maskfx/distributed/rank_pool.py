"""RankPool: the rank processes of one denoiser, and which steps they compute for now.

Owns their start, their replacement, leases of disjoint sets of them, and what they hold: weights,
programs, recordings. Knows nothing of how a batch is divided.
"""

from __future__ import annotations

import itertools
import logging
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

from torch.utils.weak import WeakIdKeyDictionary

from maskfx.distributed.code_compiler import CodeCompiler
from maskfx.distributed.heartbeat import Waits
from maskfx.distributed.messages import SentRolling, Unneeded
from maskfx.distributed.processes import RankFailure, RankProcess, RankProcesses
from maskfx.distributed.restarts import Restarts
from maskfx.ir.lru import LruCache
from maskfx.runtime.cache.rolling.rolling_cache import RollingCache, RowBlock
from maskfx.runtime.cache.rolling.shared_block import RollingContents, RollingState, SharedBlock
from maskfx.runtime.cache.rows import references
from maskfx.runtime.cache.step_cache import StepCache, changed, has_unread
from maskfx.runtime.denoiser import CompiledDenoiser
from maskfx.runtime.lora.adapter import Updates
from maskfx.runtime.lora.sent import LayerNumbers, SentLayers, nbytes_of
from maskfx.runtime.steps import AnyStep, EditStep, without_late
from maskfx.runtime.transport.sendable import can_be_sent
from maskfx.runtime.transport.sent_cache import SentCache
from maskfx.runtime.transport.shared_value import SharedValue
from maskfx.runtime.transport.tensor_transport import Unsendable
from maskfx.runtime.weights import WeightChange, Weights

log = logging.getLogger(__name__)

MAPPED = 1 << 20  # bytes of a recording from which ranks map it
FILES = 64  # open files of recordings, for ranks that have not mapped them


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
        denoiser: The denoiser; its weights are moved to memory that the ranks share.
        wanted: The number of processes.
        threads: The number of threads of each.
        backend: What they exchange with; see `RankGroup`.
        waits: The time that a step, an exchange and a start may take.
        restarts: Limits how many processes are started in place of failed ones.
        adapter_bytes: The bytes of adapters that a process may keep between steps.
    """

    def __init__(
        self,
        denoiser: CompiledDenoiser,
        wanted: int,
        threads: int,
        backend: str,
        waits: Waits,
        restarts: Restarts,
        adapter_bytes: int,
    ) -> None:
        self.denoiser, self.wanted, self.threads = denoiser, wanted, threads
        self.restarts, self.adapter_bytes = restarts, adapter_bytes
        self.backend, self.waits = backend, waits
        self.ranks: RankProcesses | None = None
        self._folder = tempfile.TemporaryDirectory(prefix="maskfx-ranks-")
        self.code: CodeCompiler | None = None
        if denoiser.settings.inductor:
            self.code = CodeCompiler(self._held, Path(self._folder.name), waits)
        self._watch = Weights(denoiser.module)
        self.ranged = True  # ranks read rows in a store by themselves
        self._sendable = type(denoiser) is CompiledDenoiser and can_be_sent(denoiser.module)
        if self._sendable:
            denoiser.share_memory()
            self._watch.restart()
            denoiser.code.use(self.code)
        # recording -> its number
        self._numbers: MutableMapping[StepCache, int] = WeakIdKeyDictionary()
        self._files: LruCache[int, SharedValue] = LruCache(FILES)  # by a recording's number
        self._count = itertools.count()
        self._adapters = LayerNumbers()
        self._blocks: WeakKeyDictionary[RowBlock, SharedBlock] = WeakKeyDictionary()
        self._version = 0  # of the programs in the folder
        self._sending = threading.Lock()  # guards the numbers and versions
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
            self._sendable = can_be_sent(self.denoiser.module)
            if self._sendable:
                self.denoiser.share_memory()
            self._watch.restart()
        if self._stopped or not self._sendable:
            raise NoRanks("they were stopped" if self._stopped else "the module can't be sent")
        if self.ranks is None:
            self.denoiser.save_programs(Path(self._folder.name))
            try:
                self.ranks = RankProcesses(
                    self._held(),
                    self.wanted,
                    self.backend,
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
            with self._sending:
                self._version += 1

    def sent(
        self, process: RankProcess, steps: Sequence[AnyStep], parts: Sequence[bool]
    ) -> tuple[list[AnyStep], Unneeded, bool]:
        """Return steps as they are sent, what to drop, and whether to read programs again.

        Args:
            process: Where they are sent.
            steps: The members of a batch.
            parts: Whether the rank has a share of each.
        """
        own = {adapters_of(step) for step, part in zip(steps, parts, strict=True) if part}
        with self._sending:
            found = [
                self._numbered(step, process, part) for step, part in zip(steps, parts, strict=True)
            ]
            needed: dict[int, int] = {}
            for number, (step, sent) in enumerate(zip(steps, found, strict=True)):
                if step.adapters:
                    there = step.adapters if adapters_of(step) in own else ()
                    layers = self._layers(process, there, needed)
                    found[number] = replace(sent, adapters=layers)
            alive = set(self._numbers.values())
            for number, _ in self._files.items():
                if number // 2 not in alive:
                    self._files.remove(number)
            gone = tuple(n for n in process.known if n // 2 not in alive)
            unneeded = process.adapters.unneeded(needed, self._adapters.alive())
            unmapped = tuple(process.blocks - {block.number for block in self._blocks})
            reload, process.version = process.version < self._version, self._version
        return found, Unneeded(gone, unneeded, unmapped), reload

    def _layers(self, process: RankProcess, adapters: Updates, needed: dict[int, int]) -> Updates:
        """Return adapters as they are sent: those that are there by their numbers.

        Args:
            process: Where they are sent.
            adapters: The adapters of a member.
            needed: The bytes of those of the members before, by number; gets these.
        """
        found = []
        for one in adapters:
            number = self._adapters.of(one.layers)
            new = number not in process.adapters and number not in needed
            needed[number] = nbytes_of(one.layers)
            sent: Any = SentLayers(number, one.layers if new else None)
            found.append(replace(one, layers=sent))
        return tuple(found)

    def _numbered(self, step: AnyStep, process: RankProcess, whole: bool) -> AnyStep:
        """Return the step as it is sent: a recording that is there already by its number.

        A rank without a share of the member gets the recording without its rows.
        """
        step = without_late(step)
        if not isinstance(step, EditStep):
            return step
        then: Any = self._next(step.then, process) if whole else None
        cache: StepCache = step.cache
        number = self._number(cache)
        if isinstance(cache, RollingCache):
            return replace(step, cache=self._rolling(cache, process), then=None)
        number += whole
        contents = None
        if number not in process.known and not (whole and self._mapped(cache, number, process)):
            contents = cache if whole else changed(cache, rows={}, stats={}, sums={})
        sent: Any = SentCache(number, contents)
        return replace(step, cache=sent, then=then)

    def _number(self, cache: StepCache) -> int:
        """Return the number of a recording without rows; the next one is that with rows."""
        if cache not in self._numbers:
            self._numbers[cache] = next(self._count)
        return 2 * self._numbers[cache]

    def _next(self, cache: StepCache | None, process: RankProcess) -> SentCache | None:
        """Return the recording of a next step, if the rank can read its rows ahead."""
        if cache is None or not self.ranged or not has_unread(cache):
            return None
        number = self._number(cache) + 1
        there = number in process.known or self._mapped(cache, number, process)
        return SentCache(number, None) if there else None

    def _mapped(self, cache: StepCache, number: int, process: RankProcess) -> bool:
        """Let the rank map a recording, of which it reads what it needs; return False if not."""
        if cache.nbytes() < MAPPED:
            return False
        try:
            shared = self._files.find(number, lambda: self._shared(cache))
            file = shared.descriptor
            process.send("recording", number, shared.message, shared.nbytes, file=file)
        except (OSError, RuntimeError) as error:
            log.info("a recording is copied to ranks, as they can't map it: %s", error)
            return False
        return True

    def _shared(self, cache: StepCache) -> SharedValue:
        """Return a recording in a memory file; ranks read its rows in a store where they can."""
        with suppress(Unsendable), references.kept() if self.ranged else nullcontext():
            return SharedValue(cache)
        return SharedValue(cache)

    def _rolling(self, cache: RollingCache, process: RankProcess) -> Any:
        """Return a rolling cache as it is sent; the rank maps the buffers with its rows.

        Raises Unsendable if its rows can't be shared with other processes.
        """
        block, number = cache.block, self._number(cache)
        if block not in self._blocks:
            try:
                self._blocks[block] = SharedBlock(block)
            except (OSError, RuntimeError) as error:
                raise Unsendable(f"rows that steps replace can't be shared: {error}") from error
        if block.number not in process.blocks:
            with suppress(OSError):  # the question that follows fails too, and ends the rank
                process.send_block(self._blocks[block].buffers, self._blocks[block].descriptor)
        contents = None if number in process.known else RollingContents.of(cache)
        return SentRolling(number, block.number, contents, RollingState.of(cache))


def adapters_of(step: AnyStep) -> tuple[object, ...]:
    """Return what identifies a member's adapters. Members of a batch with equal ones share values.

    So a rank has either all of these members' adapters or none.
    """
    return tuple((one.digest, one.weight, id(one.layers)) for one in step.adapters)
