"""Edits of the shipped pipelines with packed weights (`prepack=True`), beside the same without.

    OMP_NUM_THREADS=1 python -m bench.prepacked --model unet --rounds 7

Both sides are compiled for themselves and keep their programs on disk, as `maskfx serve` does.
`first` is the first edit of a process that finds its programs there: it records a template, and
packs the weights. `step` is one step of the denoiser on all masked shares, `edit` a whole edit of
a picture whose template is there. Seconds are of the processor; sides take turns, and their order
changes from round to round. `bytes` are those of the packed weights. Writes
results/prepacked-<model>.json.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Sequence
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch

import maskfx
from bench import harness
from bench.quality.edits import draw_edit
from bench.whole_calls import run
from maskfx.pipelines.call_defaults import call_of
from maskfx.pipelines.compile import pipeline_state_of
from maskfx.runtime.steps import EditStep

PLAIN, PACKED = "plain", "packed"
SHARES = (0.05, 0.11, 0.2, 0.35)  # masked, of a square
STEPS = 4  # of a denoiser, in each sample


def compiled(model: str, prepack: bool, programs: Path) -> Any:
    pipe = maskfx.reference(model)
    pipe.set_progress_bar_config(disable=True)
    tiers = maskfx.Tiers(host_bytes=1 << 30)
    return maskfx.compile(pipe, prepack=prepack, tiers=tiers, programs=programs)


def square(shape: Sequence[int], share: float) -> torch.Tensor:
    """A mask of a square of sites, also of packed tokens of a square picture."""
    side = round(prod(shape) ** 0.5)
    mask = torch.zeros(side, side, dtype=torch.bool)
    own = max(1, round(side * share**0.5))
    mask[:own, :own] = True
    return mask.reshape(*shape)


def steps_of(pipe: Any, told: dict[str, object]) -> dict[float, EditStep]:
    """One step of an edit of each masked share, with what a call of the pipeline gives."""
    (denoiser,) = pipeline_state_of(pipe).denoisers.values()
    seen: list[dict[str, Any]] = []
    step = type(denoiser).step

    def noting(own: Any, steps: Any, *more: Any, **named: Any) -> Any:
        if own is denoiser:
            seen.extend(dict(one.inputs) for one in steps)
        return step(own, steps, *more, **named)

    type(denoiser).step = noting  # type: ignore[method-assign]
    try:
        run(pipe, draw_edit(1_500), 1, told)
    finally:
        type(denoiser).step = step  # type: ignore[method-assign]
    given = seen[-1]
    _, cache = denoiser.record(**given)
    shape = denoiser.mask_shape(given)
    return {share: EditStep(given, square(shape, share), cache) for share in SHARES}


def packed_bytes(pipe: Any) -> int:
    (denoiser,) = pipeline_state_of(pipe).denoisers.values()
    return sum(p.value.nbytes for p in denoiser._executor.graphs.packed.values())


@torch.no_grad()
def measure(model: str, rounds: int) -> dict[str, Any]:
    told = call_of(Path(maskfx.__file__).parent / "shipped" / model)
    sides, first = {PLAIN: False, PACKED: True}, {PLAIN: list[float](), PACKED: list[float]()}
    with tempfile.TemporaryDirectory() as folder:
        pipes: dict[str, Any] = {}
        for turn in range(4):  # the first one compiles
            for name, prepack in list(sides.items())[:: 1 if turn % 2 else -1]:
                pipes[name] = compiled(model, prepack, Path(folder) / name)
                began = time.process_time()
                run(pipes[name], draw_edit(1_000), 1, told)
                if turn:
                    first[name].append(time.process_time() - began)
    found: dict[str, Any] = {
        "model": model,
        "first": {name: harness.figure(each) for name, each in first.items()},
        "first_times_faster": harness.ratio(first[PLAIN], first[PACKED]),
        "bytes": packed_bytes(pipes[PACKED]),
        "weights": sum(
            p.nbytes
            for d in pipeline_state_of(pipes[PACKED]).denoisers.values()
            for p in d.module.parameters()
        ),
        "steps": {},
    }
    assert not packed_bytes(pipes[PLAIN])
    steps = {name: steps_of(pipe, told) for name, pipe in pipes.items()}
    for share in SHARES:
        runs = {}
        for name, pipe in pipes.items():
            (denoiser,) = pipeline_state_of(pipe).denoisers.values()
            one = steps[name][share]
            runs[name] = lambda _, d=denoiser, s=one: [d.step([s]) for _ in range(STEPS)]
        for each in runs.values():
            each(0)
        spent = harness.alternate(runs, rounds, time.process_time)
        found["steps"][str(share)] = {
            "seconds": {k: harness.figure([s / STEPS for s in v]) for k, v in spent.items()},
            "times_faster": harness.ratio(spent[PLAIN], spent[PACKED]),
        }
    edits = [draw_edit(1_000 + number) for number in range(rounds)]
    pictures: dict[str, dict[int, Any]] = {PLAIN: {}, PACKED: {}}

    def edit(name: str, number: int) -> None:
        made = np.asarray(run(pipes[name], edits[number], number + 1, told))
        pictures[name][number] = made.astype(float)

    for name in pipes:  # the templates are recorded
        for number in range(rounds):
            edit(name, number)
    whole = {name: lambda number, name=name: edit(name, number) for name in pipes}
    spent = harness.alternate(whole, rounds, time.process_time)
    found["edit"] = {
        "seconds": {name: harness.figure(each) for name, each in spent.items()},
        "times_faster": harness.ratio(spent[PLAIN], spent[PACKED]),
    }
    found["largest_difference"] = max(
        float(np.abs(pictures[PLAIN][n] - pictures[PACKED][n]).max()) for n in range(rounds)
    )
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    given = list(sys.argv[1:] if arguments is None else arguments)
    parser = argparse.ArgumentParser(prog="bench.prepacked", description=__doc__)
    parser.add_argument("--model", default="unet", choices=("unet", "dit"))
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--out", type=Path, default=harness.ROOT / "bench" / "results")
    options = parser.parse_args(given)
    result = harness.header("bench.prepacked", given) | {"threads": torch.get_num_threads()}
    result |= measure(options.model, options.rounds)
    harness.write_json(options.out / f"prepacked-{options.model}.json", result)
    for name in ("first_times_faster", "bytes", "weights", "edit", "largest_difference"):
        print(name, result[name])
    for share, one in result["steps"].items():
        print(share, one["times_faster"])


if __name__ == "__main__":
    main()
