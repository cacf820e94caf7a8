"""Whole pictures with deadlines on a real engine, beside the simulator's answer for each trace.

    OMP_NUM_THREADS=1 python -m bench.simulate.real_pictures [--model NAME] [--requests N]
        [--load X] [--out FILE]

The workload of `whole_pictures` with real steps: pictures of three sizes in equal parts on a
shipped model, Poisson and bursty arrivals, deadlines drawn evenly from 1 to 5 times what a picture
takes alone with all of its steps. Each side serves the same arrivals, in an engine of its own:

fixed batches       batches of one size that run to their end, all steps
first come          half of the steps, first come, first served
slack               half of the steps, an engine as it is by default

A request that isn't done at its deadline ends then, on each side. Load 1 is what the engine makes
of a crowd of all sizes that computes all steps, measured right before; so are the seconds alone.
The simulator gets costs that are fitted to the steps of that crowd, and the same arrivals and
deadlines. One worker, wall time: on a machine that does other work too, both differ from run to
run, and the simulator knows nothing of it.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from math import inf
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

import maskfx
from bench.agree.fit import least_squares
from bench.engine.bed import smooth_picture
from bench.harness import ROOT, header, write_json
from bench.simulate.baselines import FixedBatchScheduler
from bench.simulate.simulation import Simulation
from bench.simulate.traffic import gaps
from maskfx.engine.step_runner import Step
from maskfx.runtime.reuse.step_selection import WHOLE
from maskfx.runtime.step_kinds import StepKind
from maskfx.scheduling.admission_policy import AdmissionDecision, AdmissionPolicy
from maskfx.scheduling.composition import Composition
from maskfx.scheduling.cost_model import COEFFICIENTS, FittedCosts
from maskfx.scheduling.load import Demand, Scheduler, Work
from maskfx.scheduling.round_policy import RoundCall, StepLoad
from maskfx.scheduling.router import make_router
from maskfx.scheduling.scheduler import FcfsScheduler, SlackScheduler
from maskfx.serve.models.pipeline_model import members_of
from maskfx.shipped import reference

RESULTS = ROOT / "bench" / "results"
SITE = 8  # pixels
SIZES = (64, 96, 128)
SLOTS, TIGHTEST, LOOSEST = 8, 1.0, 5.0
ARRIVALS = {"Poisson": 1.0, "bursty": 2.0}
DENSE = maskfx.Quality(reuse="steps", refresh=1, every=1)
HALF = replace(DENSE, every=WHOLE["half-steps"].every)

Row = dict[str, Any]


class FixedBatches:
    """Starts the oldest request, and those of its size, when no other steps any more."""

    def acts(self, dues: Sequence[float]) -> bool:
        return True

    def decide(
        self, now: float, waiting: Sequence[RoundCall], active: Sequence[RoundCall], slots: int
    ) -> AdmissionDecision:
        if active:
            return AdmissionDecision()
        queue = sorted(waiting, key=lambda call: (call.arrived, call.id))
        alike = [call.id for call in queue if call.load.whole == queue[0].load.whole]
        return AdmissionDecision(tuple(alike[:slots]))

    def learn(self, batch: Sequence[StepLoad], seconds: float) -> None:
        return


def fixed() -> maskfx.Engine:
    policy: AdmissionPolicy = FixedBatches()
    return maskfx.Engine(maskfx.BatchPolicy(batch=SLOTS), running=4 * SLOTS, admission=policy)


def first_come() -> maskfx.Engine:
    return maskfx.Engine(maskfx.BatchPolicy(batch=SLOTS), running=SLOTS, admission=None)


def by_default() -> maskfx.Engine:
    return maskfx.Engine(maskfx.BatchPolicy(batch=SLOTS), running=4 * SLOTS)


SIDES: dict[str, tuple[Callable[[], maskfx.Engine], maskfx.Quality]] = {
    "fixed batches": (fixed, DENSE),
    "first come": (first_come, HALF),
    "slack": (by_default, HALF),
}
SIMULATED: dict[str, Callable[[FittedCosts], Scheduler]] = {
    "fixed batches": lambda costs: FixedBatchScheduler(),
    "first come": lambda costs: FcfsScheduler(costs, make_router("tokens")),
    "slack": lambda costs: SlackScheduler(costs, make_router("cost")),
}


class Bed:
    """A shipped pipeline, whole pictures of which an engine makes."""

    def __init__(self, model: str, steps: int) -> None:
        self.steps, self.pipe = steps, reference(model)
        self.pipe.set_progress_bar_config(disable=True)
        maskfx.compile(self.pipe, quality=DENSE)

    def call(self, pixels: int, seed: int, quality: maskfx.Quality) -> dict[str, Any]:
        return {
            "prompt": "a red circle",
            "image": smooth_picture(pixels, pixels),
            "mask_image": Image.new("L", (pixels, pixels), 255),
            "height": pixels,
            "width": pixels,
            "num_inference_steps": self.steps,
            "strength": 1.0,
            "generator": torch.Generator().manual_seed(seed),
            "quality": quality,
        }

    def calibrate(self) -> tuple[dict[int, float], float, FittedCosts]:
        """Return seconds alone by size, requests per second of a crowd, and costs of its steps."""
        seen: list[Step] = []
        alone: dict[int, float] = {}
        around = []
        with maskfx.Engine(
            maskfx.BatchPolicy(batch=SLOTS), running=SLOTS, admission=None, told=seen.append
        ) as engine:
            for pixels in SIZES:
                took = []
                for _ in range(3):  # the first one compiles
                    seen.clear()
                    began = time.perf_counter()
                    engine.submit(self.pipe, **self.call(pixels, 0, DENSE)).result()
                    took.append(time.perf_counter() - began)
                alone[pixels] = min(took)
                inside = seen[-1].ended - seen[0].began
                around.append(((1.0, float((pixels // SITE) ** 2)), max(0.0, took[-1] - inside)))
            for _ in range(2):  # sizes and kinds of steps compile in the first crowd
                seen.clear()
                mixed = self.seconds_of(engine, lambda n: (DENSE, HALF)[n // 3 % 2])
            steps = list(seen)
            rate = 2 * SLOTS / self.seconds_of(engine, lambda n: DENSE)
        print(f"alone {alone}, {rate:.2f} requests/s, a mixed crowd in {mixed:.1f} s", flush=True)
        rows = [
            (Composition.of(members_of(step)), step.ended - before.ended)
            for before, step in zip(steps, steps[1:], strict=False)
        ]
        found, r2 = least_squares(rows)
        base, per_site = least_squares(around)[0]
        named = dict(zip(COEFFICIENTS, found, strict=True)) | {"per_first": 0.0}
        costs = FittedCosts(
            **named, around_base=base, around_per_site=per_site, decode_share=0.5, r2=r2
        )
        return alone, rate, costs

    def seconds_of(self, engine: maskfx.Engine, quality: Callable[[int], maskfx.Quality]) -> float:
        """Return how long a crowd of all sizes takes that is there at once."""
        began = time.perf_counter()
        crowd = [
            engine.submit(self.pipe, **self.call(SIZES[n % 3], n, quality(n)))
            for n in range(2 * SLOTS)
        ]
        for ticket in crowd:
            ticket.result()
        return time.perf_counter() - began

    def serve(self, side: str, arrivals: Sequence[Demand]) -> Row:
        """Return the share in time of what an engine makes of these arrivals."""
        make, quality = SIDES[side]
        with make() as engine:
            for number in range(2):  # its threads, and costs of its steps
                warm = [engine.submit(self.pipe, **self.call(p, number, quality)) for p in SIZES]
                for ticket in warm:
                    ticket.result()
            start, tickets = time.perf_counter(), []
            for number, demand in enumerate(arrivals):
                time.sleep(max(0.0, start + demand.arrived - time.perf_counter()))
                call = self.call(round(demand.work.whole**0.5) * SITE, number, quality)
                left = start + demand.due - time.perf_counter()
                tickets.append(engine.submit(self.pipe, deadline=max(left, 0.0), **call))
            taken = []
            for ticket, demand in zip(tickets, arrivals, strict=True):
                try:
                    ticket.result()
                except maskfx.DeadlineMissed:
                    continue
                taken.append(ticket.finished - start - demand.arrived)
            steps = [step.requests for step in engine.steps]
        return {
            "in_time": len(taken) / len(tickets),
            "mean_latency": statistics.mean(taken) if taken else inf,
            "mean_batch": statistics.mean(steps),
        }


def drawn(
    alone: dict[int, float], rate: float, burst: float, count: int, steps: int, seed: int
) -> list[Demand]:
    draw = np.random.default_rng(seed)
    times = np.cumsum(gaps(count, rate, burst, draw)).tolist()
    found = []
    for number, at in enumerate(times):
        pixels = int(draw.choice(SIZES))
        sites = (pixels // SITE) ** 2
        work = Work(sites, sites, steps, 2, kind=StepKind.DENSE)
        due = at + alone[pixels] * draw.uniform(TIGHTEST, LOOSEST)
        found.append(Demand(str(number), work, at, due))
    return found


def simulated(side: str, costs: FittedCosts, arrivals: Sequence[Demand], steps: int) -> Row:
    left = steps if side == "fixed batches" else WHOLE["half-steps"].left(0, steps)
    simulation = Simulation(SIMULATED[side](costs), costs, 1, SLOTS, queue=4096)
    found = simulation.run(replace(d, work=replace(d.work, steps=left)) for d in arrivals)
    latency = statistics.mean(found.latency) if found.latency else inf
    return {"in_time": found.met / found.came, "mean_latency": latency}


def load_now() -> float:
    return float(Path("/proc/loadavg").read_text().split()[0])


def main(command: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="bench.simulate.real_pictures", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--model", default="unet")
    parser.add_argument("--requests", type=int, default=40, help="per trace")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--load", type=float, default=1.2)
    parser.add_argument("--seeds", type=int, nargs="*", default=[1])
    parser.add_argument("--out", default=str(RESULTS / "real-pictures.json"))
    told = list(sys.argv[1:] if command is None else command)
    given = parser.parse_args(told)
    torch.set_num_threads(1)
    bed = Bed(given.model, given.steps)
    result = header("bench.simulate.real_pictures", told) | {"traces": []}
    for seed in given.seeds:
        for arrivals, burst in ARRIVALS.items():
            alone, rate, costs = bed.calibrate()
            own = drawn(alone, given.load * rate, burst, given.requests, given.steps, seed)
            row: Row = {
                "arrivals": arrivals,
                "seed": seed,
                "requests_per_second": given.load * rate,
                "alone": {str(pixels): seconds for pixels, seconds in alone.items()},
                "r2": costs.r2,
                "real": {},
                "simulated": {},
                "load_average": [load_now()],
            }
            for side in SIDES:
                row["real"][side] = bed.serve(side, own)
                row["simulated"][side] = simulated(side, costs, own, given.steps)
                row["load_average"].append(load_now())
                print(arrivals, side, row["real"][side], row["simulated"][side], flush=True)
            result["traces"].append(row)
            write_json(Path(given.out), result)


if __name__ == "__main__":
    main()
