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
from collections.abc import MutableMapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any

from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from maskfx.config import Settings
from maskfx.engine.helper_processes import HelperProcess, bare, can_be_sent
from maskfx.engine.tensor_transport import Unsendable
from maskfx.errors import CacheError
from maskfx.runtime.cache.step_cache import StepCache
from maskfx.runtime.denoiser import CompiledDenoiser
from maskfx.runtime.step_executor import Here, compute_steps
from maskfx.runtime.steps import AnyStep, EditStep
from maskfx.runtime.weights import WeightChange, Weights

log = logging.getLogger(__name__)


@dataclass
class SentCache:
    """A recording by its number, with its contents when it is sent for the first time."""

    number: int
    contents: StepCache | None


class ServedDenoiser:
    """A denoiser in its process; pickled as its module and settings, and compiled there."""

    def __init__(self, module: nn.Module, settings: Settings) -> None:
        self.denoiser = CompiledDenoiser(module, settings)
        self.caches: dict[int, StepCache] = {}

    def __reduce__(self) -> tuple[type[ServedDenoiser], tuple[object, Settings]]:
        return ServedDenoiser, (bare(self.denoiser.module), self.denoiser.settings)

    def compute(self, steps: Sequence[AnyStep], dropped: Sequence[int]) -> list[Any]:
        """Compute steps; forget the recordings that the other process has dropped."""
        for number in dropped:
            self.caches.pop(number, None)
        return compute_steps(self.denoiser, list(map(self._with_cache, steps)))

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
        threads: number of threads that the process computes with.
    """

    def __init__(self, threads: int = 1) -> None:
        self.threads = threads
        self.restarts = 0
        self.sent_here = 0  # steps computed in this process instead
        self._process: HelperProcess | None = None
        # recording -> its number in the process
        self._numbers: MutableMapping[StepCache, int] = WeakIdKeyDictionary()
        self._count = itertools.count()
        self._dropped: list[int] = []
        self._lock = threading.Lock()  # one step at a time
        self._programs = tempfile.TemporaryDirectory(prefix="maskfx-programs-")
        self._watch: Weights | None = None
        self._generation = 0
        self._stopped = False

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.child.pid

    def run(self, denoiser: CompiledDenoiser, steps: Sequence[AnyStep]) -> Future[list[Any]]:
        """Compute steps in the process and wait for their results."""
        with self._lock:
            if self._stopped or not can_be_sent(denoiser.module):
                return self._here(denoiser, steps)
            done: Future[list[Any]] = Future()
            try:
                done.set_result(self._ask(denoiser, steps))
                return done
            except Unsendable as error:
                log.info("a step of %s is computed here: %s", type(denoiser.module), error)
            except (EOFError, ConnectionError, OSError) as error:
                log.warning("the process of %s ended (%s)", type(denoiser.module), error)
                self.restarts += 1
                self._end()
            except Exception as error:
                done.set_exception(error)
                return done
            return self._here(denoiser, steps)

    def _here(self, denoiser: CompiledDenoiser, steps: Sequence[AnyStep]) -> Future[list[Any]]:
        self.sent_here += len(steps)
        return Here().run(denoiser, steps)

    def _ask(self, denoiser: CompiledDenoiser, steps: Sequence[AnyStep]) -> list[Any]:
        process = self._process or HelperProcess()
        self._process = process
        if self._watch is None or self._watch.module is not denoiser.module:
            self._watch = Weights(denoiser.module)
        if self._watch.change() is not WeightChange.NONE:
            self._generation += 1
        key = self._generation  # changed weights are sent again
        if key not in process.parts:
            denoiser.module.share_memory()
            settings = denoiser.settings
            if settings.programs is None:
                settings = replace(settings, programs=self._programs.name)
            process.give(key, ServedDenoiser(denoiser.module, settings))
        dropped, self._dropped = self._dropped, []
        sent = [self._sent(step) for step in steps]
        found: list[Any] = process.run(key, "compute", (sent, dropped), {}, self.threads)
        return found

    def _sent(self, step: AnyStep) -> AnyStep:
        """Return the step as it is sent: a recording that is there already by its number."""
        if not isinstance(step, EditStep):
            return step
        cache: StepCache = step.cache
        known = self._numbers.get(cache)
        if known is None:
            known = self._numbers[cache] = next(self._count)
            weakref.finalize(cache, self._dropped.append, known)
            return replace(step, cache=SentCache(known, cache))  # type: ignore[arg-type]
        return replace(step, cache=SentCache(known, None))  # type: ignore[arg-type]

    def _end(self) -> None:
        if self._process is not None:
            self._process.stop()
        self._process, self._dropped = None, []
        self._numbers.clear()

    def stop(self) -> None:
        """End the process; a step in flight is computed in this process."""
        self._stopped = True
        process = self._process
        if process is not None:
            process.child.kill()  # a waiting call gets EOFError
        with self._lock:
            self._end()
        self._programs.cleanup()
