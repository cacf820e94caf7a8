"""WholeSteps: replays one CUDA graph for each batch whose layout comes again, as it does in edits.

A batch's second step is captured whole, attentions included: its spans are those of the layout.
Each later step brings its inputs to where they were at the capture, and replays. What can't be
captured or brought runs operator by operator.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

from maskfx.ir.lru import LruCache
from maskfx.ops.base import holding
from maskfx.runtime.backends.cuda_graphs import Recorder
from maskfx.runtime.backends.graph_function import Fetch, Run
from maskfx.runtime.hardware.devices import current_stream

log = logging.getLogger(__name__)

KEPT = 8  # captured layouts
SEEN = 32  # layouts that are known to have run
LEAST_FREE = 0.125  # of the device's memory: with less, nothing is captured
Step = TypeVar("Step", contravariant=True)


class Memory(Protocol[Step]):
    """The inputs of a capture."""

    def fetch(self) -> Fetch:
        """Return what gives the graph its inputs; called inside of the capture."""
        ...

    def bring(self, step: Step) -> bool:
        """Copy a step's inputs here; return False, with nothing copied, if they don't fit."""
        ...


class StepInputs(Protocol):
    """The inputs of a step."""

    @property
    def form(self) -> Hashable:
        """Return what a capture depends on beside the layout."""
        ...

    def memory(self) -> Memory[Any]:
        """Return the memory of a capture, with these inputs."""
        ...


class Key(NamedTuple):
    """What a capture is known by."""

    layout: int
    graph: Hashable
    form: Hashable
    stream: int


@dataclass(frozen=True)
class WholeGraph:
    """A graph that may be captured.

    Args:
        key: What it is known by.
        make: Returns what runs it.
    """

    key: Hashable
    make: Callable[[], Run]


@dataclass
class CapturedStep(Generic[Step]):
    """A capture of a graph for one layout.

    Args:
        memory: Where the graph reads its inputs.
        results: Memory that a replay writes.
        replay: Computes them again.
        held: Keeps what the graph reads beside its inputs.
        pool: The memory of what it computes, which captures of one stream share.
    """

    memory: Memory[Step]
    results: list[Tensor]
    replay: Callable[[], None]
    held: list[object]
    pool: object

    def run(self, step: Step) -> list[Tensor] | None:
        """Return the results of a step; None if its inputs don't fit the capture."""
        if not self.memory.bring(step):
            return None
        self.replay()
        return [result.clone() for result in self.results]


class WholeSteps:
    """Runs graphs from captures, where a layout has run before.

    Args:
        recorder: Captures what a function launches.
        free: Returns the share of the device's memory that is free.
    """

    def __init__(self, recorder: Recorder, free: Callable[[], float] = lambda: 1.0) -> None:
        self.recorder, self._free = recorder, free
        # layouts, which are held because their ids are in the key, and whether captures fail
        self._seen: LruCache[Key, tuple[object, bool]] = LruCache(SEEN)
        self._kept: LruCache[Key, CapturedStep[object]] = LruCache(KEPT)
        self._lock = threading.Lock()

    def run(self, layout: object, graph: WholeGraph, step: StepInputs) -> list[Tensor] | None:
        """Run a graph; return None if its layout is new or its step can't be captured.

        Args:
            layout: What inputs' sizes and the numbers on the host follow from; it is held.
            graph: The graph.
            step: Its inputs.
        """
        with self._lock:
            key = Key(id(layout), graph.key, step.form, current_stream())
            known = self._kept.get(key)
            if known is not None:
                return known.run(step)
            before = self._seen.get(key)
            if before is None:
                self._seen.put(key, (layout, False))
            if before is None or before[1]:
                return None
            return self._capture(key, graph, step, layout)

    def note(self, layout: object, graph: Hashable, step: StepInputs) -> None:
        """Note that a layout runs otherwise now, so that its next step is captured."""
        key = Key(id(layout), graph, step.form, current_stream())
        with self._lock:
            if self._seen.get(key) is None:
                self._seen.put(key, (layout, False))

    def __len__(self) -> int:
        return len(self._kept)

    def forget(self) -> None:
        """Drop all captures; call it when graphs change."""
        self._kept.clear()
        self._seen.clear()

    def _capture(
        self, key: Key, graph: WholeGraph, step: StepInputs, layout: object
    ) -> list[Tensor] | None:
        why: object = None
        if not self._has_room():
            why = f"less than {LEAST_FREE:.0%} of the device's memory is free"
        else:
            try:
                captured = self._captured(graph, step, self._pool(key.stream))
            except Exception as error:  # an operator that can't be captured, or too little memory
                why = f"{type(error).__name__}: {error}"
                if isinstance(error, torch.OutOfMemoryError):
                    self._kept.clear()
        if why is not None:
            log.warning("a step isn't captured: %s", why)
            self._seen.put(key, (layout, True))
            return None
        captured.held.append(layout)
        self._kept.put(key, captured)
        return [result.clone() for result in captured.results]

    def _has_room(self) -> bool:
        """Return True if a capture leaves other parts of the process enough memory.

        Without room, what the captures hold is given back.
        """
        if self._free() >= LEAST_FREE:
            return True
        self._kept.clear()
        return False

    def _pool(self, stream: int) -> object:
        """Return the pool of a stream's captures; without any, a new one."""
        shared = (kept.pool for key, kept in self._kept.items() if key.stream == stream)
        return next(shared, None) or self.recorder.pool()

    def _captured(self, graph: WholeGraph, step: StepInputs, pool: object) -> CapturedStep[object]:
        run, memory = graph.make(), step.memory()
        with holding() as held:
            results, replay = self.recorder.capture(lambda: list(run(memory.fetch())), pool)
        return CapturedStep(memory, results, replay, held, pool)
