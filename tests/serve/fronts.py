"""A real `Front` with real workers that run the fake model, for tests."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any

import numpy as np

from maskfx.scheduling.load import Decision, Demand, TemplateTier, Work, Worker
from maskfx.scheduling.step_reports import LoadFacts, Stepped
from maskfx.serve.config import ServeSettings
from maskfx.serve.frontend.frontend import Front
from maskfx.serve.metrics import Metrics
from maskfx.serve.request import Finished, Pictures, Preview, Request, RequestKind
from maskfx.serve.workers.executor import LOCAL, Executor

QUICK = "fake:seconds_per_step=0.01,steps=4"


class PlainCosts:
    """Costs that are known beforehand."""

    def __init__(self, seconds: float = 0.01) -> None:
        self.seconds = seconds
        self.observed: list[tuple[Stepped, int]] = []
        self.around_observed: list[tuple[Work, float]] = []
        self.loads: list[LoadFacts] = []
        self.reads: list[tuple[int, float]] = []

    def step(self, batch: Sequence[Work]) -> float:
        return self.seconds

    def around(self, work: Work) -> float:
        return 0.0

    def recording(self, work: Work, tier: TemplateTier) -> float:
        return 0.0

    def observe(self, stepped: Stepped, loaded: int = 0) -> None:
        self.observed.append((stepped, loaded))

    def observe_around(self, work: Work, seconds: float) -> None:
        self.around_observed.append((work, seconds))

    def learn_loads(self, facts: LoadFacts) -> None:
        self.loads.append(facts)

    def observe_reads(self, nbytes: int, seconds: float) -> None:
        self.reads.append((nbytes, seconds))


class InOrder:
    """First come, first served; drops what can't be in time alone."""

    def __init__(self, costs: PlainCosts) -> None:
        self.costs = costs

    def decide(self, now: float, waiting: Sequence[Demand], workers: Sequence[Worker]) -> Decision:
        free = {worker.name: worker.free for worker in workers}
        starts, drops = [], []
        for demand in waiting:
            if now + demand.work.steps * self.costs.step([demand.work]) > demand.due:
                drops.append(demand)
                continue
            name = max(free, key=lambda name: free[name])
            if free[name] > 0:
                free[name] -= 1
                starts.append((demand, name))
        return Decision(tuple(starts), tuple(drops))


def request(id: str = "a", **fields: Any) -> tuple[Request, Pictures]:
    """A small edit, and its pictures."""
    image = np.arange(64 * 48 * 3, dtype=np.uint32).astype(np.uint8).reshape(48, 64, 3)
    mask = np.zeros((48, 64), bool)
    mask[8:24, 16:40] = True
    planes: dict[str, Any] = {"images": (image,), "mask": mask, "controls": ()}
    planes |= {name: fields.pop(name) for name in planes if name in fields}
    plain: dict[str, Any] = {"kind": RequestKind.EDIT, "prompt": "a cat", "seed": 7}
    return Request(id=id, **(plain | fields)), Pictures(**planes)


@contextlib.asynccontextmanager
async def fronted(
    model: str = QUICK,
    *,
    workers: int = 1,
    wait: bool = True,
    clock: Callable[[], float] | None = None,
    executor: Executor = LOCAL,
    told: ServeSettings | None = None,
    **settings: Any,
) -> AsyncIterator[Front]:
    """A front whose workers are ready; closed afterwards, and no child is left.

    `told` are its settings, in place of all others.
    """
    told = told or ServeSettings(model=model, workers=workers, **settings)
    costs = PlainCosts()
    more: dict[str, Any] = {}
    if clock is not None:
        more["clock"] = clock
    front = Front(told, InOrder(costs), costs, Metrics(), executor=executor, **more)
    front.start()
    try:
        if wait:
            assert await front.until_ready()
            await eventually(lambda: front.health().workers == workers)
        yield front
    finally:
        pids = processes(front)
        await asyncio.wait_for(front.close(), 20)
        await eventually(lambda: not [pid for pid in pids if alive(pid)], 5)


async def made(front: Front, one: tuple[Request, Pictures]) -> Finished:
    async for answer in front.serve(*one):
        if isinstance(answer, Finished):
            return answer
    raise AssertionError("no picture came")


async def previews(front: Front, one: tuple[Request, Pictures]) -> list[Preview]:
    return [answer async for answer in front.serve(*one) if isinstance(answer, Preview)]


async def eventually(true: Callable[[], Any], seconds: float = 10.0) -> None:
    """Wait until something is so."""
    loop = asyncio.get_running_loop()
    until = loop.time() + seconds
    while not true():
        assert loop.time() < until, "it didn't come to that"
        await asyncio.sleep(0.01)


def processes(front: Front) -> list[int]:
    children = front.workers.children
    found = [child.process.pid for child in children if child.process is not None]
    return [pid for pid in found if pid is not None]


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def run(test: Awaitable[None], seconds: float = 60.0) -> None:
    """A test on an event loop of its own; one that hangs fails."""

    async def bounded() -> None:
        await asyncio.wait_for(test, seconds)

    asyncio.run(bounded())
