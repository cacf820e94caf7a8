"""Whole pictures with deadlines on a real engine, beside the simulator's answer for each trace.

    OMP_NUM_THREADS=1 python -m bench.simulate.real_pictures [--model NAME] [--requests N]
        [--load X] [--sizes 64 96 128] [--sides SIDE ...] [--out FILE]

The workload of `whole_pictures` with real steps: pictures of three sizes in equal parts on a
shipped model, Poisson and bursty arrivals, deadlines drawn evenly from 1 to 5 times what a picture
takes alone with all of its steps. Each side serves the same arrivals, in an engine of its own:

fixed batches        batches of one size that run to their end, all steps
first come           the quality "half-steps", first come, first served
slack                the same quality, an engine as it is by default
patches, first come  patches kept across steps, first come, first served: PatchedServe's caches
patches, slack       the same, an engine as it is by default

A request that isn't done at its deadline ends then, on each side and in the simulation. Load 1 is
what the engine makes of a crowd of all sizes that computes all steps, measured right before; so are
the seconds alone. The simulation (`engine_simulation.py`, with the engine's own policies) gets the
same arrivals and deadlines, and costs that are fitted to the steps of crowds in which half of the
requests have that quality; what else the crowds took is divided among the steps' requests. Sides
that keep patches aren't simulated: how many a step computes depends on the pictures.

Seconds are those of the process's CPU time, so that other processes don't count; waits in which the
engine has nothing to do are skipped. It is the clock of a machine with one core: what requests
compute beside the steps takes time from them.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from math import inf
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from PIL import Image

import maskfx
from bench.agree.fit import least_squares
from bench.engine.bed import smooth_picture
from bench.harness import ROOT, header, write_json
from bench.simulate.engine_simulation import EngineSimulation
from bench.simulate.traffic import gaps
from maskfx.engine.admission.default_admission import DefaultAdmission
from maskfx.engine.step_runner import Step
from maskfx.engine.ticket import Ticket
from maskfx.runtime.reuse.step_selection import WHOLE
from maskfx.runtime.step_kinds import StepKind
from maskfx.scheduling.admission_policy import AdmissionDecision, AdmissionPolicy
from maskfx.scheduling.composition import Composition
from maskfx.scheduling.cost_model import COEFFICIENTS, FittedCosts
from maskfx.scheduling.load import Demand, Work
from maskfx.scheduling.rounds.round_policy import RoundCall, StepLoad
from maskfx.serve.models.pipeline_model import members_of
from maskfx.shipped import reference

RESULTS = ROOT / "bench" / "results"
SITE = 8  # pixels
SIZES = (64, 96, 128)
SLOTS, TIGHTEST, LOOSEST = 8, 1.0, 5.0
CROWD = 2 * SLOTS  # requests
ARRIVALS = {"Poisson": 1.0, "bursty": 2.0}
DENSE = maskfx.Quality(reuse="steps", refresh=1, every=1)
HALF = replace(DENSE, every=WHOLE["half-steps"].every)
KEPT = replace(DENSE, patches=maskfx.PatchReuse(threshold=0.1, age=2))

Row = dict[str, Any]


class CpuClock:
    """Seconds of this process's CPU time, and of waits that were skipped."""

    def __init__(self) -> None:
        self.skipped = 0.0

    def __call__(self) -> float:
        return time.process_time() + self.skipped

    def wait(self, until: float, tickets: Sequence[Ticket]) -> None:
        """Return at a time; if all requests are done before, skip what is left."""
        while (left := until - self()) > 0:
            if all(ticket.done() for ticket in tickets):
                self.skipped += left
            else:
                time.sleep(max(0.002, left / 2))  # each look takes CPU time

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Let the engine go by this clock within the context."""
        with mock.patch.object(time, "perf_counter", self):
            yield


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


@dataclass(frozen=True)
class Side:
    """How an engine serves: its requests' quality, how many are active, and what admits them."""

    quality: maskfx.Quality
    running: int
    admission: Callable[[], AdmissionPolicy | None]

    def engine(self) -> maskfx.Engine:
        policy = self.admission()
        own = "default" if isinstance(policy, DefaultAdmission) else policy
        return maskfx.Engine(BATCHES, running=self.running, admission=own)


BATCHES = maskfx.BatchPolicy(batch=SLOTS)
SIDES = {
    "fixed batches": Side(DENSE, 4 * SLOTS, FixedBatches),
    "first come": Side(HALF, SLOTS, lambda: None),
    "slack": Side(HALF, 4 * SLOTS, DefaultAdmission),
    "patches, first come": Side(KEPT, SLOTS, lambda: None),
    "patches, slack": Side(KEPT, 4 * SLOTS, DefaultAdmission),
}


class Bed:
    """A shipped pipeline, whole pictures of which an engine makes.

    Args:
        model: Its name.
        steps: Of a picture.
        sizes: Pixels along the sides of pictures.
        quality: What it is compiled for.
    """

    def __init__(
        self, model: str, steps: int, sizes: Sequence[int], quality: maskfx.Quality
    ) -> None:
        self.steps, self.sizes, self.clock = steps, tuple(sizes), CpuClock()
        self.pipe = reference(model)
        self.pipe.set_progress_bar_config(disable=True)
        maskfx.compile(self.pipe, quality=quality)

    def size(self, number: int) -> int:
        return self.sizes[number % len(self.sizes)]

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
            for pixels in self.sizes:
                took = []
                for _ in range(3):
                    seen.clear()
                    call = self.call(pixels, 0, DENSE)
                    began = time.perf_counter()
                    engine.submit(self.pipe, **call).result()
                    took.append(time.perf_counter() - began)
                alone[pixels] = min(took)
                inside = seen[-1].ended - seen[0].began
                around.append(((1.0, float((pixels // SITE) ** 2)), max(0.0, took[-1] - inside)))
            base, per_site = least_squares(around)[0]
            steps, between = list[Step](), list[float]()
            for _ in range(3):
                seen.clear()
                mixed = self.seconds_of(engine, lambda n: (DENSE, HALF)[n // len(self.sizes) % 2])
                outside = sum(base + per_site * (self.size(n) // SITE) ** 2 for n in range(CROWD))
                spent = mixed - outside - sum(step.cpu for step in seen)
                between.append(max(0.0, spent) / sum(step.requests for step in seen))
                steps += seen
            rate = CROWD / self.seconds_of(engine, lambda n: DENSE)
        print(f"alone {alone}, {rate:.2f} requests/s, a mixed crowd in {mixed:.1f} s", flush=True)
        each = statistics.median(between)
        rows = [
            (Composition.of(members_of(step)), step.cpu + each * step.requests) for step in steps
        ]
        found, r2 = least_squares(rows)
        named = dict(zip(COEFFICIENTS, found, strict=True)) | {"per_first": 0.0}
        costs = FittedCosts(
            **named, around_base=base, around_per_site=per_site, decode_share=0.5, r2=r2
        )
        return alone, rate, costs

    def seconds_of(self, engine: maskfx.Engine, quality: Callable[[int], maskfx.Quality]) -> float:
        """Return how long a crowd of all sizes takes that is there at once."""
        began = time.perf_counter()
        crowd = [
            engine.submit(self.pipe, **self.call(self.size(n), n, quality(n))) for n in range(CROWD)
        ]
        for ticket in crowd:
            ticket.result()
        return time.perf_counter() - began

    def serve(self, side: str, arrivals: Sequence[Demand]) -> Row:
        """Return the share in time of what an engine makes of these arrivals."""
        quality = SIDES[side].quality
        with SIDES[side].engine() as engine:
            for number in range(2):  # its threads, and costs of its steps
                warm = [
                    engine.submit(self.pipe, **self.call(pixels, number, quality))
                    for pixels in self.sizes
                ]
                for ticket in warm:
                    ticket.result()
            pixels = [round(demand.work.whole**0.5) * SITE for demand in arrivals]
            calls = [self.call(own, number, quality) for number, own in enumerate(pixels)]
            start, tickets = time.perf_counter(), list[Ticket]()
            for call, demand in zip(calls, arrivals, strict=True):
                self.clock.wait(start + demand.arrived, tickets)
                left = start + demand.due - time.perf_counter()
                tickets.append(engine.submit(self.pipe, deadline=max(left, 0.0), **call))
                tickets[-1].submitted = start + demand.arrived  # by this clock
            taken = []
            for ticket, demand in zip(tickets, arrivals, strict=True):
                try:
                    ticket.result()
                except maskfx.DeadlineMissed:
                    continue
                if ticket.finished <= start + demand.due:
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
        pixels = int(draw.choice(list(alone)))
        sites = (pixels // SITE) ** 2
        work = Work(sites, sites, steps, 2, kind=StepKind.DENSE)
        due = at + alone[pixels] * draw.uniform(TIGHTEST, LOOSEST)
        found.append(Demand(str(number), work, at, due))
    return found


def simulated(side: str, costs: FittedCosts, arrivals: Sequence[Demand], steps: int) -> Row:
    own = SIDES[side]
    left = steps if own.quality is DENSE else WHOLE["half-steps"].left(0, steps)
    found = EngineSimulation(costs, BATCHES, own.running, own.admission())
    found.run([replace(d, work=replace(d.work, steps=left)) for d in arrivals])
    return {
        "in_time": len(found.latency) / len(arrivals),
        "mean_latency": statistics.mean(found.latency) if found.latency else inf,
        "mean_batch": statistics.mean(found.batches),
    }


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
    parser.add_argument("--sizes", type=int, nargs="*", default=SIZES, help="pixels")
    parser.add_argument("--sides", nargs="*", choices=SIDES, default=list(SIDES))
    parser.add_argument("--out", default=str(RESULTS / "real-pictures.json"))
    told = list(sys.argv[1:] if command is None else command)
    given = parser.parse_args(told)
    torch.set_num_threads(1)
    keeps = any(SIDES[side].quality is KEPT for side in given.sides)
    bed = Bed(given.model, given.steps, given.sizes, KEPT if keeps else DENSE)
    result = header("bench.simulate.real_pictures", told) | {"traces": []}
    for seed, (arrivals, burst) in product(given.seeds, ARRIVALS.items()):
        with bed.clock.running():
            alone, rate, costs = bed.calibrate()
            own = drawn(alone, given.load * rate, burst, given.requests, given.steps, seed)
            row: Row = {
                "arrivals": arrivals,
                "seed": seed,
                "requests_per_second": given.load * rate,
                "alone": {str(pixels): seconds for pixels, seconds in alone.items()},
                "costs": json.loads(costs.to_json()),
                "real": {},
                "simulated": {},
                "load_average": [load_now()],
            }
            for side in given.sides:
                row["real"][side] = bed.serve(side, own)
                if SIDES[side].quality is not KEPT:
                    row["simulated"][side] = simulated(side, costs, own, given.steps)
                row["load_average"].append(load_now())
                told_of = row["real"][side], row["simulated"].get(side)
                print(arrivals, side, *told_of, flush=True)
            result["traces"].append(row)
            write_json(Path(given.out), result)


if __name__ == "__main__":
    main()
