"""Schedulers and routers of `maskfx serve` under a simulated clock.

    python -m bench.simulate [--parts routing slo errors scale] [--requests 15000] [--out FILE]
    python -m bench.simulate --trace trace.jsonl --workers 2 --slots 4 --costs costs.json

The workload is chosen from papers and real data, before anything was measured: mask ratios of
FlashPS' public trace (mean .19), three picture sizes equally likely, 50 steps and deadlines of 5
times what a request takes alone as in PatchedServe's evaluation, 970 templates (FlashPS' trace) by
Zipf's law, all recorded, of which a worker holds 100 in memory and reads the others from disk;
8 workers of 8 slots. Load 1 is what workers can do whose slots are all taken.

routing  latency by router, requests first come, first served, without deadlines, over the load; and
         at load 0.8 for other masks, one size, bursty arrivals and both files of costs
slo      the share of requests in time (refused, dropped and late ones are not) by scheduler, over
         the load, for both files of costs, Poisson and bursty arrivals
errors   the same figures where what requests really take differs from what is predicted
scale    seconds of a decision by the number of workers, and how quick the simulator is

"requests" and "tokens" route by what is under way now; "... assigned" by all that was ever
assigned, as the word in FlashPS' evaluation may be meant. Every figure is the median of some
seeds, with the extremes. A trace is replayed instead if one is given: JSON lines of arrival, sites,
whole, steps, branches, template, deadline, bytes, and latency where it was measured.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from bench.simulate.baselines import AssignedRouter
from bench.simulate.serving_costs import load as load_costs
from bench.simulate.simulation import Served, Simulation
from bench.simulate.traffic import Workload, capacity, demands, read_trace, single_size
from maskfx.scheduling.cost_model import FittedCosts
from maskfx.scheduling.load import Demand, Scheduler
from maskfx.scheduling.router import ROUTERS, Router, choose, make_router
from maskfx.scheduling.scheduler import (
    SCHEDULERS,
    FcfsScheduler,
    SlackScheduler,
    make_scheduler,
)

RESULTS = Path(__file__).resolve().parents[1] / "results"
PARTS = ("routing", "slo", "errors", "scale")
SEEDS = (11, 12, 13)
WORKERS, SLOTS, HOST = 8, 8, 100
ROUTING_LOAD, KNEE = 0.8, 1.0
LOADS = (0.5, 0.6, 0.7, 0.8, 0.9)
SLO_LOADS = (0.7, 0.8, 0.9, 1.0, 1.1, 1.3)
SIZES = (8, 64, 512, 1000)
CPU, GPU, UNET = "sd15-half-cpu", "sdxl-h800-assumed", "unet-cpu"
WORKLOADS = {  # bytes: of half-width SD1.5 as measured (148 MB at 20 %), of SDXL as FlashPS reports
    CPU: Workload(sides=(32, 48, 64), bytes_per_site=148.4e6 / 64**2),
    GPU: Workload(sides=(64, 96, 128), bytes_per_site=2.6 * 2**30 / 50 / 128**2),
    # 313 MiB of 25 steps and 32x32 sites; seconds of a step by its composition
    UNET: Workload(
        sides=(24, 32, 40), steps=(25,), branches=2, bytes_per_site=313 * 2**20 / 25 / 32**2
    ),
}

Row = dict[str, Any]


ROUTES: dict[str, Callable[[], Router]] = {
    "requests assigned": lambda: AssignedRouter(tokens=False),
    "tokens assigned": lambda: AssignedRouter(tokens=True),
    "requests": lambda: make_router("requests"),
    "tokens": lambda: make_router("tokens"),
    "cost": lambda: make_router("cost"),
}
PLANS: dict[str, Callable[[FittedCosts], Scheduler]] = {
    "fcfs": lambda costs: FcfsScheduler(costs, make_router("cost"), drop=False),
    "fcfs, late dropped": lambda costs: FcfsScheduler(costs, make_router("cost")),
    "slack": lambda costs: SlackScheduler(costs, make_router("cost")),
}


def recorded(workload: Workload) -> list[str]:
    each = max(1, workload.templates // len(workload.sides))
    return [f"{side}-{number}" for side in workload.sides for number in range(each)]


def simulate(
    scheduler: Scheduler,
    costs: FittedCosts,
    workload: Workload,
    load: float,
    count: int,
    seed: int,
    workers: int = WORKERS,
    error: float = 0.0,
) -> Served:
    rate = load * capacity(workload, costs, workers, SLOTS)
    simulation = Simulation(
        scheduler,
        costs,
        workers,
        SLOTS,
        queue=256 * workers // WORKERS,
        host=HOST,
        recorded=recorded(workload),
        error=error,
        seed=seed,
    )
    return simulation.run(demands(workload, costs, count, rate, seed))


def figures(served: Served) -> Row:
    """The first tenth, in which the workers fill, isn't counted in latencies."""
    latency = np.asarray(served.latency)[len(served.latency) // 10 :]
    return {
        "mean": float(latency.mean()),
        "p50": float(np.median(latency)),
        "p95": float(np.quantile(latency, 0.95)),
        "p99": float(np.quantile(latency, 0.99)),
        "queued": statistics.mean(served.queued),
        "in_time": served.met / served.came,
        "dropped": served.dropped / served.came,
        "refused": served.refused / served.came,
        "per_second": len(served.latency) / served.ended,
        "decision_ms": 1e3 * statistics.mean(served.decisions),
        "decision_p99_ms": 1e3 * float(np.quantile(served.decisions, 0.99)),
    }


def over_seeds(run: Callable[[int], Served]) -> Row:
    """Each figure's median over the seeds, with extremes where those are asked about."""
    rows = [figures(run(seed)) for seed in SEEDS]
    found = {key: statistics.median(row[key] for row in rows) for key in rows[0]}
    for key in ("p95", "in_time"):
        found[f"{key}_least"] = min(row[key] for row in rows)
        found[f"{key}_most"] = max(row[key] for row in rows)
    return found


def tell(row: Row) -> Row:
    print({k: round(v, 3) if isinstance(v, float) else v for k, v in row.items()}, flush=True)
    return row


# The parts.


def routing(count: int) -> Row:
    """By load for the chosen workload, and at one load for its variants."""
    curve = [
        tell({"load": load, "router": name, **routed(CPU, WORKLOADS[CPU], name, load, count)})
        for load in LOADS
        for name in ROUTES
    ]
    variants = [
        tell({"variant": title, "router": name, **routed(costs, work, name, ROUTING_LOAD, count)})
        for title, (costs, work) in variants_of().items()
        for name in ROUTES
    ]
    alone = load_costs(CPU)
    solo = [alone.solo(d.work) for d in demands(WORKLOADS[CPU], alone, 20_000, 1.0, SEEDS[0])]
    return {
        "curve": curve,
        "variants": variants,
        "alone_p95": float(np.quantile(solo, 0.95)),
        "gains": {f"p95 below {k}": v for k, v in below(curve).items()},
    }


def routed(costs: str, workload: Workload, router: str, load: float, count: int) -> Row:
    fitted = load_costs(costs)

    def run(seed: int) -> Served:
        scheduler = FcfsScheduler(fitted, ROUTES[router](), drop=False)
        return simulate(scheduler, fitted, workload, load, count, seed)

    return over_seeds(run)


def variants_of() -> dict[str, tuple[str, Workload]]:
    cpu, gpu = WORKLOADS[CPU], WORKLOADS[GPU]
    return {
        "SD1.5 on a CPU": (CPU, cpu),
        "one size": (CPU, single_size(cpu)),
        "production masks": (CPU, replace(cpu, masks="production")),
        "bursty": (CPU, replace(cpu, burst=2.0)),
        "20-50 steps": (CPU, replace(cpu, steps=(20, 30, 50))),
        "SDXL on a GPU": (GPU, gpu),
        "one size, GPU": (GPU, single_size(gpu)),
        "bursty, GPU": (GPU, replace(gpu, burst=2.0)),
        "shipped UNet on a CPU": (UNET, WORKLOADS[UNET]),
    }


def below(curve: Sequence[Row]) -> dict[str, float]:
    """By how much the cost router's P95 is below that of each other router, at the asked load."""
    at = {row["router"]: row["p95"] for row in curve if row["load"] == ROUTING_LOAD}
    return {name: 1 - at["cost"] / p95 for name, p95 in at.items() if name != "cost"}


def slo(count: int, loads: Sequence[float]) -> Row:
    curves = [
        tell({"costs": costs, "arrivals": arrivals, "load": load, "scheduler": name}
             | planned(costs, burst, name, load, count))
        for costs in (CPU, GPU)
        for arrivals, burst in (("Poisson", 1.0), ("bursty", 2.0))
        for load in loads
        for name in PLANS
    ]  # fmt: skip
    gains = {}
    for row in curves:
        if row["load"] == KNEE and row["scheduler"] != "slack":
            best = next(
                r for r in curves
                if r["scheduler"] == "slack"
                and all(r[k] == row[k] for k in ("costs", "arrivals", "load"))
            )  # fmt: skip
            key = f"{row['costs']}, {row['arrivals']}, against {row['scheduler']}"
            gains[key] = 100 * (best["in_time"] - row["in_time"])
    return {"curves": curves, "points_at_the_knee": gains}


def planned(
    costs: str, burst: float, name: str, load: float, count: int, error: float = 0.0
) -> Row:
    fitted = load_costs(costs)
    workload = replace(WORKLOADS[costs], slo=5.0, burst=burst)
    return over_seeds(
        lambda seed: simulate(PLANS[name](fitted), fitted, workload, load, count, seed, error=error)
    )


def errors(count: int) -> list[Row]:
    """Deviation of the logarithm of what a request really adds to a step."""
    return [
        tell({"error": error, "scheduler": name} | planned(CPU, 1.0, name, KNEE, count, error))
        for error in (0.0, 0.1, 0.3)
        for name in ("fcfs", "slack")
    ]


def scale(count: int, million: bool) -> Row:
    costs, workload = load_costs(GPU), WORKLOADS[GPU]
    rows = []
    for workers in SIZES:
        row: Row = {"workers": workers}
        for name in ROUTERS:
            row[f"{name}_ms"] = routing_ms(costs, workload, workers, name)
        began = time.process_time()  # of this process, whatever else the machine does
        scheduler = make_scheduler("slack", "cost", costs)
        work = replace(workload, slo=5.0)
        served = simulate(scheduler, costs, work, 0.9, count, SEEDS[0], workers)
        row |= {"simulated_per_cpu_second": count / (time.process_time() - began)}
        row |= {"decide_ms": 1e3 * statistics.mean(served.decisions)}
        rows.append(tell(row))
    found: Row = {"by_workers": rows}
    if million:
        began = time.process_time()
        scheduler = FcfsScheduler(costs, make_router("cost"), drop=False)
        served = simulate(scheduler, costs, workload, 0.8, 1_000_000, SEEDS[0], 1000)
        found["million"] = tell(
            {
                "workers": 1000,
                "scheduler": "fcfs",
                "router": "cost",
                "cpu_seconds": time.process_time() - began,
                "steps": served.steps,
            }
            | figures(served)
        )
    return found


def routing_ms(costs: FittedCosts, workload: Workload, workers: int, name: str) -> float:
    """One choice among workers of which half the slots are taken: the median, in milliseconds."""
    simulation = Simulation(FcfsScheduler(costs, make_router(name)), costs, workers, SLOTS)
    fleet, router = simulation.fleet, make_router(name)
    asked = list(demands(workload, costs, workers * SLOTS // 2 + 300, 1.0, SEEDS[0]))
    for number, demand in enumerate(asked[300:]):
        fleet.start(demand, number % workers)
        if demand.work.template is not None:
            simulation._warm(number % workers, demand.work.template)
    times = []
    for demand in asked[:300]:
        began = time.perf_counter()
        choose(router, demand.work, fleet)
        times.append(time.perf_counter() - began)
    return 1e3 * statistics.median(times)


# Traces.


def replay(
    trace: Sequence[tuple[Demand, float | None]], scheduler: Scheduler, costs: FittedCosts,
    workers: int, slots: int, queue: int, host: int, front: float = 0.0,
) -> Row:  # fmt: skip
    """What the simulator predicts of a recorded trace, beside what was measured.

    front: what HTTP and the codecs take of every request, beside queue and workers.
    """
    # a recording is paid for by the first request that needs it, as on a server that starts empty
    simulation = Simulation(scheduler, costs, workers, slots, queue=queue, host=host)
    served = simulation.run(demand for demand, _ in trace)
    found: Row = {
        "requests": served.came,
        "done": len(served.latency),
        "mean": float(np.mean(served.latency)) + front,
        "p95": float(np.quantile(served.latency, 0.95)) + front,
        "queued": statistics.mean(served.queued),
        "in_time": served.met / served.came,
    }
    seen = [latency for _, latency in trace if latency is not None]
    if seen:
        for name, value in (("mean", np.mean(seen)), ("p95", np.quantile(seen, 0.95))):
            found[f"measured_{name}"] = float(value)
            found[f"{name}_off"] = found[name] / float(value) - 1
    return found


def main(command: Sequence[str]) -> None:
    given = parse(command)
    if given.trace:
        costs = load_costs(given.costs)
        scheduler = make_scheduler(given.scheduler, given.router, costs)
        trace = read_trace(Path(given.trace))
        tell(replay(trace, scheduler, costs, given.workers, given.slots, given.queue, given.host))
        return
    from bench.harness import header, write_json  # brings torch, which nothing else here needs
    from bench.simulate.picture import picture

    path = Path(given.out)
    result = header("bench.simulate", command)
    result |= {
        "kind": "simulated; only decision times and the simulator's speed are measured",
        "costs": {name: load_costs(name).origin for name in (CPU, GPU)},
        "workloads": {name: WORKLOADS[name].describe() for name in (CPU, GPU)},
        "fleet": {"workers": WORKERS, "slots": SLOTS, "host_templates": HOST, "seeds": SEEDS},
        "requests": given.requests,
    }
    for part in given.parts:
        if part == "routing":
            result[part] = routing(given.requests)
        elif part == "slo":
            result[part] = slo(given.requests, given.loads)
        elif part == "errors":
            result[part] = errors(given.requests)
        else:
            result[part] = scale(given.requests, given.million)
        write_json(path, result)
    picture(result, path.with_suffix(".png"))


def parse(command: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="bench.simulate", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--parts", nargs="*", choices=PARTS, default=list(PARTS))
    parser.add_argument("--requests", type=int, default=15_000, help="per seed and figure")
    parser.add_argument("--loads", type=float, nargs="*", default=list(SLO_LOADS), help="of `slo`")
    parser.add_argument("--million", action="store_true", help="a million requests, in `scale`")
    parser.add_argument("--out", default=str(RESULTS / "simulate.json"))
    parser.add_argument("--trace", help="JSON lines; replayed instead of the parts")
    parser.add_argument("--costs", default=CPU, help="a file, or a name in bench/costs")
    parser.add_argument("--workers", type=int, default=WORKERS)
    parser.add_argument("--slots", type=int, default=SLOTS)
    parser.add_argument("--queue", type=int, default=256)
    parser.add_argument("--host", type=int, default=HOST, help="templates in a worker's memory")
    parser.add_argument("--scheduler", choices=SCHEDULERS, default="slack")
    parser.add_argument("--router", choices=list(ROUTERS), default="cost")
    return parser.parse_args(command)
