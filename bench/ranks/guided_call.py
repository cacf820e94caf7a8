"""A whole call with guidance: both branches in one process, or one on each of two.

    OMP_NUM_THREADS=1 python -m bench.ranks.guided_call

A call of the shipped UNet computes all sites of a picture, with classifier-free guidance, from the
prompt to the latents or, with `--pixels`, to the picture. The sides, with one thread per process:

- `diffusers`: its pipeline.
- `one`: maskfx's engine in one process.
- `two`: `Engine(ranks=2)`, each of whose ranks computes one branch of a step by the module.

Encoders, scheduler and decoder run in the main process on all sides, so the call gains less than
its steps. The bound is that of Amdahl: the call with its steps halved. Seconds need idle cores:
`load_at_start` in the header is the load of other work. Writes ranks-guided-call.json to
bench/results.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import torch

import maskfx
from bench import harness
from bench.adapters.workflow import SCALES, build_workflow, call_of
from bench.report import columns


def measure(asked: argparse.Namespace) -> dict[str, Any]:
    scale = replace(SCALES[asked.scale], side=asked.side)
    plain = build_workflow(0, scale)
    pipe = maskfx.compile(build_workflow(0, scale), quality="all-steps")
    quality = replace(maskfx.Quality.of("all-steps"), reuse="steps", refresh=1)
    more = {} if asked.pixels else {"output_type": "latent"}

    def call() -> dict[str, Any]:
        return {**call_of(plain, scale, 0, asked.steps, masked=False), **more}

    with maskfx.Engine() as one, maskfx.Engine(ranks=2) as two:

        def ours(engine: maskfx.Engine) -> Any:
            return engine.submit(pipe, **call(), quality=quality).result().images

        sides: dict[str, Callable[[int], Any]] = {
            "diffusers": lambda _: plain(**call()).images,
            "one": lambda _: ours(one),
            "two": lambda _: ours(two),
        }
        kept = {name: run(0) for name, run in sides.items()}
        for _ in range(2):  # how steps are best divided is measured
            sides["two"](0)
        seconds = harness.alternate(sides, asked.rounds)
        steps = {
            name: seconds_of_calls(engine, asked.steps)[-asked.rounds :]
            for name, engine in (("one", one), ("two", two))
        }
        [group] = two.runner.rank_groups()
        divided = [None if part is None else part.seconds for part in group.last]
        failed, here = group.failures, group.computed_here
    call_one, steps_one = (median(found) for found in (seconds["one"], steps["one"]))
    errors = {}
    if not asked.pixels:
        wanted = kept["diffusers"]
        errors = {n: float((kept[n] - wanted).norm() / wanted.norm()) for n in ("one", "two")}
    return {
        "seconds": {name: harness.figure(found) for name, found in seconds.items()},
        "two_over_one": harness.ratio(seconds["one"], seconds["two"]),
        "two_over_diffusers": harness.ratio(seconds["diffusers"], seconds["two"]),
        "steps_two_over_one": harness.ratio(steps["one"], steps["two"]),
        "share_of_steps": steps_one / call_one,
        "bound": call_one / (call_one - steps_one / 2),
        "seconds_of_ranks_in_the_last_step": divided,
        "failures": failed,
        "computed_here": here,
        "relative_errors": errors,
    }


def seconds_of_calls(engine: maskfx.Engine, count: int) -> list[float]:
    """Return the seconds of the steps of each call, the latest last, by their number in a call."""
    taken = [step.seconds for step in engine.steps]
    first = len(taken) % count
    return [sum(taken[at : at + count]) for at in range(first, len(taken), count)]


def main(given: list[str]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--scale", choices=SCALES, default="shipped")
    parser.add_argument("--side", type=int, default=512)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--pixels", action="store_true", help="to the picture, not to its latents")
    parser.add_argument("--out", type=Path, default=harness.ROOT / "bench" / "results")
    asked = parser.parse_args(given)
    torch.set_num_threads(1)
    with torch.no_grad():
        found = measure(asked)
    header = harness.header("bench.ranks.guided_call", given)
    sizes = {"scale": asked.scale, "side": asked.side, "steps": asked.steps}
    result = {**header, **sizes, "pixels": asked.pixels, **found}
    harness.write_json(asked.out / "ranks-guided-call.json", result)
    rows = [["side", "seconds"]]
    rows += [[name, f"{own['median']:.2f}"] for name, own in found["seconds"].items()]
    print(columns(rows))
    by_steps, share = found["steps_two_over_one"]["median"], found["share_of_steps"]
    print(
        f"two processes {found['two_over_one']['median']:.2f} times as fast as one, steps "
        f"{by_steps:.2f} times; steps are {share:.2f} of the "
        f"call, so {found['bound']:.2f} is the bound; errors {found['relative_errors']}"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
