"""Admission by benefit beside first come, first served, and beside batches of a fixed size.

    python -m bench.simulate.admission [--costs NAME ...] [--requests 3000] [--out FILE]

Pictures of three sizes, equally likely; each deadline is drawn from 1 to 5 times what the request
takes alone, as PatchedServe quotes for deadlines. Poisson and bursty arrivals, over the load. A
request that is refused, dropped or late is not in time.

fixed batch  batches of one size, first come, first served, which no request joins under way
fcfs         first come, first served, sharing steps as soon as a slot is free, all from caches
slack        the server's: starts a request where it is in time, none becomes late by it and the
             batch gains; drops what can't be in time any more

The knee is the highest load at which `slack` has at least 90 % in time. `points` are those between
`slack` and the others there, and at load 1.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from bench.simulate.baselines import FixedBatchScheduler
from bench.simulate.run import CPU, GPU, RESULTS, WORKLOADS, over_seeds, simulate, tell
from bench.simulate.serving_costs import load as load_costs
from bench.simulate.simulation import Served
from bench.simulate.traffic import Workload
from maskfx.scheduling.cost_model import FittedCosts
from maskfx.scheduling.load import Scheduler
from maskfx.scheduling.router import make_router
from maskfx.scheduling.scheduler import FcfsScheduler, SlackScheduler

LOADS = (0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.1, 1.3)
ENOUGH = 0.9
TIGHTEST, LOOSEST = 1.0, 5.0
TRAFFIC = {CPU: WORKLOADS[CPU], GPU: WORKLOADS[GPU]}
PLANS: dict[str, Callable[[FittedCosts], Scheduler]] = {
    "fixed batch": lambda costs: FixedBatchScheduler(),
    "fcfs": lambda costs: FcfsScheduler(costs, make_router("cost"), drop=False),
    "slack": lambda costs: SlackScheduler(costs, make_router("cost")),
}

Row = dict[str, Any]


def curve(name: str, burst: float, loads: Sequence[float], count: int) -> list[Row]:
    costs = load_costs(name)
    traffic = replace(TRAFFIC[name], slo=TIGHTEST, slo_most=LOOSEST, burst=burst)
    arrivals = "Poisson" if burst == 1 else "bursty"
    rows = []
    for load in loads:
        for plan, make in PLANS.items():
            found = over_seeds(partial(one, make, costs, traffic, load, count))
            row = {"costs": name, "arrivals": arrivals, "load": load, "scheduler": plan} | found
            rows.append(tell(row))
    return rows


def one(
    make: Callable[[FittedCosts], Scheduler],
    costs: FittedCosts,
    traffic: Workload,
    load: float,
    count: int,
    seed: int,
) -> Served:
    return simulate(make(costs), costs, traffic, load, count, seed)


def points(rows: Sequence[Row]) -> Row:
    """Return how many points `slack` is above the others, at its knee and at load 1."""
    found: Row = {}
    for costs, arrivals in dict.fromkeys((row["costs"], row["arrivals"]) for row in rows):
        own = {
            (row["scheduler"], row["load"]): row["in_time"]
            for row in rows
            if (row["costs"], row["arrivals"]) == (costs, arrivals)
        }
        loads = sorted({load for _, load in own})
        enough = [load for load in loads if own["slack", load] >= ENOUGH]
        marks = {"load 1": 1.0} | ({"knee": enough[-1]} if enough else {})
        for mark, load in marks.items():
            if load in loads:
                found[f"{costs}, {arrivals}, {mark}"] = {"load": load} | {
                    plan: 100 * (own["slack", load] - own[plan, load])
                    for plan in PLANS
                    if plan != "slack"
                }
    return found


def main(command: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="bench.simulate.admission", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--costs", nargs="*", choices=list(TRAFFIC), default=[CPU, GPU])
    parser.add_argument("--loads", type=float, nargs="*", default=list(LOADS))
    parser.add_argument("--requests", type=int, default=3000, help="per seed and figure")
    parser.add_argument("--out", default=str(RESULTS / "simulate-admission.json"))
    told = list(sys.argv[1:] if command is None else command)
    given = parser.parse_args(told)
    from bench.harness import header, write_json  # brings torch, which nothing else here needs

    rows = [
        row
        for name in given.costs
        for burst in (1.0, 2.0)
        for row in curve(name, burst, given.loads, given.requests)
    ]
    result = header("bench.simulate.admission", told) | {
        "kind": "simulated; only decision times are measured",
        "costs": {name: load_costs(name).origin for name in given.costs},
        "deadlines": [TIGHTEST, LOOSEST],
        "points": points(rows),
        "curves": rows,
    }
    write_json(Path(given.out), result)


if __name__ == "__main__":
    main()
