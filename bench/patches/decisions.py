"""What the decisions of a step cost that reuses patches, without any model.

    OMP_NUM_THREADS=1 python -m bench.patches.decisions

Of 24 stretches, 16 requests and 64 patches: the judge alone (one gather of its table), all sets of
a step (request by request, and for all requests together, as pipelines decide), the same chosen
stretch by stretch (one call of the judge for each, for all requests), and summing the changes of
the rows between stretches while they are replaced, beside replacing them alone; both with the plain
operators, too, instead of C. CPU time, because machines are shared. Writes
bench/results/patches-decisions.json.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch

from bench import harness
from bench.report import columns, milliseconds
from bench.rolling import Side, program_of, sites_of, steps_of
from maskfx.ops.kernels.serves import SWITCH
from maskfx.runtime.batch.layout import Layout
from maskfx.runtime.cache.rolling.patch_changes import PatchChanges, boundary_taps
from maskfx.runtime.cache.rolling.rolling_cache import write_rows
from maskfx.runtime.reuse.judges import PatchFeatures, TableJudge, Threshold
from maskfx.runtime.reuse.patch_choice import PatchChoice, StretchState, choose_patches
from maskfx.runtime.reuse.patches import PatchDecision, PatchReuse, PatchState, decide_together
from maskfx.runtime.sites.mask import Mask
from maskfx.runtime.sites.patches import PatchGrid

STRETCHES, REQUESTS, PATCHES = 24, 16, 64
WIDTHS = (1, 64)


def timed(run: Callable[[], object], rounds: int) -> harness.Figure:
    """Seconds of CPU time of one call."""
    run()
    spent = []
    for _ in range(rounds):
        began = time.process_time()
        run()
        spent.append(time.process_time() - began)
    return harness.figure(spent)


def judging(rounds: int) -> dict[str, harness.Figure]:
    draw = np.random.default_rng(0)
    table = TableJudge(draw.random((STRETCHES, 6, 32, 256)) < 0.5, {})
    change = draw.random((STRETCHES, REQUESTS * PATCHES), dtype=np.float32)
    asked = PatchFeatures(change, np.full(change.shape, 2), 0.5)
    states = [PatchState(STRETCHES, PATCHES, range(2, STRETCHES + 1)) for _ in range(REQUESTS)]
    for state in states:
        changes = draw.random((STRETCHES, PATCHES), dtype=np.float32)
        state.advance(np.ones((STRETCHES, PATCHES), bool), changes)
    settings, inputs = PatchReuse(sets="each"), draw.random(PATCHES)

    def all_sets(judge: Any) -> Callable[[], object]:
        return lambda: [state.decide(settings, judge, inputs, 0.5, 1) for state in states]

    def together(judge: Any) -> Callable[[], object]:
        own = [PatchDecision(state, settings, judge, inputs, 0.5, 1) for state in states]
        return lambda: decide_together(own)

    def by_stretch(judge: Any) -> Callable[[], object]:
        own = PatchReuse(sets="each", order="stretch")
        inside, none = np.ones(PATCHES, bool), Mask(torch.zeros(1, dtype=torch.bool))

        def run() -> None:
            choices = [
                PatchChoice(own, judge, state, inputs, inside, 0.5, 1, lambda row: none)
                for state in compared
            ]
            for stretch in range(1, STRETCHES + 1):
                choose_patches(choices, stretch, [inputs] * REQUESTS)

        return run

    compared = [StretchState(STRETCHES, PATCHES, range(2, STRETCHES + 1)) for _ in range(REQUESTS)]
    return {
        "chosen by stretch, table": timed(by_stretch(table), rounds),
        "chosen by stretch, threshold": timed(by_stretch(Threshold(0.5)), rounds),
        "judge alone, table": timed(lambda: table.computes(asked), rounds),
        "all sets of a step together, table": timed(together(table), rounds),
        "all sets of a step together, threshold": timed(together(Threshold(0.5)), rounds),
        "all sets of a step, table": timed(all_sets(table), rounds),
        "all sets of a step, threshold": timed(all_sets(Threshold(0.5)), rounds),
    }


def replacing(width: int, rounds: int) -> dict[str, harness.Figure]:
    """Replacing a step's rows, with and without summing their changes."""
    program = program_of(STRETCHES, width)
    [step, *_] = steps_of(program, REQUESTS, PATCHES)
    sites = sites_of(program, [list(map(Mask, own)) for own in step.sites], PATCHES)
    found = {}
    for watched in (False, True):
        side = Side(program, REQUESTS, PATCHES, together=True)
        boundaries = boundary_taps(program.interface)
        for cache in side.caches if watched else ():
            changes = PatchChanges(PatchGrid((PATCHES,), 1), boundaries, STRETCHES)
            cache.block.watch(cache, changes)
        caches = dict(enumerate(side.caches))

        def run(caches: Any = caches) -> None:
            # the sites are found when rows are read, but their places are new in each step
            write_rows(Layout(sites, (1,) * REQUESTS), caches, step.emitted)
            for cache in caches.values():
                if cache.changes is not None:
                    cache.changes.read()

        name = f"rows of width {width} replaced" + (", changes summed" if watched else "")
        found[name] = timed(run, rounds)
        with mock.patch.dict(os.environ, {SWITCH: "0"}):
            found[f"{name}, plain operators"] = timed(run, rounds)
    return found


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--out", type=Path, default=harness.ROOT / "bench" / "results")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    figures = judging(options.rounds)
    for width in WIDTHS:
        figures |= replacing(width, options.rounds)
    sizes = {"stretches": STRETCHES, "requests": REQUESTS, "patches": PATCHES}
    result = {**harness.header("bench.patches.decisions", arguments), **sizes, "seconds": figures}
    harness.write_json(options.out / "patches-decisions.json", result)
    rows = [["", "median and extremes"], *([k, milliseconds(v)] for k, v in figures.items())]
    print(columns(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
