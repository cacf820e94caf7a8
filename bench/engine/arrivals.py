"""Latency of requests that arrive at random, of each side the same ones, for bench.engine.

They come in blocks, and the sides in turn within each; a run that was stopped goes on with the
next block. Loads are in parts of the capacity of diffusers in batches, measured before each block,
for the machine's pace changes; heavy loads are for our sides alone. Sides: diffusers in batches,
the engine with static batches, with all work in its loop (the paper's strawman), with encoders and
VAE in another process, in the requests' threads, and so with admission by slack, which lets a
request join the steps of others only where that gains.
"""

from __future__ import annotations

import math
import queue
import random
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import maskfx
from bench.engine.bed import Bench, Request
from maskfx.engine.processes.helper_processes import HelperProcesses
from maskfx.engine.processes.placement import InEngineLoop
from maskfx.runtime.hardware import cpu_threads as giving
from maskfx.scheduling.slack_admission import SlackAdmission

Blocks = dict[str, list[dict[str, Any]]]  # by load


@dataclass(frozen=True)
class Plan:
    """A number of requests in a number of blocks, at each load."""

    requests: int
    blocks: int
    batch: int
    loads: Sequence[float]
    heavy: Sequence[float]


class Served(NamedTuple):
    """When a request came, began and ended."""

    came: float
    began: float
    ended: float


def arrivals(bench: Bench, plan: Plan, begun: Blocks, run: str) -> Iterator[Blocks]:
    """All blocks so far, after each; `begun` are those of an earlier run, `run` names a block's."""
    blocks: Blocks = {load: list(known) for load, known in begun.items()}
    group = bench.requests(plan.requests, seed=7)
    size = math.ceil(plan.requests / plan.blocks)
    for load in (*plan.loads, *plan.heavy):
        known = blocks.setdefault(f"{load:g}", [])
        for block in range(len(known), math.ceil(plan.requests / size)):  # none without requests
            own = group[block * size : (block + 1) * size]
            rate = dense_capacity(bench, plan.batch)
            times = poisson(len(own), load * rate, seed=3 + block)
            served: dict[str, list[Served]] = {}
            for name, serve in sides_of(bench, own, plan.batch).items():
                if load in plan.loads or not name.startswith("diffusers"):
                    served[name] = from_start(serve(times))
                    told = {k: round(v, 2) for k, v in summary(served[name]).items()}
                    print({"load": load, "block": block, "side": name, **told}, flush=True)
            known.append({"run": run, "capacity": rate, "served": served})
            yield blocks


def from_start(served: Sequence[Served]) -> list[Served]:
    """In milliseconds' precision since the first came."""
    first = min(one.came for one in served)
    return [Served(*(round(at - first, 3) for at in one)) for one in served]


def rows_of(blocks: Mapping[str, Sequence[Mapping[str, Any]]]) -> list[dict[str, Any]]:
    """A row for each load and side, over its blocks."""
    rows = []
    for load, known in blocks.items():
        for name in known[0]["served"] if known else ():
            parts = [[Served(*one) for one in block["served"][name]] for block in known]
            whole = [one for part in parts for one in part]
            rows.append(
                {
                    "load": float(load),
                    "side": name,
                    "capacities": [block["capacity"] for block in known],
                    "requests": len(whole),
                    **summary(whole),
                    "busy": statistics.mean(map(busy, parts)),
                    "blocks": list(map(summary, parts)),
                }
            )
    return rows


def sides_of(bench: Bench, group: Sequence[Request], batch: int) -> dict[str, Any]:
    waiting = maskfx.BatchPolicy(batch=batch)
    ours: dict[str, Callable[[], maskfx.Engine]] = {
        "engine static": lambda: StaticEngine(waiting, running=batch),
        "engine in loop": lambda: maskfx.Engine(waiting, running=2 * batch, outside=InEngineLoop()),
        "engine": lambda: maskfx.Engine(waiting, running=2 * batch, outside=HelperProcesses(1)),
        "engine in threads": lambda: maskfx.Engine(waiting, running=2 * batch),
        "engine by slack": lambda: maskfx.Engine(
            waiting, running=4 * batch, admission=SlackAdmission()
        ),
    }
    sides = {name: over_engine(make, bench, group) for name, make in ours.items()}
    return {"diffusers static": over_batches(bench, group, batch), **sides}


class StaticEngine(maskfx.Engine):
    """Admits a batch only when the one before has left: static batching, for comparison."""

    def _admit(self, now: float) -> None:
        if not self._requests.active:
            super()._admit(now)


def poisson(count: int, rate: float, seed: int) -> list[float]:
    draw, at, out = random.Random(seed), 0.0, []
    for _ in range(count):
        at += draw.expovariate(rate)
        out.append(at)
    return out


def over_engine(make: Callable[[], maskfx.Engine], bench: Bench, group: Sequence[Request]) -> Any:
    def serve(arrivals: Sequence[float]) -> list[Served]:
        with make() as engine:
            wait_all(engine, bench, group[:2])  # processes are up
            start = time.perf_counter()
            tickets = []
            for request, at in zip(group, arrivals, strict=True):
                time.sleep(max(0.0, start + at - time.perf_counter()))
                tickets.append(engine.submit(bench.edits, **bench.call(request)))
            for ticket in tickets:
                ticket.result()
            return [Served(t.submitted, t.started, t.finished) for t in tickets]

    return serve


def over_batches(bench: Bench, group: Sequence[Request], batch: int) -> Any:
    """diffusers as its own server examples batch: what waits goes into the next whole run."""

    def serve(arrivals: Sequence[float]) -> list[Served]:
        waiting: queue.Queue[int] = queue.Queue()
        served: dict[int, Served] = {}

        def work() -> None:
            while len(served) < len(group):
                taken = [waiting.get()]
                while len(taken) < batch and not waiting.empty():
                    taken.append(waiting.get())
                began = time.perf_counter()
                bench.dense([group[i] for i in taken])
                ended = time.perf_counter()
                for i in taken:
                    served[i] = Served(came[i], began, ended)

        came: dict[int, float] = {}
        giving.give_back()  # this thread's idle workers would slow the server's
        worker = threading.Thread(target=work)
        worker.start()
        start = time.perf_counter()
        for i, at in enumerate(arrivals):
            time.sleep(max(0.0, start + at - time.perf_counter()))
            came[i] = time.perf_counter()
            waiting.put(i)
        worker.join()
        return [served[i] for i in range(len(group))]

    return serve


def summary(served: Sequence[Served]) -> dict[str, float]:
    latency = sorted(s.ended - s.came for s in served)
    return {
        "mean": statistics.mean(latency),
        "p50": statistics.median(latency),
        "p95": latency[min(len(latency) - 1, round(0.95 * len(latency)))],
        "queued": statistics.mean(s.began - s.came for s in served),
    }


def busy(served: Sequence[Served]) -> float:
    """The share of the time in which some request was under way."""
    spans = sorted((s.began, s.ended) for s in served)
    spent, until = 0.0, spans[0][0]
    for began, ended in spans:
        spent += max(0.0, ended - max(began, until))
        until = max(until, ended)
    return spent / (until - min(s.came for s in served))


def wait_all(engine: maskfx.Engine, bench: Bench, group: Sequence[Request], **more: Any) -> None:
    tickets = [engine.submit(bench.edits, **bench.call(r, **more)) for r in group]
    for ticket in tickets:
        ticket.result()


def dense_capacity(bench: Bench, batch: int) -> float:
    """Requests per second of diffusers in full batches that come one after another."""
    group = bench.requests(6 * batch, seed=7)
    bench.dense(group[:batch])
    served = over_batches(bench, group, batch)([0.0] * len(group))
    spent: float = max(s.ended for s in served) - min(s.began for s in served)
    return len(group) / spent
