"""LoRAs that all members of a step share, over ranks and in a process of its own.

    OMP_NUM_THREADS=1 python -m bench.adapters.in_processes

A step of the shipped UNet computes edits of a mask of 11 % for four requests with guidance that
have the same two LoRAs of random updates of all attention layers. Two ranks compute it, or one
process over the engine's weights in shared memory, as nets have (`own_process`). The sides:

- `without`: without LoRAs.
- `low-rank terms`: each layer adds the terms to its result.
- `in the weights`: each process has written the updates into a copy of the weights that change.

Times are processor seconds of all processes, which other work on the machine disturbs less; ratios
are of one round of `--steps` steps. Writing is timed apart: the wall time until all processes have
written. Each side is compared with the step in this process first. Writes
adapters-in-processes.json to bench/results.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import maskfx
from bench import harness, masks
from bench.adapters.dense_layers import LORAS, RANK, inputs_of, lora
from bench.report import columns
from maskfx.distributed.heartbeat import Waits
from maskfx.distributed.rank_group import RankGroup
from maskfx.engine.processes.served_denoiser import ServedDenoiser
from maskfx.engine.processes.step_process import StepProcess
from maskfx.runtime.lora.in_place_costs import InPlaceCosts, SharedStep
from maskfx.runtime.step_executor import SharedAdapters, StepExecutor
from maskfx.serve.models.model_source import load_pipeline

RATIO, REQUESTS = 0.11, 4
SIDES = ("without", "low-rank terms", "in the weights")


class Always(InPlaceCosts):
    """Writes the adapters that a step shares."""

    def wants(self, kind: SharedStep, work: int, sites: int, left: int, written: bool) -> bool:
        return True


class Writing(ServedDenoiser):
    """A denoiser in its process that writes the adapters that a step shares."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.denoiser.in_place.costs = Always()

    def __reduce__(self) -> tuple[type[ServedDenoiser], tuple[Any, ...]]:
        return Writing, super().__reduce__()[1]


class Alone(StepProcess):
    """One process, which always writes."""

    def _served(self) -> ServedDenoiser:
        # a class of __main__, as this script runs, can't be sent to the process
        from bench.adapters.in_processes import Writing

        served = super()._served()
        return Writing(served.denoiser.module, served.denoiser.settings, served.name)


def measure(asked: argparse.Namespace) -> dict[str, Any]:
    unet: Any = load_pipeline("unet", "float32", "cpu").unet
    denoiser = maskfx.compile(unet)
    own = tuple(lora(unet, one) for one in range(LORAS))
    mask = masks.make("square", asked.side, asked.side, RATIO)
    calls = [inputs_of(unet, number, asked.side) for number in range(REQUESTS)]

    def edits(updates: Any) -> list[Any]:
        caches = [denoiser.step([maskfx.RecordStep(call, updates)])[0][1] for call in calls]
        return [
            maskfx.EditStep(call, mask, cache, adapters=updates)
            for call, cache in zip(calls, caches, strict=True)
        ]

    steps = {"without": edits(()), "with": edits(own)}
    wanted = {name: denoiser.step(some) for name, some in steps.items()}
    shared = SharedAdapters(own, int(mask.sum()) * 2 * REQUESTS, 1000)
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        # other work may stop processes for long, and a rank that is replaced adds to all sides
        waits = Waits(step=1200.0, exchange=600.0, start=600.0, silence=600.0, stall=600.0)
        group, process = RankGroup(denoiser, 2, waits=waits), Alone(denoiser, Path(folder))
        group.in_place(None).seen.costs = Always()
        try:
            executors: dict[str, StepExecutor] = {"2 ranks": group, "own process": process}
            for name, executor in executors.items():
                found[name] = timed(asked, executor, denoiser, steps, wanted, shared)
            other = {
                "steps of ranks computed in the parent": group.computed_here,
                "steps of ranks that ran again": group.failures,
                "steps of the process computed in the parent": process.computed_here,
                "starts of the process after a failure": process.restarts,
            }
            assert not any(other.values()), f"not all steps ran where they should: {other}"
        finally:
            group.stop()
            process.stop()
    return found


def timed(
    asked: argparse.Namespace,
    executor: StepExecutor,
    denoiser: Any,
    steps: dict[str, list[Any]],
    wanted: dict[str, list[Any]],
    shared: SharedAdapters,
) -> dict[str, Any]:
    def run(side: str) -> list[Any]:
        some = steps["without" if side == "without" else "with"]
        return executor.run(denoiser, some, shared if side == "in the weights" else None)

    errors, writes = {}, []
    for side in SIDES:  # starts processes, and captures
        run(side)
        results = wanted["without" if side == "without" else "with"]
        pairs = zip(run(side), results, strict=True)
        errors[side] = max(float((a[0] - b[0]).norm() / b[0].norm()) for a, b in pairs)
    seconds: dict[str, list[float]] = {side: [] for side in SIDES}
    for number in range(asked.rounds):
        for side in SIDES if number % 2 == 0 else reversed(SIDES):
            first = wall(lambda side=side: run(side))  # writes, or takes out
            began = harness.busy_seconds()
            several = [wall(lambda side=side: run(side)) for _ in range(asked.steps)]
            seconds[side].append((harness.busy_seconds() - began) / asked.steps)
            if side == "in the weights":
                writes.append(max(0.0, first - sorted(several)[len(several) // 2]))
    return {
        "processor_seconds": {side: harness.figure(took) for side, took in seconds.items()},
        "times_without": {
            side: harness.ratio(took, seconds["without"]) for side, took in seconds.items()
        },
        "write_seconds": harness.figure(writes),
        "errors": errors,
    }


def wall(run: Callable[[], object]) -> float:
    began = time.perf_counter()
    run()
    return time.perf_counter() - began


def main(given: list[str]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--side", type=int, default=32, help="of the latents")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=4, help="of a round")
    parser.add_argument("--out", type=Path, default=harness.ROOT / "bench" / "results")
    asked = parser.parse_args(given)
    torch.set_num_threads(1)
    with torch.no_grad():
        found = measure(asked)
    rows = [["computed by", "side", "processor ms", "times without", "error"]]
    for name, own in found.items():
        for side, seconds in own["processor_seconds"].items():
            ratio = own["times_without"][side]["median"]
            figures = f"{1e3 * seconds['median']:.1f}", f"{ratio:.3f}", f"{own['errors'][side]:.1e}"
            rows.append([name, side, *figures])
    print(columns(rows))
    for name, own in found.items():
        print(f"{name}: writing takes {1e3 * own['write_seconds']['median']:.1f} ms")
    sizes = {"rank": RANK, "loras": LORAS, "side": asked.side, "requests": REQUESTS}
    header = harness.header("bench.adapters.in_processes", given)
    harness.write_json(asked.out / "adapters-in-processes.json", {**header, **sizes, **found})
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
