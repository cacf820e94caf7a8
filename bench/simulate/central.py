"""Requests that wait centrally, beside routers that commit each request to a worker at once.

    python -m bench.simulate.central [--loads 0.8] [--requests 6000] [--out FILE]

The workload of `bench.simulate routing`, without deadlines. "requests", "tokens" and "cost" give
each request to a worker as soon as a slot is free, first come, first served. "central" is the
server's scheduler with routing by cost: a request waits until a worker's step gains from it, and
the shorter request goes first; "central, requests" and "central, tokens" are the same with those
routers. Load 0.8 is where P95 latency is asked to be 30 % below that of
routing by requests and by tokens.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from bench.simulate.run import (
    RESULTS,
    ROUTING_LOAD,
    over_seeds,
    simulate,
    tell,
    variants_of,
)
from bench.simulate.serving_costs import load as load_costs
from bench.simulate.simulation import Served
from bench.simulate.traffic import Workload
from maskfx.scheduling.cost_model import FittedCosts
from maskfx.scheduling.load import Scheduler
from maskfx.scheduling.router import make_router
from maskfx.scheduling.scheduler import FcfsScheduler, SlackScheduler

CENTRAL = "central"
ASKED = 0.3

Row = dict[str, Any]
Make = Callable[[FittedCosts], Scheduler]


def committed(router: str) -> Make:
    return lambda costs: FcfsScheduler(costs, make_router(router), drop=False)


def waiting(router: str) -> Make:
    return lambda costs: SlackScheduler(costs, make_router(router))


PLANS: Mapping[str, Make] = {
    **{name: committed(name) for name in ("requests", "tokens", "cost")},
    CENTRAL: waiting("cost"),
    **{f"{CENTRAL}, {name}": waiting(name) for name in ("requests", "tokens")},
}


def rows_at(title: str, costs: str, workload: Workload, load: float, count: int) -> list[Row]:
    fitted = load_costs(costs)

    def run(make: Make, seed: int) -> Served:
        return simulate(make(fitted), fitted, workload, load, count, seed)

    return [
        tell({"variant": title, "load": load, "plan": name} | over_seeds(partial(run, make)))
        for name, make in PLANS.items()
    ]


def below(rows: Sequence[Row]) -> Row:
    """By how much the P95 of central waiting is below that of each other plan."""
    found: Row = {}
    for title, load in dict.fromkeys((row["variant"], row["load"]) for row in rows):
        p95 = {r["plan"]: r["p95"] for r in rows if (r["variant"], r["load"]) == (title, load)}
        gains = {name: 1 - p95[CENTRAL] / value for name, value in p95.items() if name != CENTRAL}
        met = min(gains["requests"], gains["tokens"]) >= ASKED
        found[f"{title}, load {load:g}"] = gains | {"met": met}
    return found


def main(command: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="bench.simulate.central", description=(__doc__ or "").splitlines()[0]
    )
    variants = variants_of()
    first = next(iter(variants))
    parser.add_argument("--loads", type=float, nargs="*", default=[ROUTING_LOAD])
    parser.add_argument("--variants", nargs="*", choices=list(variants), default=[first])
    parser.add_argument("--requests", type=int, default=6000, help="per seed and figure")
    parser.add_argument("--out", default=str(RESULTS / "simulate-central.json"))
    told = list(sys.argv[1:] if command is None else command)
    given = parser.parse_args(told)
    from bench.harness import header, write_json  # brings torch, which nothing else here needs

    rows = [
        row
        for title in given.variants
        for load in given.loads
        for row in rows_at(title, *variants[title], load, given.requests)
    ]
    result = header("bench.simulate.central", told) | {
        "kind": "simulated; only decision times are measured",
        "asked": ASKED,
        "p95_below": below(rows),
        "rows": rows,
    }
    write_json(Path(given.out), result)


if __name__ == "__main__":
    main()
