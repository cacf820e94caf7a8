"""Counters that a slow disk delays don't delay the heartbeat that contains them."""

from __future__ import annotations

import threading
import time
from itertools import count

from maskfx.serve.config import ServeSettings
from maskfx.serve.messages import Alive
from maskfx.serve.workers import latest_counts
from maskfx.serve.workers.executor import WorkerAddress
from maskfx.serve.workers.latest_counts import LatestCounts
from maskfx.serve.workers.process import WorkerProcess


def test_quick_counters_are_fresh() -> None:
    numbers = count(1)
    counts = LatestCounts(lambda: {"hits.host": next(numbers)})
    assert [counts() for _ in range(3)] == [{"hits.host": n} for n in (1, 2, 3)]


def test_slow_counters_are_those_counted_last() -> None:
    numbers, free = count(1), threading.Event()
    free.set()

    def counted() -> dict[str, int]:
        free.wait()
        return {"hits.host": next(numbers)}

    counts = LatestCounts(counted)
    assert counts() == {"hits.host": 1}
    free.clear()
    assert [counts(), counts()] == [{"hits.host": 1}] * 2
    free.set()
    end = time.monotonic() + 10
    while counts() == {"hits.host": 1} and time.monotonic() < end:
        time.sleep(0.01)
    assert counts()["hits.host"] > 1


class Slow:
    """A model whose directory doesn't answer."""

    def __init__(self) -> None:
        self.free = threading.Event()

    def aside(self) -> list[str]:
        return []

    def cache(self) -> dict[str, int]:
        self.free.wait(10)
        return {}


def test_a_directory_that_doesnt_answer_delays_no_heartbeat() -> None:
    worker, model = WorkerProcess(WorkerAddress("ipc:///nowhere", "w"), ServeSettings()), Slow()
    worker._model = model  # type: ignore[assignment]
    began = time.monotonic()
    assert worker._alive() == Alive(0, {})
    assert time.monotonic() - began < 5 * latest_counts.PATIENCE + 1
    model.free.set()
