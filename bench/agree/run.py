"""A short run of the real server beside the simulator: do they agree?

    python -m bench.agree [--model PATH | fake:...] [--requests N] [--load 0.6 0.9] [--workers 1 2]

A server is launched as any. Edits with real mask ratios, of mixed sizes and steps, come to it over
HTTP at random moments; the trace of arrivals and latencies is replayed by `bench.simulate` with the
same scheduler, router, workers and slots, and mean and P95 latency are compared. A ratio off by
more than 5 % is a failure: exit status 1.

The fake model's costs are those that its settings state, all else counts as disagreement. A real
model's (and with --calibrate the fake one's) are fitted to other runs on the same server before:
steps to a calibration with arrivals of its own, what is around the steps and at the front to
requests that are alone. Edits are recorded on every worker before that: a template that isn't
there yet is no part of this comparison. Load 1 is what the simulated server does of a crowd that is
there at once.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import count, cycle, islice
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from bench.agree.fit import Course, courses, fitted, parts
from bench.agree.server import Ended, Note, Started, read_notes
from bench.harness import ROOT, header, write_json
from bench.load.client import Target, edit, target
from bench.masks import make
from bench.simulate.run import replay
from bench.simulate.simulation import Simulation
from bench.simulate.traffic import Line, gaps, ratios, read_trace
from maskfx.scheduling.cost_model import FittedCosts
from maskfx.scheduling.load import Demand, Work
from maskfx.scheduling.scheduler import make_scheduler
from maskfx.serve.models import fake_model

RESULTS = ROOT / "bench" / "results"
FAKE = "fake:seconds_per_step=0.01,seconds_per_site=0.0001"
ALLOWED = 0.05
CROWD = 400  # requests
CALIBRATION = 0.6  # of what one request after the other would take; in bursts
SITE = 8  # pixels
SEED = "1000000000"  # the first; they are as many characters long as it

Row = dict[str, Any]


@dataclass(frozen=True)
class Mix:
    """The edits of a run: `count` different ones, each of which may come often."""

    edits: int
    sides: tuple[int, ...]
    steps: tuple[int, ...]
    masks: str = "public"

    def calls(self) -> list[bytes]:
        """What is sent, with `SEED` in place of a seed; sizes and steps by turns."""
        shares = ratios(self.masks, self.edits, np.random.default_rng(5))
        found = []
        for number, share in enumerate(shares.tolist()):
            side = self.sides[number % len(self.sides)]
            across = side // SITE
            mask = make("strokes", across, across, share, seed=number).numpy()
            found.append(
                edit(
                    side,
                    f"edit {number}",
                    mask.repeat(SITE, 0).repeat(SITE, 1),
                    num_inference_steps=self.steps[number // len(self.sides) % len(self.steps)],
                    seed=SEED,
                )
            )
        return found


@dataclass(frozen=True)
class Sent:
    """What a client saw."""

    seed: int
    at: float
    seconds: float


class Run:
    """A server that runs, and what is asked of it."""

    def __init__(self, server: Target, mix: Mix) -> None:
        self.server, self.calls = server, mix.calls()
        self._seeds = count(int(SEED))
        self._edits: dict[int, int] = {}  # by seed

    async def one(self, number: int, at: float = 0.0) -> Sent:
        """An edit, at a moment."""
        seed = next(self._seeds)
        self._edits[seed] = number
        call = self.calls[number].replace(SEED.encode(), str(seed).encode())
        await asyncio.sleep(max(0.0, at - time.monotonic()))
        began = time.monotonic()
        answer = await self.server.call(call)
        assert answer is not None
        if answer.status != 200:
            raise RuntimeError(f"edit {number}: status {answer.status}: {answer.body[:300]!r}")
        return Sent(seed, began, answer.seconds)

    async def stream(self, rate: float, requests: int, burst: float, seed: int) -> list[Sent]:
        draw = np.random.default_rng(seed)
        which = draw.integers(0, len(self.calls), requests).tolist()
        times = time.monotonic() + 0.5 + np.cumsum(gaps(requests, rate, burst, draw))
        coming = [self.one(n, at) for n, at in zip(which, times.tolist(), strict=True)]
        return list(await asyncio.gather(*coming))

    async def warm(self, workers: int) -> None:
        """Until every worker has made every edit."""
        for _ in range(20):
            missing = {n: workers - k for n, k in enumerate(self._made()) if k < workers}
            if not missing:
                return
            for number in missing:
                await asyncio.gather(*(self.one(number) for _ in range(2 * workers)))
        raise RuntimeError(f"these edits were never made by all workers: {sorted(missing)}")

    def _made(self) -> list[int]:
        """By how many workers each edit was made."""
        notes = self.notes()
        ended = {note.id for note in notes if isinstance(note, Ended)}
        starts = [n for n in notes if isinstance(n, Started) and n.id in ended]
        by = {(self._edits[n.seed], n.worker) for n in starts}
        return [sum(edit == number for edit, _ in by) for number in range(len(self.calls))]

    async def alone(self) -> list[Sent]:
        """Each edit twice, one after the other."""
        return [await self.one(n) for n in [*range(len(self.calls))] * 2]

    def notes(self) -> list[Note]:
        return read_notes(self.server.written)


@dataclass(frozen=True)
class Calibrated:
    """What the simulator gets."""

    costs: FittedCosts
    front: float = 0.0  # seconds of every request at the front


def stated(model: str) -> FittedCosts:
    said = fake_model.parse(model)
    return FittedCosts(
        base=said.seconds_per_step,
        per_request=0.0,
        per_site=said.seconds_per_site,
        origin=f"stated: {model}",
    )


async def calibrated(run: Run, workers: int, requests: int) -> Calibrated:
    """Single requests, then a crowd."""
    await run.warm(workers)
    single = await run.alone()
    seen = courses(run.notes())
    own = [seen[one.seed] for one in single]
    front = statistics.mean(
        one.seconds - (c.ended - c.started.entered) for one, c in zip(single, own, strict=True)
    )
    before = len(run.notes())
    rate = CALIBRATION * workers / statistics.mean(one.seconds for one in single)
    await run.stream(rate, requests, burst=2.0, seed=1)
    origin = f"bench.agree: {requests} requests on {workers} workers, {len(single)} alone"
    return Calibrated(fitted(run.notes()[before:], own, origin), front)


def capacity(shared: Sequence[Work], costs: FittedCosts, settings: Row) -> float:
    """Requests per second, as the simulator predicts, where a crowd is there at once."""
    workers, slots = settings["workers"], settings["max_num_seqs"]
    scheduler = make_scheduler(settings["scheduler"], settings["router"], costs)
    simulation = Simulation(scheduler, costs, workers, slots, queue=CROWD, host=0)
    turns = islice(cycle(shared), CROWD)
    crowd = (Demand(str(n), replace(work, template=None), 0.0) for n, work in enumerate(turns))
    return CROWD / simulation.run(crowd).ended


def trace_of(sent: Sequence[Sent], seen: dict[int, Course]) -> list[Line]:
    """Moments from the beginning, on the client's clock."""
    start = min(one.at for one in sent)
    lines = []
    for one in sorted(sent, key=lambda one: one.at):
        work = seen[one.seed].work
        lines.append(
            Line(
                arrival=one.at - start,
                sites=work.sites,
                whole=work.whole,
                steps=work.steps,
                branches=work.branches,
                latency=one.seconds,
            )
        )
    return lines


def compared(
    lines: Sequence[Line], path: Path, told: Calibrated, settings: Row, allowed: float = ALLOWED
) -> Row:
    """A trace, written and replayed."""
    path.write_bytes(b"".join(msgspec.json.encode(line) + b"\n" for line in lines))
    scheduler = make_scheduler(settings["scheduler"], settings["router"], told.costs)
    found = replay(
        read_trace(path),
        scheduler,
        told.costs,
        settings["workers"],
        settings["max_num_seqs"],
        settings["queue"],
        host=0,
        front=told.front,
    )
    off = [found["mean_off"], found["p95_off"]]
    met = found["done"] == len(lines) and all(abs(ratio) <= allowed for ratio in off)
    return found | {"met": met}


@contextmanager
def running(settings: Row, mix: Mix) -> Iterator[Run]:
    with target("bench.agree.server", **settings) as server:
        yield Run(server, mix)


async def measure(run: Run, settings: Row, given: argparse.Namespace, folder: Path) -> Row:
    """One number of workers: calibration, then all loads."""
    workers = settings["workers"]
    if is_fake(given.model) and not given.calibrate:
        told = Calibrated(stated(given.model))
        await run.alone()  # imports, connections, shared memory
    else:
        told = await calibrated(run, workers, given.calibration)
    shared = [c.work for c in courses(run.notes()).values()]
    rows = []
    for load in given.load:
        rate = load * capacity(shared, told.costs, settings)
        sent = await run.stream(rate, given.requests, given.burst, seed=round(1000 * load))
        seen = courses(run.notes())
        path = folder / f"workers-{workers}-load-{load:g}.jsonl"
        row = {"workers": workers, "load": load, "per_second": rate}
        row |= compared(trace_of(sent, seen), path, told, settings)
        around = statistics.mean(told.costs.around(seen[one.seed].work) for one in sent)
        row["simulated_parts"] = {
            "queued": row["queued"],
            "around": around,
            "steps": row["mean"] - row["queued"] - around - told.front,
            "front": told.front,
        }
        own = [seen[one.seed] for one in sent]
        inside = statistics.mean(c.ended - c.started.entered for c in own)
        row["measured_parts"] = parts(own) | {"front": row["measured_mean"] - inside}
        rows.append(row)
        tell(row)
    costs = msgspec.to_builtins(told.costs)
    return {"settings": settings, "costs": costs, "front": told.front, "rows": rows}


def is_fake(model: str) -> bool:
    return model.partition(":")[0] == "fake"


def settings_of(given: argparse.Namespace, workers: int, folder: Path) -> Row:
    found: Row = {
        "model": given.model,
        "workers": workers,
        "max_num_seqs": given.slots,
        "queue": 256,
        "scheduler": given.scheduler,
        "router": given.router,
    }
    if is_fake(given.model):
        path = folder / "costs.json"
        path.write_bytes(stated(given.model).to_json())
        found["costs"] = str(path)
    return found


HEAD = ("workers", "load", "", "measured", "simulated", "off")


def tell(row: Row) -> None:
    for name in ("mean", "p95"):
        seen, said, off = row[f"measured_{name}"], row[name], row[f"{name}_off"]
        cells = (row["workers"], row["load"], name, f"{seen:.3f}", f"{said:.3f}", f"{off:+.1%}")
        print("".join(f"{cell!s:>11}" for cell in cells), flush=True)


def main(command: Sequence[str]) -> int:
    given = parse(command)
    mix = Mix(given.edits, tuple(given.sides), tuple(given.steps))
    result: Row = {**header("bench.agree", command), "allowed": ALLOWED, "runs": []}
    result["mix"] = msgspec.to_builtins(mix)
    print("".join(f"{cell:>11}" for cell in HEAD))
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        for workers in given.workers:
            settings = settings_of(given, workers, folder)
            with running(settings, mix) as run:
                result["runs"].append(asyncio.run(measure(run, settings, given, folder)))
            settings.pop("costs", None)  # a temporary file: the figures stand beside it
    result["met"] = all(row["met"] for each in result["runs"] for row in each["rows"])
    write_json(Path(given.out), result)
    return 0 if result["met"] else 1


def parse(command: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="bench.agree", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--model", default=FAKE, help="a folder, or fake:...")
    parser.add_argument("--requests", type=int, default=200, help="of each comparison")
    parser.add_argument("--calibration", type=int, default=100, help="requests, of one that is")
    parser.add_argument("--calibrate", action="store_true", help="a fake model, too")
    parser.add_argument("--load", type=float, nargs="*", default=[0.6, 0.9])
    parser.add_argument("--workers", type=int, nargs="*", default=[1, 2])
    parser.add_argument("--slots", type=int, default=4)
    parser.add_argument("--burst", type=float, default=1.0, help="2: bursts; 1: Poisson")
    parser.add_argument("--edits", type=int, default=12, help="different ones")
    parser.add_argument("--sides", type=int, nargs="*", default=[128, 192, 256], help="pixels")
    parser.add_argument("--steps", type=int, nargs="*", default=[10, 20])
    parser.add_argument("--scheduler", choices=("slack", "fcfs"), default="slack")
    parser.add_argument("--router", choices=("cost", "requests", "tokens"), default="cost")
    parser.add_argument("--out", default=str(RESULTS / "agree.json"))
    return parser.parse_args(command)
