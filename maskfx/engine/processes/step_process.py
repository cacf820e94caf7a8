"""StepProcess: computes the steps of one denoiser, such as a ControlNet, in a process of its own.

The process holds the denoiser compiled, over weights in shared memory or its own on a device, and
the recordings that edits were computed from. What crosses from a device to a device goes through
host memory. If it dies or misses the deadline of a step, another process computes the
step again, once; a step that no process can compute is computed in this one.
"""

from __future__ import annotations

import itertools
import logging
import threading
import weakref
from collections import deque
from collections.abc import MutableMapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch.utils import _pytree as pytree
from torch.utils.weak import WeakIdKeyDictionary

from maskfx.engine.processes.helper_processes import HelperProcess
from maskfx.engine.processes.served_denoiser import Computed, Dropped, ServedDenoiser
from maskfx.ir.late import LateTensor, wait_for
from maskfx.runtime.batch.output_rows import whole_result
from maskfx.runtime.cache.movers import HostMover
from maskfx.runtime.cache.rolling.rolling_cache import RollingCache
from maskfx.runtime.cache.step_cache import StepCache
from maskfx.runtime.denoiser import CompiledDenoiser
from maskfx.runtime.hardware.devices import CPU
from maskfx.runtime.hardware.offload import device_of
from maskfx.runtime.lora.adapter import Layers, WeightedLayers
from maskfx.runtime.lora.in_place_costs import Elsewhere
from maskfx.runtime.lora.sent import SentLayers
from maskfx.runtime.step_executor import SharedAdapters, compute_steps
from maskfx.runtime.steps import AnyStep, EditStep, without_late
from maskfx.runtime.transport.sent_cache import SentCache
from maskfx.runtime.transport.shared_tensors import TensorSender
from maskfx.runtime.transport.tensor_transport import Unsendable

log = logging.getLogger(__name__)

ADAPTERS = 64  # kept in the process
ATTEMPTS = 2  # processes that a step is given to
START_SECONDS = 300.0  # for the start of a process and for what it compiles
DENOISER = "denoiser"  # its key in the process


class StepProcess:
    """Runs the steps of one denoiser in a process that is started at the first step.

    Args:
        denoiser: The denoiser that the process holds; weights on the CPU are in shared memory.
        programs: Directory in which the process finds compiled programs, if the denoiser's
            settings name none.
        threads: Number of threads that the process computes with.
        seconds: Time in which the process must answer a step; its first one may take
            `START_SECONDS` longer. None sets no limit.
        name: Of the process, for explanations.
        device: Where the process computes; of the type of the denoiser's.
    """

    def __init__(
        self,
        denoiser: CompiledDenoiser,
        programs: Path,
        threads: int = 1,
        seconds: float | None = None,
        name: str = "its process",
        device: torch.device = CPU,
    ) -> None:
        self.denoiser, self.programs, self.name, self.device = denoiser, programs, name, device
        self.threads, self.seconds = threads, seconds
        self.in_place = Elsewhere()  # what the process chose
        self.starts = 0
        self.restarts = 0  # of these, those after a failure
        self.computed_here = 0  # steps computed in this process instead
        self.sent = self.received = 0  # bytes, of processes that have ended
        self._process: HelperProcess | None = None
        # recording -> its number in the process
        self._numbers: MutableMapping[StepCache, int] = WeakIdKeyDictionary()
        self._layers: dict[int, tuple[int, Layers]] = {}  # adapters' numbers, by their ids
        self._count = itertools.count()
        self._dropped: deque[int] = deque()  # recordings and adapters that are not used any more
        self._home = device_of(denoiser.module)
        self._tensors = TensorSender(self._home)
        self._lock = threading.Lock()  # one step at a time
        self._sendable = True
        self._stopped = False

    @property
    def pid(self) -> int | None:
        process = self._process
        return None if process is None else process.child.pid

    @property
    def traffic(self) -> tuple[int, int]:
        """Return the bytes sent to the processes so far, and those received."""
        process = self._process
        now = (0, 0) if process is None else (process.sent, process.received)
        return self.sent + now[0], self.received + now[1]

    def holds(self, step: AnyStep) -> bool:
        """Return True for an edit whose recording is in the process."""
        return isinstance(step, EditStep) and step.cache in self._numbers

    def run(
        self,
        denoiser: CompiledDenoiser,
        steps: Sequence[AnyStep],
        shared: SharedAdapters | None = None,
    ) -> list[object]:
        """Compute steps in the process; if that can't be, in this one, by `denoiser`.

        Steps that replace the rows they read are computed here, where these rows are.
        """
        if any(isinstance(s, EditStep) and isinstance(s.cache, RollingCache) for s in steps):
            self.computed_here += len(steps)
            return compute_steps(denoiser, steps)
        with self._lock:
            for _ in range(ATTEMPTS):
                process = self._started()
                if process is None:
                    break
                try:
                    results = self._ask(process, steps, shared)
                    denoiser.in_place.elsewhere[self.name] = self.in_place
                    return results
                except Unsendable as error:
                    log.info("a step of %s is computed here: %s", type(denoiser.module), error)
                    break
                except (EOFError, OSError) as error:
                    if process.usable:
                        raise  # an error of the step
                    if not self._stopped:
                        log.warning("a process of %s ended (%r)", type(denoiser.module), error)
                        self.restarts += 1
                    self._end()
            self.computed_here += len(steps)
        return compute_steps(denoiser, steps)

    def begin(self) -> None:
        """Start the process without waiting for it, unless a step is in flight."""
        if self._lock.acquire(blocking=False):
            try:
                self._started()
            finally:
                self._lock.release()

    def sleep(self) -> None:
        """End the process; the next step starts another one."""
        with self._lock:
            self._end()

    def stop(self) -> None:
        """End the process; a step in flight is computed in this process."""
        self._stopped = True
        process = self._process
        if process is not None:
            process.child.kill()  # a waiting call gets EOFError
        with self._lock:
            self._end()

    def _started(self) -> HelperProcess | None:
        """Return the process; None if none can be had."""
        if self._stopped or not self._sendable:
            return None
        if self._process is None:
            try:
                self._process = HelperProcess()
                self.starts += 1
            except OSError as error:
                log.warning("no process for a denoiser's steps: %s", error)
        return self._process

    def _ask(
        self, process: HelperProcess, steps: Sequence[AnyStep], shared: SharedAdapters | None
    ) -> list[object]:
        first = DENOISER not in process.parts
        if self.seconds is not None:
            process.child.channel.limit(self.seconds + (START_SECONDS if first else 0))
        if first:
            try:
                process.give(DENOISER, self._served(), self._home, self.device)
            except Unsendable as error:  # it would be packed again for each step
                log.warning("%s has no process: %s", type(self.denoiser.module).__name__, error)
                self._sendable = False
                self._end()
                raise
        gone = Dropped(
            [self._dropped.popleft() for _ in range(len(self._dropped))], self._tensors.dropped()
        )
        fresh: list[StepCache] = []
        before = set(self._layers)
        sent = [self._numbered(with_values(without_late(step)), fresh) for step in steps]
        sent = [replace(one, adapters=tuple(map(self._sent, one.adapters))) for one in sent]
        try:
            message = self._tensors.pack(sent)
            few = (0, 0) if shared is None else (shared.sites, shared.left)
            answer = process.run(DENOISER, "compute", (message, gone, few), {}, self.threads)
            assert isinstance(answer, Computed)
            results: list[object] = self._tensors.unpack(answer.results)
        except BaseException:  # whether they have arrived isn't known
            for cache in fresh:
                self._numbers.pop(cache, None)
            for place in self._layers.keys() - before:
                del self._layers[place]
            self._tensors.undo()
            self._tensors.drop(gone.tensors)
            self._dropped.extend(gone.contents)
            raise
        self.in_place = answer.in_place
        return [
            whole_result(result, step.cache.output) if isinstance(step, EditStep) else result
            for step, result in zip(steps, results, strict=True)
        ]

    def _served(self) -> ServedDenoiser:
        """Return the denoiser as it is sent; its process captures nothing that was captured."""
        settings = self.denoiser.settings
        if settings.programs is None:
            self.denoiser.save_programs(self.programs)
            settings = replace(settings, programs=str(self.programs))
        return ServedDenoiser(self.denoiser.module, settings, self.starts)

    def _numbered(self, step: AnyStep, fresh: list[StepCache]) -> AnyStep:
        """Return the step as it is sent: a recording that is there already by its number."""
        if not isinstance(step, EditStep):
            return step
        cache: StepCache = step.cache
        known, contents = self._numbers.get(cache), None
        if known is None:
            known = next(self._count)
            contents = cache if self._home == CPU else HostMover().to_host(cache)
            self._numbers[cache] = known
            fresh.append(cache)
            weakref.finalize(cache, self._dropped.append, known)
        return replace(step, cache=SentCache(known, contents))  # type: ignore[arg-type]

    def _sent(self, update: WeightedLayers) -> WeightedLayers:
        """Return an adapter as it is sent: one that is there already by its number."""
        place, contents = id(update.layers), None
        number, held = self._layers.pop(place, (-1, update.layers))
        if number < 0:
            number, contents = next(self._count), update.layers
        self._layers[place] = number, held  # held: ids of other objects may be equal later
        while len(self._layers) > ADAPTERS:
            self._dropped.append(self._layers.pop(next(iter(self._layers)))[0])
        return replace(update, layers=SentLayers(number, contents))  # type: ignore[arg-type]

    def _end(self) -> None:
        if self._process is not None:
            self._process.stop()
            self.sent, self.received = self.traffic
        self._process = None
        self._dropped.clear()
        self._numbers.clear()
        self._layers.clear()
        self._tensors.clear()


def with_values(step: AnyStep) -> AnyStep:
    """Return a step whose inputs have arrived: another net may compute them."""
    if not any(isinstance(leaf, LateTensor) for leaf in pytree.tree_leaves(dict(step.inputs))):
        return step
    return replace(step, inputs=pytree.tree_map(wait_for, dict(step.inputs)))
