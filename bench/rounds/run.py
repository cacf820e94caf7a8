"""Rounds on eight devices against groups of a fixed size, in the simulator.

    python -m bench.rounds

Writes bench/results/rounds.json. Parts: `scales` (both mixes of resolutions, Poisson and bursty, by
SLO scale), `rates`, `homogeneous` (one resolution), `granularity` (steps of a round), `edits`
(masked edits), `both` (whole pictures and edits by one denoiser), `efficiencies` (other assumed
step times), `fleets` (more devices), `optimum` (a few requests against an integer program) and
`decisions` (milliseconds of a decision; the only part that measures this machine). Of each
condition: the share of requests in time, in the mean over seeds,

- for rounds (`rounds`), and for rounds in which nothing starts before the border (`at_borders`);
- for the paper's Algorithm 1 as printed, with rounds of five steps (`paper`), and with late
  requests dropped, a margin, and the best of several lengths of a round (`paper_favoured`);
- for each fixed degree, first come, first served, as in the paper (`fcfs`), and with earliest
  deadline or shortest request first, with late requests dropped or not.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from bench.rounds.optimum import TRIED, Job, best_list, bound
from bench.rounds.paper import PaperScheduler
from bench.rounds.simulation import (
    ORDERS,
    Machine,
    Outcome,
    RoundSimulation,
    simulate_fixed,
    simulate_rounds,
)
from bench.rounds.workloads import (
    EDITED,
    LOWER,
    RATES,
    REQUESTS,
    SCALES,
    SIDES,
    TOKENS,
    Arrivals,
    both,
    both_costs,
    both_rate,
    dense,
    edit,
    edit_costs,
    edit_rate,
    edits,
    flux_costs,
    images,
)
from bench.simulate.traffic import mask_source
from maskfx.scheduling.degree_costs import DegreeCosts
from maskfx.scheduling.load import Demand, Work
from maskfx.scheduling.rounds.knapsack import Option, choose_options
from maskfx.scheduling.rounds.round_plan import Round, RoundRequest, RoundSettings
from maskfx.scheduling.rounds.rounds import RoundScheduler

RESULTS = Path(__file__).resolve().parents[1] / "results"
COMPARED = (
    "scales",
    "rates",
    "homogeneous",
    "granularity",
    "edits",
    "both",
)  # the margins are of these
PARTS = (*COMPARED, "efficiencies", "fleets", "optimum", "decisions")
SEEDS = (11, 12, 13)
DEVICES = 8
DEGREES = (1, 2, 4, 8)
GRANULARITIES = (1, 2, 5, 10)
DECISIONS = ((20, 8), (64, 8), (200, 8), (200, 64), (1000, 512))  # requests, devices
EDIT_LOADS = (0.5, 0.8, 1.0)
EDIT_SCALES = (1.0, 1.2, 1.5)
FLEETS = (8, 32, 64)
MARGINS = (
    "points_above_fcfs", "points_above_best", "points_above_paper", "points_above_paper_favoured",
    "points_by_late_comers",
)  # fmt: skip
MACHINE = Machine()

Row = dict[str, Any]
Draw = Callable[[int], list[Demand]]  # by seed


def fixed(costs: DegreeCosts, asked: Sequence[Sequence[Demand]]) -> Row:
    """The share in time of each degree, order and treatment of late requests."""
    found: Row = {}
    for order in ORDERS:
        for drop in (False, True):
            name = f"{order}, late dropped" if drop else order
            found[name] = {
                str(degree): statistics.mean(
                    simulate_fixed(
                        costs, DEVICES, degree, order, demands, MACHINE, drop=drop, seed=seed
                    ).in_time(demands)
                    for demands, seed in zip(asked, SEEDS, strict=True)
                )
                for degree in DEGREES
            }
    return found


def compared(
    costs: DegreeCosts, draw: Draw, what: Row, settings: RoundSettings, *, paper: bool = True
) -> Row:
    asked = [draw(seed) for seed in SEEDS]
    others = fixed(costs, asked)
    done = rounds(costs, asked, settings)
    by_seed = [o.in_time(d) for o, d in zip(done, asked, strict=True)]
    row = what | {
        "rounds": statistics.mean(by_seed),
        "rounds_least": min(by_seed),
        "rounds_most": max(by_seed),
        "by_sites": shares(done, asked, lambda work: str(work.whole)),
        "by_kind": shares(done, asked, lambda work: "edit" if work.bytes else "whole"),
        "at_borders": statistics.mean(
            o.in_time(d) for o, d in zip(rounds(costs, asked, settings, True), asked, strict=True)
        ),
        "fixed": others,
        "best_fcfs": max(others["fcfs"].values()),
        "best_fixed": max(max(shares.values()) for shares in others.values()),
        "moves": sum(o.moves for o in done),
        "rounds_made": sum(o.rounds for o in done),
        "decision_ms": 1e3 * statistics.mean(t.seconds for o in done for t in o.decisions),
    }
    if paper:
        row |= papers(costs, asked)
        for name in ("paper", "paper_favoured"):
            row[f"points_above_{name}"] = 100 * (row["rounds"] - row[name])
    row["points_above_fcfs"] = 100 * (row["rounds"] - row["best_fcfs"])
    row["points_above_best"] = 100 * (row["rounds"] - row["best_fixed"])
    print({k: round(v, 3) if isinstance(v, float) else v for k, v in row.items() if k != "fixed"},
          flush=True)  # fmt: skip
    return row


def rounds(
    costs: DegreeCosts,
    asked: Sequence[Sequence[Demand]],
    settings: RoundSettings,
    at_borders: bool = False,
) -> list[Outcome]:
    return [
        simulate_rounds(
            RoundScheduler(costs, DEVICES, settings), demands, MACHINE, seed, at_borders=at_borders
        )
        for demands, seed in zip(asked, SEEDS, strict=True)
    ]


def papers(costs: DegreeCosts, asked: Sequence[Sequence[Demand]]) -> Row:
    """The share in time of the paper's algorithm, as printed and favoured."""

    def share(**given: Any) -> float:
        return statistics.mean(
            RoundSimulation(PaperScheduler(costs, DEVICES, **given), demands, MACHINE, seed)
            .run()
            .in_time(demands)
            for demands, seed in zip(asked, SEEDS, strict=True)
        )

    margin = RoundSettings().margin
    favoured = {n: share(granularity=n, margin=margin, drop=True) for n in GRANULARITIES}
    return {
        "paper": share(),
        "paper_favoured": max(favoured.values()),
        "paper_favoured_by_granularity": {str(n): value for n, value in favoured.items()},
    }


def shares(
    done: Sequence[Outcome], asked: Sequence[Sequence[Demand]], name: Callable[[Work], str]
) -> Row:
    """The share in time of the requests whose work has a name, over all seeds, by name."""
    found: dict[str, list[float]] = {}
    for outcome, demands in zip(done, asked, strict=True):
        for demand in sorted(demands, key=lambda d: d.work.whole):
            found.setdefault(name(demand.work), []).append(outcome.in_time([demand]))
    return {key: statistics.mean(of) for key, of in found.items()}


# The parts.


def dense_row(
    arrivals: Arrivals,
    count: int,
    granularity: int | None = None,
    efficiency: str = next(iter(LOWER)),
) -> Row:
    settings = RoundSettings() if granularity is None else RoundSettings(granularity=granularity)
    what = arrivals.describe() | ({} if granularity is None else {"granularity": granularity})
    costs = flux_costs(LOWER[efficiency])
    what |= {"efficiency": efficiency}
    paper = granularity is None
    return compared(costs, lambda seed: images(arrivals, count, seed), what, settings, paper=paper)


def scales(count: int) -> list[Row]:
    return [
        dense_row(Arrivals(mix, scale=scale, burst=burst), count)
        for burst in (1.0, 2.0)
        for mix in ("uniform", "skewed")
        for scale in SCALES
    ]


def rates(count: int) -> list[Row]:
    return [dense_row(Arrivals(per_minute=rate), count) for rate in RATES]


def homogeneous(count: int) -> list[Row]:
    return [dense_row(Arrivals(str(side), scale=1.5), count) for side in TOKENS]


def granularity(count: int) -> list[Row]:
    return [
        dense_row(Arrivals(per_minute=rate), count, steps)
        for rate in (RATES[0], RATES[2], RATES[-1])
        for steps in GRANULARITIES
    ]


def edited(count: int) -> list[Row]:
    costs = edit_costs()
    found = []
    for load in EDIT_LOADS:
        for scale in EDIT_SCALES:
            arrivals = Arrivals("edits", edit_rate(costs, DEVICES, load), scale)

            def draw(seed: int, arrivals: Arrivals = arrivals) -> list[Demand]:
                return edits(arrivals, costs, count, seed)

            what = arrivals.describe() | {"load": load}
            found.append(compared(costs, draw, what, RoundSettings()))
    return found


def edits_among_pictures(count: int) -> list[Row]:
    costs, found = both_costs(), []
    for burst in (1.0, 2.0):
        for edited in EDITED:
            rate = both_rate(costs, edited)
            for scale in EDIT_SCALES:
                arrivals = Arrivals("uniform", rate, scale, burst, edited)
                draw = partial(both, arrivals, costs, count)
                found.append(compared(costs, draw, arrivals.describe(), RoundSettings()))
    return found


def efficiencies(count: int) -> list[Row]:
    return [
        dense_row(Arrivals(mix, scale=scale), count, efficiency=name)
        for name in LOWER
        for mix in ("uniform", "skewed")
        for scale in (SCALES[0], SCALES[-1])
    ]


def fleets(count: int) -> list[Row]:
    """Edits on more devices, at a load that grows with them; five minutes of requests each."""
    costs, found = edit_costs(), []
    for devices in FLEETS:
        for load in EDIT_LOADS:
            arrivals = Arrivals("edits", edit_rate(costs, devices, load), 1.2)
            number = max(8, count * devices // 16)
            demands = edits(arrivals, costs, number, SEEDS[0])
            scheduler = RoundScheduler(costs, devices)
            done = simulate_rounds(scheduler, demands, MACHINE, SEEDS[0])
            row = arrivals.describe() | {"devices": devices, "load": load, "requests": number}
            row["rounds"] = done.in_time(demands)
            for degree in (1, 2):
                row[f"fixed {degree}, edf, late dropped"] = simulate_fixed(
                    costs, devices, degree, "edf", demands, MACHINE, drop=True, seed=SEEDS[0]
                ).in_time(demands)
            row["decision_ms"] = 1e3 * statistics.mean(t.seconds for t in done.decisions)
            found.append(row)
            print(row, flush=True)
    return found


def optimum(count: int) -> list[Row]:
    """2 to 6 images that wait on four devices: how many are in time, and how many could be."""
    costs, draw = flux_costs(), np.random.default_rng(0)
    exact, alone = Machine(overhead=0.0, error=0.0), RoundSettings(margin=0.0, batch=1)
    found: list[Row] = []
    for _ in range(max(10, 2 * count)):
        asked = int(draw.integers(2, 7))
        demands, jobs = [], []
        for number, side in enumerate(draw.choice(list(TOKENS), asked).tolist()):
            work = dense(side)
            seconds = {k: costs.step(k, [work]) for k in (1, 2, 4)}
            due = work.steps * seconds[4] * float(draw.uniform(1, 1 + asked / 2))
            demands.append(Demand(str(number), work, 0.0, due))
            jobs.append(Job(work.steps, seconds, due))
        ours = simulate_rounds(RoundScheduler(costs, 4, alone), demands, exact)
        theirs = RoundSimulation(PaperScheduler(costs, 4, drop=True, batch=1), demands, exact)
        row = {
            "requests": asked,
            "rounds": round(asked * ours.in_time(demands)),
            "paper_favoured": round(asked * theirs.run().in_time(demands)),
            "bound": bound(jobs, 4),
        }
        if asked <= TRIED:
            row["best_list"] = best_list(jobs, 4)
        found.append(row)
    print(gaps(found), flush=True)
    return found


def gaps(rows: Sequence[Row]) -> Row:
    """Sums over the cases of `optimum`."""
    small = [row for row in rows if "best_list" in row]
    names = ("requests", "rounds", "paper_favoured", "bound")
    return {
        "cases": len(rows),
        "in_time": {name: sum(row[name] for row in rows) for name in names},
        "equal_to_bound": sum(row["rounds"] == row["bound"] for row in rows),
        "small_cases": len(small),
        "small_in_time": {n: sum(row[n] for row in small) for n in (*names, "best_list")},
        "small_below_best_list": sum(row["rounds"] < row["best_list"] for row in small),
    }


def decisions(count: int) -> list[Row]:
    """Milliseconds of a decision about many requests, of which the knapsack alone."""
    found = []
    draw = np.random.default_rng(0)
    kinds: dict[str, tuple[DegreeCosts, Callable[[], Work]]] = {
        "images": (flux_costs(), lambda: dense(int(draw.choice(list(TOKENS))))),
        "edits": (edit_costs(), lambda: edit(int(draw.choice(SIDES)), float(draw.beta(1, 4)))),
    }
    for requests, devices in DECISIONS:
        for name, (costs, work) in kinds.items():
            asked = [many(requests, devices, work, draw) for _ in range(max(3, count // 30))]
            row = {"devices": devices, "requests": requests, "kind": name}
            found.append(row | decision_times(RoundScheduler(costs, devices), asked, draw))
            print(found[-1], flush=True)
    return found


def decision_times(
    scheduler: RoundScheduler, asked: Sequence[list[RoundRequest]], draw: np.random.Generator
) -> Row:
    """Times of first decisions, of those a round later, where requests have devices, and alone."""
    first, later = [], []
    for requests in asked:
        scheduler.decide(0.0, requests)  # step times by kind are computed once
        first.append(seconds_of(partial(scheduler.decide, 0.0, requests)))
        after, now = a_round_later(scheduler.decide(0.0, requests), requests)
        later.append(seconds_of(partial(scheduler.decide, now, after)))
    weights = (0, 1, 2, 4, 8)
    groups = [
        [Option(w, float(v)) for w, v in zip(weights, draw.random(5), strict=True)]
        for _ in asked[0]
    ]
    alone = [seconds_of(partial(choose_options, groups, scheduler.devices)) for _ in asked]
    return {
        "decision_ms": 1e3 * statistics.median(first),
        "decision_ms_most": 1e3 * max(first),
        "later_decision_ms": 1e3 * statistics.median(later),
        "later_decision_ms_most": 1e3 * max(later),
        "knapsack_ms": 1e3 * statistics.median(alone),
    }


def a_round_later(
    decided: Round, requests: Sequence[RoundRequest]
) -> tuple[list[RoundRequest], float]:
    """The requests that are left after a round, with their devices, and its end."""
    made = {id: (steps, g.devices) for g in decided.groups for id, steps in g.steps.items()}
    found = []
    for request in requests:
        steps, home = made.get(request.id, (0, None))
        if request.id not in decided.drops and steps < request.left:
            found.append(replace(request, left=request.left - steps, home=home))
    return found, decided.start + decided.length


def many(
    count: int, devices: int, work: Callable[[], Work], draw: np.random.Generator
) -> list[RoundRequest]:
    """Requests of which about as many can be in time as can't."""
    found = []
    for number in range(count):
        asked = work()
        left = int(draw.integers(1, asked.steps + 1))
        due = float(draw.uniform(1, 20 * count / devices))
        found.append(RoundRequest(str(number), asked, left, 0.0, due))
    return found


def seconds_of(call: Callable[[], object]) -> float:
    began = time.process_time()  # of this process, whatever else the machine does
    call()
    return time.process_time() - began


MAKERS: dict[str, Callable[[int], list[Row]]] = {
    "scales": scales,
    "rates": rates,
    "homogeneous": homogeneous,
    "granularity": granularity,
    "edits": edited,
    "both": edits_among_pictures,
    "efficiencies": efficiencies,
    "fleets": fleets,
    "optimum": optimum,
    "decisions": decisions,
}


def summary(result: Row) -> Row:
    """The margins that are asked for: above the best fixed degree, least and most."""
    rows = [row for part in COMPARED for row in result.get(part, [])]
    found: Row = {}
    if "optimum" in result:
        found["optimum"] = gaps(result["optimum"])
    for row in rows:
        row["points_by_late_comers"] = 100 * (row["rounds"] - row["at_borders"])
    for key in MARGINS:
        margins = [row[key] for row in rows if key in row]
        if margins:
            found[key] = {
                "least": min(margins),
                "mean": statistics.mean(margins),
                "most": max(margins),
                "below": sum(margin < 0 for margin in margins),
                "of": len(margins),
            }
    return found


def main(command: Sequence[str]) -> None:
    given = parse(command)
    from bench.harness import header, write_json  # brings torch, which nothing else here needs

    result = header("bench.rounds", command)
    result |= {
        "kind": "simulated; only the milliseconds of decisions are measured",
        "costs": {
            "images": flux_costs().origin,
            "edits": edit_costs().origin,
            "both": both_costs().origin,
        },
        "devices": DEVICES,
        "seeds": SEEDS,
        "requests": given.requests,
        "mask_source": mask_source(),
        "overhead_of_a_round": MACHINE.overhead,
        "deviation_of_steps": MACHINE.error,
    }
    for part in given.parts:
        result[part] = MAKERS[part](given.requests)
        result["summary"] = summary(result)
        write_json(Path(given.out), result)
    print(result["summary"])


def parse(command: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="bench.rounds", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--parts", nargs="*", choices=PARTS, default=list(PARTS))
    parser.add_argument("--requests", type=int, default=REQUESTS, help="per seed and condition")
    parser.add_argument("--out", default=str(RESULTS / "rounds.json"))
    return parser.parse_args(command)
