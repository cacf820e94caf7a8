"""Rounds on real ranks against groups of a fixed size, and against the simulator's forecast.

    python -m bench.rounds.real --loads 0.6 0.8 1.0 --seeds 0 1 2

The shipped transformer makes whole pictures of three sizes on ranks that are processes of one
thread. First, steps of all sizes at all degrees are measured, and a profile is fitted to them. Then
the same requests, which arrive at random with deadlines, run by rounds and on groups of each fixed
degree, first come, first served, at each load and for each seed; the simulator forecasts the share
in time of each with the fitted profile. A deadline is a multiple of the time alone at the fastest
degree. Pictures are made up to their latents, so that no decoding shares the cores. Writes
rounds-real.json to bench/results. With fewer idle cores than ranks, the shares mean nothing.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

import maskfx
from bench.harness import ROOT, header, write_json
from bench.report import columns
from bench.rounds.simulation import Machine, Outcome, simulate_fixed, simulate_rounds
from maskfx.engine.ticket import Ticket
from maskfx.errors import DeadlineMissed
from maskfx.scheduling.degree_costs import DEGREES, DegreeCosts
from maskfx.scheduling.load import Demand, Work
from maskfx.scheduling.rounds.elastic import SETTINGS, ElasticRounds
from maskfx.scheduling.rounds.round_policy import RankedGroup, RoundCall, RoundDecision, StepLoad
from maskfx.scheduling.rounds.rounds import RoundScheduler

SIDES = (128, 256, 384)  # pixels
PROMPT = "a red circle"
Row = dict[str, Any]


class FixedDegree:
    """Groups of one size; each runs one request after the other, first come, first served."""

    at_borders = False

    def __init__(self, degree: int) -> None:
        self.degree = degree

    def decide(
        self, now: float, calls: Sequence[RoundCall], ranks: Sequence[int], count: int
    ) -> RoundDecision:
        blocks = [range(n, n + self.degree) for n in range(0, count, self.degree)]
        free = [tuple(block) for block in blocks if set(block) <= set(ranks)]
        queue = sorted(calls, key=lambda call: call.arrived)
        pairs = zip(free, queue, strict=False)
        return RoundDecision(tuple(RankedGroup(own, {c.id: c.left}) for own, c in pairs))

    def learn(self, degree: int, batch: Sequence[StepLoad], seconds: float) -> None:
        return


class Measuring(FixedDegree):
    """Groups of one size, whose steps another policy learns from."""

    def __init__(self, degree: int, learner: ElasticRounds) -> None:
        super().__init__(degree)
        self.learner = learner

    def learn(self, degree: int, batch: Sequence[StepLoad], seconds: float) -> None:
        self.learner.learn(degree, batch, seconds)


class Bed:
    """The compiled pipeline, its ranks, and what a request of a size passes."""

    def __init__(self, steps: int, ranks: int) -> None:
        whole = maskfx.Quality(reuse="steps", refresh=1)  # every step is dense, without a template
        self.pipe: Any = maskfx.compile(maskfx.reference("dit"), quality=whole)
        self.pipe.set_progress_bar_config(disable=True)
        self.steps, self.ranks = steps, ranks
        self.engine = maskfx.Engine(ranks=ranks, rounds=FixedDegree(1), running=64)
        self.whole: dict[int, int] = {}  # sites by side

    def decide_by(self, policy: Any) -> None:
        assert self.engine.rounds is not None, "an engine with rounds"
        self.engine.rounds.policy = policy

    def submit(self, side: int, seed: int, deadline: float | None = None) -> Ticket:
        return self.engine.submit(
            self.pipe,
            prompt=PROMPT,
            image=Image.new("RGB", (side, side)),
            mask_image=Image.new("L", (side, side), 255),
            height=side,
            width=side,
            num_inference_steps=self.steps,
            generator=torch.Generator().manual_seed(seed),
            output_type="latent",
            deadline=deadline,
        )

    def measure(self, sides: Sequence[int], repeats: int) -> ElasticRounds:
        """Return a policy whose profile is fitted to steps of all sizes at all degrees."""
        learner = ElasticRounds()
        degrees = [k for k in DEGREES if k <= self.ranks and self.ranks % k == 0]
        for repeat in range(repeats + 1):  # the first one compiles
            for degree in degrees:
                self.decide_by(Measuring(degree, learner) if repeat else FixedDegree(degree))
                for side in sides:
                    # at degree 1 all ranks compute, as under load
                    tickets = [self.submit(side, n) for n in range(self.ranks // degree)]
                    for ticket in tickets:
                        ticket.result(600)
                    self.whole[side] = tickets[0].whole // tickets[0].steps
                print(f"measured degree {degree}, run {repeat}", flush=True)
        learner.refit()
        return learner

    def run(self, policy: Any, demands: Sequence[Demand], sides: Sequence[int]) -> Outcome:
        """Submit the requests at their times; return what became of them."""
        self.decide_by(policy)
        began = time.perf_counter()
        tickets = []
        for number, (demand, side) in enumerate(zip(demands, sides, strict=True)):
            time.sleep(max(0.0, began + demand.arrived - time.perf_counter()))
            deadline = demand.due - (time.perf_counter() - began)
            tickets.append(self.submit(side, number, deadline))
        outcome = Outcome()
        for demand, ticket in zip(demands, tickets, strict=True):
            try:
                ticket.result(600)
                outcome.ended[demand.id] = ticket.finished - began
            except DeadlineMissed:
                outcome.dropped.add(demand.id)
        return outcome


def requests(
    bed: Bed, profile: DegreeCosts, count: int, load: float, slack: float, seed: int
) -> tuple[list[Demand], list[int]]:
    """Return requests in the order of their arrival, and their sides.

    Args:
        load: Share of the ranks that they occupy at degree 1.
        slack: The deadline, in multiples of the time alone at the fastest degree.
    """
    draw = np.random.default_rng(seed)
    works = {s: Work(whole, whole, bed.steps) for s, whole in bed.whole.items()}
    sides = draw.choice(list(works), count).tolist()
    alone = {s: bed.steps * profile.step(1, [work]) for s, work in works.items()}
    fast = {
        s: bed.steps * min(profile.step(k, [w]) for k in profile.degrees if k <= bed.ranks)
        for s, w in works.items()
    }
    mean = statistics.mean(alone.values()) / (load * bed.ranks)
    times = np.cumsum(draw.exponential(mean, count)).tolist()
    demands = [
        Demand(str(n), works[side], at, at + slack * fast[side])
        for n, (side, at) in enumerate(zip(sides, times, strict=True))
    ]
    return demands, sides


def compared(bed: Bed, learner: ElasticRounds, load: float, given: argparse.Namespace) -> Row:
    """The share in time by rounds and by each fixed degree at a load, real and forecast."""
    profile, between = learner.profile, bed.engine.rounds.between  # type: ignore[union-attr]
    error = statistics.mean(e.median for e in learner.errors.values())
    machine = Machine(overhead=between, error=error, ends_late=True)
    degrees = sorted(learner.errors)
    real: dict[str, list[float]] = {}
    forecast: dict[str, list[float]] = {}
    runs = []
    for seed in given.seeds:
        demands, sides = requests(bed, profile, given.requests, load, given.slack, seed)
        settings = replace(SETTINGS, degrees=tuple(degrees))
        scheduler = RoundScheduler(profile, bed.ranks, settings)
        forecasts = {"rounds": simulate_rounds(scheduler, demands, machine, seed)}
        policies: dict[str, Any] = {"rounds": ElasticRounds(start=profile)}
        for k in degrees:
            name = f"degree {k}"
            policies[name] = FixedDegree(k)
            forecasts[name] = simulate_fixed(
                profile, bed.ranks, k, "fcfs", demands, machine, drop=False, seed=seed
            )
        for name, policy in policies.items():
            before = bed.engine.rounds.counts.steps.copy()  # type: ignore[union-attr]
            done = bed.run(policy, demands, sides)
            real.setdefault(name, []).append(done.in_time(demands))
            forecast.setdefault(name, []).append(forecasts[name].in_time(demands))
            made = bed.engine.rounds.counts.steps - before  # type: ignore[union-attr]
            shares = {"real": real[name][-1], "forecast": forecast[name][-1]}
            runs.append({"policy": name, "seed": seed, "steps_by_degree": dict(made)} | shares)
            print(load, name, seed, real[name][-1], forecast[name][-1], dict(made), flush=True)
    in_time = {
        name: {"real": statistics.mean(real[name]), "forecast": statistics.mean(forecast[name])}
        for name in real
    }
    rounds = in_time["rounds"]
    best = max(share["real"] for name, share in in_time.items() if name != "rounds")
    return {
        "load": load,
        "in_time": in_time,
        "points_above_best_fixed": 100 * (rounds["real"] - best),
        "points_from_forecast": 100 * (rounds["real"] - rounds["forecast"]),
        "runs": runs,
        "seconds_between_steps": between,
    }


def profile_row(bed: Bed, profile: DegreeCosts, degrees: Sequence[int]) -> Row:
    """Seconds of a step by side and degree."""
    return {
        str(side): {str(k): profile.step(k, [Work(whole, whole, 1)]) for k in degrees}
        for side, whole in bed.whole.items()
    }


def table(rows: Sequence[Row]) -> str:
    lines = [["load", "", "in time", "forecast"]]
    for row in rows:
        for name, share in row["in_time"].items():
            shares = [f"{share[key]:.3f}" for key in ("real", "forecast")]
            lines.append([str(row["load"]), name, *shares])
    return columns(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    given = sys.argv[1:] if arguments is None else list(arguments)
    parser = argparse.ArgumentParser(prog="python -m bench.rounds.real", description=__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--sides", type=int, nargs="*", default=list(SIDES))
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--requests", type=int, default=24)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0], help="of the arrivals")
    parser.add_argument("--repeats", type=int, default=2, help="runs that the profile is fitted to")
    parser.add_argument(
        "--loads", type=float, nargs="+", default=[0.6], help="shares of the ranks at degree 1"
    )
    parser.add_argument("--slack", type=float, default=1.8)
    parser.add_argument("--out", type=Path, default=ROOT / "bench" / "results" / "rounds-real.json")
    options = parser.parse_args(given)
    torch.set_num_threads(1)
    bed = Bed(options.steps, options.ranks)
    result = header("bench.rounds.real", given)
    try:
        learner = bed.measure(options.sides, options.repeats)
        profile = profile_row(bed, learner.profile, sorted(learner.errors))
        print(profile, flush=True)
        errors = {k: e.median for k, e in learner.errors.items()}
        result |= {"requests": options.requests, "slack": options.slack}
        result |= {"profile": profile, "fit_errors": errors, "by_load": []}
        for load in options.loads:
            result["by_load"].append(compared(bed, learner, load, options))
            write_json(options.out, result)
        groups = bed.engine.runner.rank_groups()
        result["computed_elsewhere"] = sum(g.failures + g.computed_here for g in groups)
    finally:
        bed.engine.close()
    write_json(options.out, result)
    print(table(result["by_load"]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
