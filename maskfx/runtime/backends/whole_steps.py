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
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import Tensor

from maskfx.ir.lru import LruCache
from maskfx.ops.base import holding
from maskfx.runtime.backends.cuda_graphs import Recorder
from maskfx.runtime.backends.graph_function import Run
from maskfx.runtime.devices import current_stream

log = logging.getLogger(__name__)

KEPT = 8  # captured layouts
SEEN = 32  # layouts that are known to have run
Step = TypeVar("Step", contravariant=True)


class Memory(Protocol[Step]):
    """The inputs of a capture."""

    def fetch(self) -> Callable[[str], Any]:
        """Return what gives the graph its inputs; called inside of the capture."""
        ...

    def bring(self, step: Step) -> bool:
        """Copy a step's inputs here; return False, with nothing copied, if they don't fit."""
        ...


class Inputs(Protocol):
    """The inputs of a step."""

    @property
    def form(self) -> Hashable:
        """Return what a capture depends on beside the layout."""
        ...

    def memory(self) -> Memory[Any]:
        """Return the memory of a capture, with these inputs."""
        ...


@dataclass(frozen=True)
class Graph:
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
    """

    memory: Memory[Step]
    results: list[Tensor]
    replay: Callable[[], None]
    held: list[object]

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
    """

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder
        # layouts, which are held because their ids are in the key, and whether captures fail
        self._seen: LruCache[Hashable, tuple[object, bool]] = LruCache(SEEN)
        self._kept: LruCache[Hashable, CapturedStep[Any]] = LruCache(KEPT)
        self._lock = threading.Lock()

    def run(self, layout: object, graph: Graph, step: Inputs) -> list[Tensor] | None:
        """Run a graph; return None if its layout is new or its step can't be captured.

        Args:
            layout: What inputs' sizes and the numbers on the host follow from; it is held.
            graph: The graph.
            step: Its inputs.
        """
        with self._lock:
            key = id(layout), graph.key, step.form, current_stream()
            known = self._kept.get(key)
            if known is not None:
                return known.run(step)
            before = self._seen.get(key)
            if before is None:
                self._seen.put(key, (layout, False))
            if before is None or before[1]:
                return None
            return self._capture(key, graph, step, layout)

    def forget(self) -> None:
        """Drop all captures; call it when graphs change."""
        self._kept.clear()
        self._seen.clear()

    def _capture(
        self, key: Hashable, graph: Graph, step: Inputs, layout: object
    ) -> list[Tensor] | None:
        try:
            captured = self._captured(graph, step)
        except Exception as error:  # an operator that can't be captured, or too little memory
            log.warning("a step isn't captured: %s: %s", type(error).__name__, error)
            self._seen.put(key, (layout, True))
            if isinstance(error, torch.OutOfMemoryError):
                self._kept.clear()
            return None
        captured.held.append(layout)
        self._kept.put(key, captured)
        return [result.clone() for result in captured.results]

    def _captured(self, graph: Graph, step: Inputs) -> CapturedStep[Any]:
        run, memory = graph.make(), step.memory()
        with holding() as held:
            results, replay = self.recorder.capture(lambda: list(run(memory.fetch())))
        return CapturedStep(memory, results, replay, held)
