"""A worker outlives what its model fails at besides pictures."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from maskfx.serve.config import ServeSettings
from maskfx.serve.messages import Alive, Forget, JobSpan, Stop
from maskfx.serve.models.fake_model import FakeModel
from maskfx.serve.workers.executor import WorkerAddress
from maskfx.serve.workers.link_keys import RemoteAddress
from maskfx.serve.workers.process import WorkerProcess

PLACES = [
    (None, "", False),
    ("{}/cache", "", False),  # all workers of this machine share it
    ("{}/cache", "n", True),
    ("file://{}/cache", "", True),
    ("file://{}/cache", "n", True),
]


class Broken:
    """A model that can't forget, and can't count."""

    def __init__(self) -> None:
        self.closed = False

    def ready(self) -> Any:
        return Alive()

    def aside(self) -> list[str]:
        return []

    def cache(self) -> dict[str, int]:
        raise OSError("the directory is gone")

    def forget(self, template: str) -> None:
        raise ValueError("it isn't pinned")

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def worker(monkeypatch: pytest.MonkeyPatch) -> WorkerProcess:
    made = WorkerProcess(WorkerAddress("ipc:///nowhere", "w"), ServeSettings(model="fake"))
    for name in ("start", "close"):
        monkeypatch.setattr(made._link, name, lambda: None)
    return made


def test_a_cache_that_cant_be_counted_is_no_death(worker: WorkerProcess) -> None:
    worker._model = Broken()  # type: ignore[assignment]
    assert worker._alive() == Alive(0, {})


def test_a_template_that_cant_be_forgotten_is_no_death(
    worker: WorkerProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = Broken()
    monkeypatch.setattr("maskfx.serve.workers.process.load_model", lambda *_: model)
    for message in (Forget("t"), Stop()):
        worker._link.inbox.put((message, []))
    worker.run()
    assert model.closed


def test_times_are_relative_where_the_front_end_has_another_clock(
    worker: WorkerProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[Any] = []
    monkeypatch.setattr(worker._link, "send", sent.append)
    now = time.monotonic()
    span = JobSpan("a", 1, "step", now - 3, now - 1, 0)
    worker._tell(span)
    worker._place = replace(worker._place, remote=RemoteAddress("tcp://10.0.0.1:1", "", "", ""))
    worker._tell(span)
    here, there = sent
    assert here == span
    assert there.relative
    assert (there.began, there.ended) == pytest.approx((-3, -1), abs=0.5)
    assert there.shifted(now, relative=False).began == pytest.approx(span.began, abs=0.5)


@pytest.mark.parametrize(("place", "node", "named"), PLACES)
def test_workers_of_a_url_or_of_a_cluster_name_their_store(
    place: str | None, node: str, named: bool, tmp_path: Path
) -> None:
    where = None if place is None else place.format(tmp_path)
    settings = ServeSettings(model="fake", cache_dir=where)
    worker = WorkerProcess(WorkerAddress("ipc:///nowhere", "w", node=node), settings)
    ready = worker._ready(FakeModel(settings, lambda _: None))
    assert ready.node == node
    assert bool(ready.disk) == named
    again = WorkerProcess(WorkerAddress("ipc:///nowhere", "v", node=node), settings)
    assert again._ready(FakeModel(settings, lambda _: None)).disk == ready.disk
