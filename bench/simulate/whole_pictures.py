"""PatchedServe's workload: whole pictures of three sizes with deadlines, and what serves them.

    python -m bench.simulate.whole_pictures [--models NAME ...] [--workers 1 8]
        [--deadlines 1 2 3 4 5] [--bursts 1 3] [--out FILE]

Pictures of three sizes in equal parts, Poisson arrivals (or gamma, in bursts), deadlines of 5 times
what the picture takes alone with all of its steps and patches, at most 16 requests in a batch; each
side serves the same arrivals. Load 1 is what a worker can do whose 16 slots are always taken by
requests of all sizes that compute everything.

fixed batches      of one size, first come, first served; no request joins under way
one by one         in the order of arrival, as the paper runs DistriFusion, on a device of its own
fewer steps        NIRVANA as the paper runs it: a fifth of the steps left out, requests join at
                   every step, and the sizes of a batch are computed one after another
mixed sizes        a batch of all sizes that computes everything; `slack`: by the server's scheduler
patches kept       the same with patches kept across steps: the paper's system without its
                   scheduler, in the order of arrival, and so that late requests are dropped; with
                   `slack` the whole of it
half of the steps  what this project serves instead: whole steps extrapolated

`bound` is at least what any scheduler that knows all arrivals could have in time with the patches
kept: a linear program in which a request takes no more than its share of a full batch's step, and
no step of it is faster than alone. What isn't measured is listed in `sources`.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from bench.simulate.baselines import FixedBatchScheduler
from bench.simulate.bound import most_in_time
from bench.simulate.run import RESULTS, SEEDS, tell
from bench.simulate.serving_costs import load as load_costs
from bench.simulate.simulation import Simulation
from bench.simulate.traffic import gaps
from maskfx.runtime.reuse.step_selection import WHOLE
from maskfx.runtime.step_kinds import StepKind
from maskfx.scheduling.cost_model import FittedCosts
from maskfx.scheduling.load import Demand, Scheduler, Work
from maskfx.scheduling.router import make_router
from maskfx.scheduling.scheduler import FcfsScheduler, SlackScheduler

LOADS = (0.5, 0.7, 0.8, 0.9, 1.0, 1.2, 1.5)
SLOTS, QUEUE = 16, 4096
DEADLINE = 5.0
FEWER = 0.79  # share of the steps: NIRVANA reports 21 % less compute
SHARES = (0.99, 0.95, 0.9)

Row = dict[str, Any]


@dataclass(frozen=True)
class Setting:
    """A model on a device.

    Args:
        costs: Seconds of its steps.
        sides: Of the latents of its three sizes.
        steps: Of a run.
        branches: Of guidance.
        patches: Times that a run is faster with patches kept, as measured.
        source: Where the figures are from.
    """

    costs: FittedCosts
    sides: tuple[int, int, int]
    steps: int
    branches: int
    patches: float
    source: str


def shipped(name: str, patches: float, file: str) -> Setting:
    return Setting(
        load_costs(f"{name}-cpu"),
        (24, 32, 40),
        20,
        2,
        patches,
        f"steps: {name}-cpu.json; {patches} times faster with patches kept: {file}",
    )


def reported(largest: float, second: float, patches: float, file: str) -> Setting:
    """Return a model as the paper reports it, on a GPU.

    Args:
        largest: Times that 1024 pixels take longer than 512.
        second: Seconds of a step of 512 pixels.
        patches: As of `Setting`.
        file: Where that is measured.
    """
    small, large = 64**2, 128**2
    per_site = second * (largest - 1) / (large - small)
    fixed = second - per_site * small
    shared = shared_part(fixed, per_site)
    costs = FittedCosts(
        base=fixed * shared,
        per_request=fixed * (1 - shared),
        per_site=per_site,
        around_base=2 * second,
        decode_share=0.5,
    )
    source = (
        f"reported: 1024 pixels take {largest} times 512 on an H100; a batch of all sizes takes "
        f"13 % less than one size at a time ({saved(fixed, per_site, shared):.1%} here), so "
        f"{shared:.0%} of a step's fixed part is shared. "
        f"Assumed: linear in sites. {patches} times faster with patches kept: measured on the "
        f"shipped model on a CPU, {file}"
    )
    return Setting(costs, (64, 96, 128), 50, 1, patches, source)


def shared_part(fixed: float, per_site: float, gain: float = 0.13) -> float:
    """Return which part of a step's fixed seconds its batch shares.

    Such that batches of 1 to 4 requests of each size take `gain` less on average than one size at
    a time, as the paper measures; 1 if they can't.
    """
    low, high = 0.0, 1.0
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if saved(fixed, per_site, middle) < gain else (low, middle)
    return high


def saved(fixed: float, per_site: float, shared: float) -> float:
    """Return how much less batches of 1 to 4 requests of each size take, if that part is shared."""
    sites = sum(side**2 for side in (64, 96, 128))
    each = [
        2 * fixed * shared
        / (3 * fixed * shared + n * (3 * fixed * (1 - shared) + per_site * sites))
        for n in range(1, 5)
    ]  # fmt: skip
    return statistics.mean(each)


SETTINGS: dict[str, Callable[[], Setting]] = {
    "shipped UNet, a core": lambda: shipped(
        "unet", 1.33, "patches-kept-unet.json, threshold 0.1, age 2"
    ),
    "shipped transformer, a core": lambda: shipped("dit", 1.52, "patches-dit-12.json"),
    "SDXL, H100 as reported": lambda: reported(1.3, 0.05, 1.33, "patches-kept-unet.json"),
    "SD3, H100 as reported": lambda: reported(2.4, 0.02, 1.52, "patches-dit-12.json"),
}


@dataclass(frozen=True)
class Side:
    """What serves: how requests are computed, and in which order.

    Args:
        make: Returns the scheduler.
        work: Returns what it computes of a request.
        slots: Requests in a batch at most.
        one_size: Whether the sizes of a batch are computed one after another.
    """

    make: Callable[[FittedCosts], Scheduler]
    work: Callable[[Work, Setting], Work] = lambda work, setting: work
    slots: int = SLOTS
    one_size: bool = False

    def costs(self, costs: FittedCosts) -> FittedCosts:
        if not self.one_size:
            return costs
        return msgspec.structs.replace(costs, base=0.0, per_size=costs.base + costs.per_size)


def first_come(costs: FittedCosts) -> Scheduler:
    return FcfsScheduler(costs, make_router("tokens"), drop=False)


def dropping(costs: FittedCosts) -> Scheduler:
    return FcfsScheduler(costs, make_router("tokens"))


def slack(costs: FittedCosts) -> Scheduler:
    return SlackScheduler(costs, make_router("cost"))


def kept(work: Work, setting: Setting) -> Work:
    return replace(work, sites=round(work.sites / setting.patches))


def fewer(work: Work, setting: Setting) -> Work:
    return replace(work, steps=round(work.steps * FEWER))


def halved(work: Work, setting: Setting) -> Work:
    return replace(work, steps=WHOLE["half-steps"].left(0, work.steps))


SIDES = {
    "fixed batches": Side(lambda costs: FixedBatchScheduler(), one_size=True),
    "one by one": Side(first_come, slots=1),
    "fewer steps": Side(first_come, fewer, one_size=True),
    "mixed sizes": Side(first_come),
    "mixed sizes, slack": Side(slack),
    "patches kept": Side(first_come, kept),
    "patches kept, late dropped": Side(dropping, kept),
    "patches kept, slack": Side(slack, kept),
    "half of the steps": Side(first_come, halved),
    "half of the steps, slack": Side(slack, halved),
}
OWN = "patches kept, slack"


def full_share(costs: FittedCosts, work: Work) -> float:
    """Return a request's seconds of a worker whose slots are all taken."""
    return work.steps * (costs.part(work).compute + (costs.base + costs.per_size) / SLOTS)


@dataclass(frozen=True)
class Arrivals:
    """How requests come.

    Args:
        workers: That serve them.
        deadline: Times what a request takes alone.
        burst: Coefficient of variation between arrivals; 1: Poisson.
    """

    workers: int = 1
    deadline: float = DEADLINE
    burst: float = 1.0


def drawn(setting: Setting, count: int, load: float, by: Arrivals, seed: int) -> list[Demand]:
    """Return the requests, in the order of their arrival, with all steps and patches."""
    works = [
        Work(side**2, side**2, setting.steps, setting.branches, kind=StepKind.DENSE)
        for side in setting.sides
    ]
    each = statistics.mean(full_share(setting.costs, work) for work in works)
    draw = np.random.default_rng(seed)
    times = np.cumsum(gaps(count, load * by.workers / each, by.burst, draw)).tolist()
    which = draw.integers(0, len(works), count).tolist()
    alone = [setting.costs.solo(work) for work in works]
    return [
        Demand(str(number), works[size], at, at + by.deadline * alone[size])
        for number, (at, size) in enumerate(zip(times, which, strict=True))
    ]


def served(side: Side, setting: Setting, demands: Sequence[Demand], workers: int) -> float:
    """Return the share of requests in time."""
    costs = side.costs(setting.costs)
    simulation = Simulation(side.make(costs), costs, workers, side.slots, queue=QUEUE)
    found = simulation.run(replace(d, work=side.work(d.work, setting)) for d in demands)
    return found.met / found.came


def bound(setting: Setting, demands: Sequence[Demand], workers: int) -> float:
    """Return the share of requests that no scheduler exceeds with the patches kept."""
    costs = setting.costs
    works = [kept(d.work, setting) for d in demands]
    before = [(1 - costs.decode_share) * costs.around(w) for w in works]
    after = [costs.decode_share * costs.around(w) for w in works]
    return most_in_time(
        [d.arrived + seconds for d, seconds in zip(demands, before, strict=True)],
        [d.due - seconds for d, seconds in zip(demands, after, strict=True)],
        [full_share(costs, w) for w in works],
        [w.steps * costs.step([w]) for w in works],
        workers,
    ) / len(demands)


def curve(name: str, by: Arrivals, loads: Sequence[float], count: int) -> list[Row]:
    setting, rows = SETTINGS[name](), []
    for load in loads:
        traces = [drawn(setting, count * by.workers, load, by, seed) for seed in SEEDS]
        row: Row = {"setting": name, **asdict(by), "load": load}
        for title, side in SIDES.items():
            row[title] = statistics.median(served(side, setting, t, by.workers) for t in traces)
        row["bound"] = statistics.median(bound(setting, t, by.workers) for t in traces)
        rows.append(tell(row))
    return rows


def highest(rows: Sequence[Row], side: str, share: float) -> float | None:
    """Return the load up to which a side has this share in time, interpolated; None if at none."""
    found = None
    for row, after in zip(rows, [*rows[1:], None], strict=True):
        if row[side] < share:
            break
        found = row["load"]
        if after is not None and after[side] < share:
            part = (row[side] - share) / (row[side] - after[side])
            found += part * (after["load"] - row["load"])
    return found


def summary(rows: Sequence[Row]) -> Row:
    """Return the points of the paper's whole system above the others, and the loads it bears."""
    others = [side for side in (*SIDES, "bound") if side != OWN]
    enough = [row for row in rows if row[OWN] >= 0.9]
    found: Row = {
        "mean_points": {
            side: 100 * statistics.mean(row[OWN] - row[side] for row in rows) for side in others
        },
        "loads": {
            side: {f"{share:.0%}": highest(rows, side, share) for share in SHARES}
            for side in (*SIDES, "bound")
        },
    }
    if enough:
        found["knee"] = enough[-1]["load"]
        found["knee_points"] = {s: 100 * (enough[-1][OWN] - enough[-1][s]) for s in others}
    return found


def main(command: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="bench.simulate.whole_pictures", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--models", nargs="*", choices=list(SETTINGS), default=list(SETTINGS))
    parser.add_argument("--workers", type=int, nargs="*", default=[1])
    parser.add_argument("--deadlines", type=float, nargs="*", default=[DEADLINE])
    parser.add_argument("--bursts", type=float, nargs="*", default=[1.0])
    parser.add_argument("--loads", type=float, nargs="*", default=list(LOADS))
    parser.add_argument("--requests", type=int, default=600, help="per worker, seed and figure")
    parser.add_argument("--out", default=str(RESULTS / "simulate-whole-pictures.json"))
    told = list(sys.argv[1:] if command is None else command)
    given = parser.parse_args(told)
    from bench.harness import header, write_json  # brings torch, which nothing else here needs

    result = header("bench.simulate.whole_pictures", told) | {
        "kind": "simulated",
        "sources": {name: SETTINGS[name]().source for name in given.models},
        "summary": {},
        "curves": [],
    }
    for name, *how in product(given.models, given.workers, given.deadlines, given.bursts):
        by = Arrivals(*how)
        rows = curve(name, by, given.loads, given.requests)
        result["curves"] += rows
        result["summary"][f"{name}, {by.workers}, {by.deadline:g} times, burst {by.burst:g}"] = (
            summary(rows)
        )
        write_json(Path(given.out), result)


if __name__ == "__main__":
    main()
