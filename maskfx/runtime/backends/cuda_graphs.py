"""Replays a graph's pieces as CUDA graphs: the host starts one launch where there were many.

A captured piece reads and writes the same memory in every run, so its inputs are copied to where
they were at the capture. Operators that read spans on the host are pieces of their own and are not
captured; nor is a wait for an input, because pieces begin where late inputs are read.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Collection, Hashable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Protocol

import torch
from torch import Tensor, fx

from maskfx.compiler.pieces import Piece, cut
from maskfx.ir.lru import LruCache
from maskfx.ir.programs.program import Interface
from maskfx.ir.programs.sources import (
    CallSpans,
    LinePairs,
    OwnGroups,
    Pairs,
    RankGroups,
    RestSpans,
    Spans,
)
from maskfx.runtime.backends.eager import Runner
from maskfx.runtime.backends.graph_function import Fetch, Run
from maskfx.runtime.backends.pieces import PieceRunner, at_inputs

log = logging.getLogger(__name__)

BUCKETS = 8  # captures of a piece: one for each set of input sizes
AFTER = 1  # runs of the same sizes before a piece is captured
CAPTURING = threading.Lock()  # PyTorch allows one capture in a process at a time


Runs = Callable[[], list[Tensor]]
Replayed = tuple[list[Tensor], Callable[[], None]]


class Recorder(Protocol):
    """Captures what a function launches."""

    def capture(self, run: Runs, pool: object = None) -> Replayed:
        """Return the function's results, and what computes them again in the same memory.

        Captures with one `pool` share the memory of what they compute: they are replayed one after
        another, on one stream, and the results are read before the next replay.
        """
        ...

    def pool(self) -> object:
        """Return a new pool; it can't be used again after all of its captures are dropped."""
        ...


class CudaRecorder:
    """Captures CUDA graphs on one device.

    Pieces have a pool of memory each, because results of one are inputs of another.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def capture(self, run: Runs, pool: object = None) -> Replayed:
        with CAPTURING, torch.cuda.device(self._device):
            return self._capture(run, pool)

    def pool(self) -> object:
        return torch.cuda.graph_pool_handle()

    def _capture(self, run: Runs, pool: Any) -> Replayed:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            run()  # libraries allocate their workspaces, kernels are compiled and tuned
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
            results = run()
        graph.replay()  # a capture computes nothing
        return results, graph.replay


@dataclass
class Captured:
    """A capture of a piece for one set of input sizes."""

    inputs: dict[str, Tensor]
    results: list[Tensor]
    replay: Callable[[], None]

    def run(self, given: dict[str, Tensor]) -> list[Tensor]:
        for name, value in given.items():
            kept = self.inputs[name]
            if isinstance(value, Tensor) and kept.data_ptr() != value.data_ptr():
                kept.copy_(value, non_blocking=True)
        self.replay()
        return self.results


class CapturedPiece:
    """Runs a piece: the first times operator by operator, then from a capture for its sizes.

    Args:
        piece: The piece.
        recorder: Captures it.
        steady: Names of values that lie in the same memory in each run.
    """

    def __init__(self, piece: Piece, recorder: Recorder, steady: Collection[str]) -> None:
        self.names = [*piece.values, *piece.inputs]
        self.steady, self.recorder = frozenset(steady), recorder
        self._plain = Runner(piece.module)
        self._runs: LruCache[Hashable, int] = LruCache(8 * BUCKETS)
        self._kept: LruCache[Hashable, Captured] = LruCache(BUCKETS)
        self._fails = False

    def __call__(self, fetch: Fetch) -> Any:
        given: dict[str, Tensor] = {name: fetch(name) for name in self.names}
        key = tuple(map(size_of, given.values()))
        known = self._kept.get(key)
        if known is not None:
            return known.run(given)
        runs = self._runs.get(key) or 0
        self._runs.put(key, runs + 1)
        if self._fails or runs < AFTER:
            return self._plain(given.__getitem__)
        return self._capture(key, given)

    def _capture(self, key: Hashable, given: dict[str, Tensor]) -> object:
        inputs = {
            name: value.clone() if isinstance(value, Tensor) and name not in self.steady else value
            for name, value in given.items()
        }
        try:
            results, replay = self.recorder.capture(lambda: list(self._plain(inputs.__getitem__)))
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # an operator that can't be captured; it runs as before
            log.warning("a piece isn't captured: %s: %s", type(error).__name__, error)
            self._fails = True
            return self._plain(given.__getitem__)
        self._kept.put(key, Captured(inputs, results, replay))
        return results


def size_of(value: object) -> Hashable:
    if isinstance(value, Tensor):
        return tuple(value.shape), value.dtype, value.device
    return value


def reads_host(node: fx.Node, interface: Interface) -> bool:
    """Return True for operators whose work depends on numbers in host memory or a ragged mask."""
    sources = [
        interface.inputs.get(str(n.target)) for n in node.all_input_nodes if n.op == "placeholder"
    ]
    return any(
        isinstance(s, Spans | RestSpans | CallSpans | RankGroups | OwnGroups | Pairs | LinePairs)
        for s in sources
    )


def piecewise(
    interface: Interface,
    module: fx.GraphModule,
    waited: Collection[str],
    recorder: Recorder | None,
) -> PieceRunner[Piece]:
    """Return what runs a graph in pieces, and captures those that read nothing on the host.

    Args:
        interface: The program's.
        module: Its graph.
        waited: Inputs that may arrive while the graph runs.
        recorder: Captures pieces; without one they run operator by operator.
    """
    apart = separate(module, interface)
    waits = at_inputs(module, waited, 0) if waited else apart.__contains__
    pieces = cut(module, lambda node: node in apart or waits(node))
    hosts = [any(reads_host(node, interface) for node in calls_of(piece)) for piece in pieces]
    captured = [piece for piece, host in zip(pieces, hosts, strict=True) if not host]
    steady = {name for piece in captured for name in piece.results}
    kinds = dict(zip(map(id, pieces), hosts, strict=True))

    def compile_piece(piece: Piece) -> Run:
        if recorder is None or kinds[id(piece)]:
            return Runner(piece.module)
        return CapturedPiece(piece, recorder, steady)

    return PieceRunner(pieces, compile_piece)


def calls_of(piece: Piece) -> Sequence[fx.Node]:
    return [node for node in piece.module.graph.nodes if node.op == "call_function"]


def separate(module: fx.GraphModule, interface: Interface) -> set[fx.Node]:
    """Return where pieces begin: at operators that read the host, and right behind them."""
    starts: set[fx.Node] = set()
    before = False
    for node in module.graph.nodes:
        if node.op in ("placeholder", "get_attr"):
            continue
        host = reads_host(node, interface)
        if host != before:
            starts.add(node)
        before = host
    return starts


@cache
def recorder_on(device: torch.device) -> Recorder | None:
    """Return what captures on a device, or None where there are no CUDA graphs."""
    if device.type != "cuda" or not torch.cuda.is_available():
        return None
    return CudaRecorder(device)


__all__ = ["CapturedPiece", "CudaRecorder", "piecewise", "recorder_on"]
