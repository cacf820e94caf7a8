"""Many devices: what a decision of the round scheduler takes, and a million requests.

    python -m bench.rounds.scale

Writes bench/results/rounds-scale.json. `by_devices` has, for edits at one load on more and more
devices, the processor time of a decision at a border and of one within a round, per device and per
request. `many` has long simulations: FLUX.1-schnell, which is FLUX.1-dev distilled to four steps,
makes pictures of all resolutions, with deadlines in proportion to the steps. Beside rounds: groups
of each fixed size, as in `bench.rounds`. The simulator fails if a request runs in two groups at
once, ends twice or is lost, or if two groups have the same device.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bench.rounds.run import DEGREES, EDIT_SCALES, MACHINE, RESULTS, SEEDS, shares
from bench.rounds.simulation import DecisionTime, Outcome, simulate_fixed, simulate_rounds
from bench.rounds.workloads import (
    Arrivals,
    edit_costs,
    edit_rate,
    edits,
    few_steps,
    flux_costs,
    images,
)
from bench.simulate.traffic import mask_source
from maskfx.scheduling.degree_costs import DegreeCosts
from maskfx.scheduling.load import Demand
from maskfx.scheduling.rounds.rounds import RoundScheduler

SIZES = (8, 64, 256, 512, 1000)
LOAD = 0.8  # share of the devices that are busy at degree 1, without batching
PER_DEVICE = 12  # requests per device of `by_devices`, at least `LEAST`
LEAST = 1000
STEPS = 4  # of FLUX.1-schnell
DEVICES, MANY = 1000, 1_000_000
SCALES = (1.5,)
FIXED = (("fcfs", False), ("edf", True))  # order, and whether late requests are dropped
Row = dict[str, Any]


def by_devices(sizes: Sequence[int]) -> list[Row]:
    costs, found = edit_costs(), []
    for devices in sizes:
        arrivals = Arrivals("edits", edit_rate(costs, devices, LOAD), EDIT_SCALES[1])
        demands = edits(arrivals, costs, max(LEAST, PER_DEVICE * devices), SEEDS[0])
        found.append({"devices": devices, "requests": len(demands)})
        found[-1] |= measured(costs, devices, demands)
        print(found[-1], flush=True)
    return found


def many(devices: int, count: int, scale: float) -> Row:
    costs = flux_costs()
    asked = few_steps(images(Arrivals(), 5000, seed=0), STEPS)
    alone = statistics.mean(d.work.steps * costs.step(1, [d.work]) for d in asked)
    arrivals = Arrivals(per_minute=60 * LOAD * devices / alone, scale=scale)
    demands = few_steps(images(arrivals, count, SEEDS[0]), STEPS)
    row: Row = arrivals.describe() | {"devices": devices, "requests": count, "steps": STEPS}
    row["simulated_seconds"] = demands[-1].arrived
    row |= measured(costs, devices, demands)
    row["fixed"] = {
        f"{order}, late dropped" if drop else order: {
            str(degree): simulate_fixed(
                costs, devices, degree, order, demands, MACHINE, drop=drop, seed=SEEDS[0]
            ).in_time(demands)
            for degree in DEGREES
        }
        for order, drop in FIXED
    }
    best = max(max(by_degree.values()) for by_degree in row["fixed"].values())
    row["points_above_best"] = 100 * (row["in_time"] - best)
    print(row, flush=True)
    return row


def measured(costs: DegreeCosts, devices: int, demands: Sequence[Demand]) -> Row:
    """Simulate rounds; return the share in time, and the times of decisions."""
    began = time.process_time()
    done = simulate_rounds(RoundScheduler(costs, devices), demands, MACHINE, SEEDS[0])
    seconds = time.process_time() - began
    check(done, demands)
    spent = sum(d.seconds for d in done.decisions)
    border = [d for d in done.decisions if not d.within]
    median = statistics.median(d.seconds for d in border)
    return {
        "in_time": done.in_time(demands),
        "by_sites": shares([done], [demands], lambda work: str(work.whole)),
        "dropped": len(done.dropped),
        "rounds": done.rounds,
        "border": times(border),
        "within": times([d for d in done.decisions if d.within]),
        "border_us_per_device": 1e6 * median / devices,
        "decisions_ms_per_request": 1e3 * spent / len(demands),
        "decisions_share_of_a_core": spent / max(done.ended.values()),
        "simulation_seconds": seconds,
    }


def times(spent: Sequence[DecisionTime]) -> Row:
    seconds = [d.seconds for d in spent] or [0.0]
    return {
        "decisions": len(spent),
        "median_ms": 1e3 * statistics.median(seconds),
        "mean_ms": 1e3 * statistics.mean(seconds),
        "p99_ms": 1e3 * float(np.quantile(seconds, 0.99)),
        "requests": statistics.median([d.requests for d in spent] or [0]),
    }


def check(done: Outcome, demands: Sequence[Demand]) -> None:
    """Raise AssertionError unless each request has either ended or been dropped."""
    assert not done.dropped & set(done.ended), "requests that were dropped and ended"
    assert {*done.ended, *done.dropped} == {d.id for d in demands}, "requests without an end"


def main(command: Sequence[str]) -> None:
    given = parse(command)
    from bench.harness import header, write_json  # brings torch, which nothing else here needs

    result = header("bench.rounds.scale", command)
    result |= {
        "kind": "simulated; the times of decisions and of the simulation are measured",
        "costs": {"by_devices": edit_costs().origin, "many": flux_costs().origin},
        "load": LOAD,
        "mask_source": mask_source(),
    }
    result["by_devices"] = by_devices(given.sizes)
    write_json(Path(given.out), result)
    result["many"] = []
    for scale in given.scales if given.many else ():
        result["many"].append(many(given.devices, given.many, scale))
        write_json(Path(given.out), result)


def parse(command: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="bench.rounds.scale", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--sizes", type=int, nargs="*", default=list(SIZES), help="devices")
    parser.add_argument("--devices", type=int, default=DEVICES, help="of the long simulation")
    parser.add_argument("--many", type=int, default=MANY, help="its requests; 0: none")
    parser.add_argument(
        "--scales", type=float, nargs="*", default=list(SCALES), help="of deadlines"
    )
    parser.add_argument("--out", default=str(RESULTS / "rounds-scale.json"))
    return parser.parse_args(command)


if __name__ == "__main__":
    main(sys.argv[1:])
