"""StepProcess: computes the steps of one denoiser, such as a ControlNet, in a process of its own.

The process holds the denoiser compiled, over weights in shared memory, and the recordings that
edits were computed from. If it dies, or a step can't be sent, the step is computed in this process.
"""

from __future__ import annotations

import itertools
import logging
import tempfile
import threading
import weakref
from collections import deque
from collections.abc import MutableMapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from maskfx.config import Settings
from maskfx.engine.helper_processes import HelperProcess
from maskfx.errors import CacheError
from maskfx.runtime.cache.rolling import RollingCache
from maskfx.runtime.cache.step_cache import StepCache
from maskfx.runtime.denoiser import CompiledDenoiser
from maskfx.runtime.lora.adapter import Layers, Updates, WeightedLayers
from maskfx.runtime.sendable import bare, can_be_sent
from maskfx.runtime.step_executor import compute_steps
from maskfx.runtime.steps import AnyStep, EditStep
from maskfx.runtime.tensor_transport import Unsendable
from maskfx.runtime.weights import WeightChange, Weights

log = logging.getLogger(__name__)

ADAPTERS = 64  # kept in the process
DENOISER = "denoiser"  # its key in the process


@dataclass
class SentCache:
    """A recording by its number, with its contents when it is sent for the first time."""

    number: int
    contents: StepCache | None


@dataclass
class SentLayers:
    """An adapter's updates by their number, with their contents when they are sent first."""

    number: int
    contents: Layers | None


class ServedDenoiser:
    """A denoiser in its process; pickled as its module and settings, and compiled there."""

    def __init__(self, module: nn.Module, settings: Settings) -> None:
        self.denoiser = CompiledDenoiser(module, settings)
        self.caches: dict[int, StepCache] = {}
        self.layers: dict[int, Layers] = {}

    def __reduce__(self) -> tuple[type[ServedDenoiser], tuple[object, Settings]]:
        return ServedDenoiser, (bare(self.denoiser.module), self.denoiser.settings)

    def compute(self, steps: Sequence[AnyStep], dropped: Sequence[int]) -> list[Any]:
        """Compute steps; forget the recordings and adapters that the other process has dropped."""
        for number in dropped:
            self.caches.pop(number, None)
            self.layers.pop(number, None)
        steps = [replace(step, adapters=self._with_layers(step.adapters)) for step in steps]
        return compute_steps(self.denoiser, list(map(self._with_cache, steps)))

    def _with_layers(self, adapters: Updates) -> Updates:
        found = []
        for one in adapters:
            sent: Any = one.layers
            if sent.contents is not None:
                self.layers[sent.number] = sent.contents
            if sent.number not in self.layers:
                raise CacheError(f"adapter {sent.number} isn't in this process; send it again")
            found.append(replace(one, layers=self.layers[sent.number]))
        return tuple(found)

    def _with_cache(self, step: AnyStep) -> AnyStep:
        if not isinstance(step, EditStep):
            return step
        sent: Any = step.cache
        if sent.contents is not None:
            self.caches[sent.number] = sent.contents
        if sent.number not in self.caches:
            raise CacheError(f"recording {sent.number} isn't in this process; send it again")
        return replace(step, cache=self.caches[sent.number])


class StepProcess:
    """Runs the steps of one denoiser in a process that is started at the first step.

    Args:
        denoiser: the denoiser; its weights are moved to memory that the process shares.
        threads: number of threads that the process computes with.
    """

    def __init__(self, denoiser: CompiledDenoiser, threads: int = 1) -> None:
        self.threads = threads
        self.restarts = 0
        self.computed_here = 0  # steps computed in this process instead
        self._sendable = can_be_sent(denoiser.module)
        if self._sendable:
            denoiser.share_memory()
        self._watch = Weights(denoiser.module)
        self._process: HelperProcess | None = None
        # recording -> its number in the process
        self._numbers: MutableMapping[StepCache, int] = WeakIdKeyDictionary()
        self._layers: dict[int, tuple[int, Layers]] = {}  # adapters' numbers, by their ids
        self._count = itertools.count()
        self._dropped: deque[int] = deque()  # recordings and adapters that are not used any more
        self._lock = threading.Lock()  # one step at a time
        self._programs = tempfile.TemporaryDirectory(prefix="maskfx-programs-")
        self._stopped = False

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.child.pid

    def run(self, denoiser: CompiledDenoiser, steps: Sequence[AnyStep]) -> list[Any]:
        """Compute steps in the process; if that can't be, in this one.

        Steps that replace the rows they read are computed here, where these rows are.
        """
        if any(isinstance(s, EditStep) and isinstance(s.cache, RollingCache) for s in steps):
            self.computed_here += len(steps)
            return compute_steps(denoiser, steps)
        with self._lock:
            process = self._started(denoiser)
            try:
                if process is not None:
                    return self._ask(process, denoiser, steps)
            except Unsendable as error:
                log.info("a step of %s is computed here: %s", type(denoiser.module), error)
            except (EOFError, OSError) as error:
                if process is not None and process.usable:
                    raise  # an error of the step
                log.warning("the process of %s ended (%s)", type(denoiser.module), error)
                self.restarts += 1
                self._end()
            self.computed_here += len(steps)
        return compute_steps(denoiser, steps)

    def _started(self, denoiser: CompiledDenoiser) -> HelperProcess | None:
        """Return the process, with the weights as they are now; None if none can be had."""
        change = self._watch.change()
        if change is not WeightChange.NONE:
            self._end()  # it holds the earlier weights, or values computed from them
        if change is WeightChange.TENSORS:
            self._sendable = can_be_sent(denoiser.module)
            if self._sendable:
                denoiser.share_memory()
            self._watch.restart()
        if self._stopped or not self._sendable:
            return None
        if self._process is None:
            try:
                self._process = HelperProcess()
            except OSError as error:
                log.warning("no process for %s: %s", type(denoiser.module), error)
        return self._process

    def _ask(
        self, process: HelperProcess, denoiser: CompiledDenoiser, steps: Sequence[AnyStep]
    ) -> list[Any]:
        if DENOISER not in process.parts:
            settings = denoiser.settings
            if settings.programs is None:
                settings = replace(settings, programs=self._programs.name)
            process.give(DENOISER, ServedDenoiser(denoiser.module, settings))
        dropped = [self._dropped.popleft() for _ in range(len(self._dropped))]
        fresh: list[StepCache] = []
        before = set(self._layers)
        sent = [self._numbered(step, fresh) for step in steps]
        sent = [replace(one, adapters=tuple(map(self._sent, one.adapters))) for one in sent]
        try:
            found: list[Any] = process.run(DENOISER, "compute", (sent, dropped), {}, self.threads)
        except BaseException:  # whether they have arrived isn't known
            for cache in fresh:
                self._numbers.pop(cache, None)
            for place in self._layers.keys() - before:
                del self._layers[place]
            self._dropped.extend(dropped)
            raise
        return found

    def _numbered(self, step: AnyStep, fresh: list[StepCache]) -> AnyStep:
        """Return the step as it is sent: a recording that is there already by its number."""
        if not isinstance(step, EditStep):
            return step
        cache: StepCache = step.cache
        known, contents = self._numbers.get(cache), None
        if known is None:
            known, contents = next(self._count), cache
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
        self._process = None
        self._dropped.clear()
        self._numbers.clear()
        self._layers.clear()

    def stop(self) -> None:
        """End the process; a step in flight is computed in this process."""
        self._stopped = True
        process = self._process
        if process is not None:
            process.child.kill()  # a waiting call gets EOFError
        with self._lock:
            self._end()
        self._programs.cleanup()
