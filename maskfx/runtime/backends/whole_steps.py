"""WholeSteps: replays one CUDA graph for each batch whose layout comes again, as it does in edits.

A batch's second step is captured whole, attentions included: its spans are those of the layout.
Each later step brings its inputs to where they were at the capture, cached rows by one launch for
all, and replays. What can't be captured or brought runs operator by operator.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Collection, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from maskfx.ir.lru import LruCache
from maskfx.ops import has_kernels
from maskfx.ops.base import holding
from maskfx.runtime.backends.cuda_graphs import Recorder
from maskfx.runtime.backends.graph_function import Fetch, Run

log = logging.getLogger(__name__)

KEPT = 8  # captured layouts
SEEN = 32  # layouts that are known to have run
# What an input's rows are copied from: (batch, sites, ...) rows and sites; None for other inputs
Copies = Callable[[str], list[tuple[Tensor, Tensor]] | None]


@dataclass(frozen=True)
class Graph:
    """A graph that may be captured.

    Args:
        key: What it is known by.
        make: Returns what runs it.
        names: Of its inputs.
        host: Names of those that lie in host memory and decide what is launched.
    """

    key: Hashable
    make: Callable[[], Run]
    names: Sequence[str]
    host: Collection[str]


@dataclass
class CapturedStep:
    """A capture of a graph for one layout.

    Args:
        inputs: Values by name, in the memory that the graph reads.
        host: Names of those in host memory, which are the same in each step.
        last: What was copied there last, and its version.
        copied: Names of inputs whose rows `rows` copies.
        rows: Copies cached rows; None if there are none.
        results: Memory that a replay writes.
        replay: Computes them again.
        held: Keeps tables whose memory the graph reads.
    """

    inputs: dict[str, Any]
    host: Collection[str]
    last: dict[str, tuple[Any, int]]
    copied: list[str]
    rows: Any
    results: list[Tensor]
    replay: Callable[[], None]
    held: list[object]

    def run(self, fetch: Fetch, copies: Copies) -> list[Tensor] | None:
        """Return the results of a step; None if its inputs don't fit the capture."""
        targets, values = [], []
        marks: dict[str, tuple[Any, int]] = {}
        for name, kept in self.inputs.items():
            if name in self.copied:
                continue
            value: Any = fetch(name)
            mark = value, version(value)
            if mark[0] is self.last[name][0] and mark[1] == self.last[name][1] >= 0:
                continue
            if name in self.host or not fits(value, kept):
                return None
            marks[name] = mark
            targets.append(kept)
            values.append(value)
        sources = addresses(self.copied, copies, self.inputs)
        if sources is None:
            return None
        if targets:
            torch._foreach_copy_(targets, values)
            self.last.update(marks)
        if self.rows is not None:
            self.rows.run(sources)
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
        self._kept: LruCache[Hashable, CapturedStep] = LruCache(KEPT)
        self._lock = threading.Lock()

    def run(self, layout: object, graph: Graph, fetch: Fetch, copies: Copies) -> Any:
        """Run a graph; return None if its layout is new or its step can't be captured.

        Args:
            layout: What inputs' sizes and the numbers on the host follow from; it is held.
            graph: The graph.
            fetch: Gives its inputs.
            copies: From where rows of inputs are copied.
        """
        with self._lock:
            key = id(layout), graph.key, current_stream()
            known = self._kept.get(key)
            if known is not None:
                return known.run(fetch, copies)
            before = self._seen.get(key)
            if before is None:
                self._seen.put(key, (layout, False))
            if before is None or before[1]:
                return None
            return self._capture(key, graph, fetch, copies, layout)

    def forget(self) -> None:
        """Drop all captures; call it when graphs change."""
        self._kept.clear()
        self._seen.clear()

    def _capture(
        self, key: Hashable, graph: Graph, fetch: Fetch, copies: Copies, layout: object
    ) -> Any:
        try:
            step = self._captured(graph, fetch, copies)
        except Exception as error:  # an operator that can't be captured, or too little memory
            log.warning("a step isn't captured: %s: %s", type(error).__name__, error)
            self._seen.put(key, (layout, True))
            if isinstance(error, torch.OutOfMemoryError):
                self._kept.clear()
            return None
        step.held.append(layout)
        self._kept.put(key, step)
        return [result.clone() for result in step.results]

    def _captured(self, graph: Graph, fetch: Fetch, copies: Copies) -> CapturedStep:
        run = graph.make()
        given: dict[str, Any] = {name: fetch(name) for name in graph.names}
        last = {name: (value, version(value)) for name, value in given.items()}
        inputs = {n: value if n in graph.host else value.clone() for n, value in given.items()}
        copied, targets = [], []
        for name in given:
            found = copied_rows(copies(name), inputs[name]) if name not in graph.host else []
            if found:
                copied.append(name)
                del last[name]
                targets += found
        rows = None
        if targets:
            from maskfx.ops.kernels.rows import RowCopies

            rows = RowCopies(targets)
        with holding() as held:
            results, replay = self.recorder.capture(lambda: list(run(inputs.__getitem__)))
        return CapturedStep(inputs, graph.host, last, copied, rows, results, replay, held)


def copied_rows(parts: list[tuple[Tensor, Tensor]] | None, value: Tensor) -> list[Tensor]:
    """Return where an input's rows go, a part for each batch element; nothing if not copied."""
    if not parts or not has_kernels(value.device):
        return []
    from maskfx.ops.kernels.rows import can_copy

    counts = [len(index) for held, index in parts for _ in range(len(held))]
    fit = sum(counts) == len(value) and all(can_copy(held, value) for held, _ in parts)
    return list(value.split(counts)) if fit else []


def addresses(
    names: Sequence[str], copies: Copies, inputs: dict[str, Any]
) -> list[tuple[int, Tensor]] | None:
    """Return where the rows of inputs begin now and which are read; None if they don't fit."""
    from maskfx.ops.kernels.rows import can_copy

    found: list[tuple[int, Tensor]] = []
    for name in names:
        parts, value, count = copies(name), inputs[name], 0
        if parts is None or not all(can_copy(held, value) for held, _ in parts):
            return None
        for held, index in parts:
            each, start = held.stride(0) * held.element_size(), held.data_ptr()
            found += [(start + number * each, index) for number in range(len(held))]
            count += len(held) * len(index)
        if count != len(value):
            return None
    return found


def fits(value: Any, kept: Any) -> bool:
    """Return True if a value can be copied to where the graph reads one."""
    same = isinstance(value, Tensor) and value.shape == kept.shape and value.dtype == kept.dtype
    return same and value.device == kept.device


def version(value: object) -> int:
    """Return the number of changes in place; -1 if they can't be counted."""
    return value._version if isinstance(value, Tensor) and not value.is_inference() else -1


def current_stream() -> int:
    return torch.cuda.current_stream().cuda_stream if torch.cuda.is_available() else 0
