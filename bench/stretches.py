"""First blocks that compute everything: what they cost, and how near an edit comes to a dense run.

    OMP_NUM_THREADS=1 python -m bench.stretches --threads 1

A picture is recorded, then edited with another prompt: the same latent and timestep, other text.
The error is that of the masked sites against the module's own dense run of the new prompt. The
weights are random, so the errors say how the settings compare, not how good pictures are. Beside
the edits with k first blocks wide stand the module itself and a denoiser that was compiled without
stretches, which shows what it costs to have them. Writes bench/results/stretches.json.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import maskfx
from bench import harness, masks, shapes
from bench.report import columns, milliseconds, times
from bench.reuse import enlarge
from maskfx.runtime.planner.blocks import FLOPS, find_blocks
from maskfx.runtime.planner.calibration import one_batch
from maskfx.runtime.planner.choices import work_of

RATIOS = (0.1, 0.2)
WIDE = (0, 1, 2, 4)


class Bed:
    """One module compiled with and without stretches, a recording of each, and a new prompt."""

    def __init__(self, shape: shapes.Shape) -> None:
        self.shape, self.module = shape, enlarge(shape.build())
        self.denoiser = maskfx.compile(self.module, stretches=True)
        self.plain = maskfx.compile(self.module)
        template = shape.inputs(0)
        self.kept = self.denoiser.record(**template)[1]
        self.plain_kept = self.plain.record(**template)[1]
        prompt = shape.inputs(1)
        texts = {name: prompt[name] for name in ("encoder_hidden_states", "pooled_projections")}
        self.inputs = {**template, **texts}

    @property
    def blocks(self) -> int:
        """As many as attentions: a stretch ends with each."""
        return len(self.denoiser.stretches)

    def edit(self, mask: Tensor, blocks: int) -> maskfx.EditStep:
        """The first blocks compute everything."""
        wide = {block: torch.ones_like(mask) for block in range(1, blocks + 1)}
        return maskfx.EditStep(self.inputs, mask, self.kept, wide=wide)

    def counted(self, step: maskfx.EditStep) -> tuple[float, int]:
        """FLOPs of an edit and the bytes that it loads."""
        program, [member] = one_batch(self.denoiser, [step])
        [(_, frame, members)] = self.denoiser.batches([step])
        loaded = sum(job.nbytes for job in frame.jobs(members, program.interface.inputs))
        blocks = find_blocks(program, member.sites)
        return float(work_of(blocks, member.sites, member.batch)[:, :FLOPS].sum()), loaded


def measure(bed: Bed, grid: Tensor, rounds: int) -> dict[str, Any]:
    """All sides of one mask."""
    mask = bed.shape.as_mask(grid)
    steps = {k: bed.edit(mask, k) for k in sorted({*WIDE, bed.blocks}) if k <= bed.blocks}
    plain = maskfx.EditStep(bed.inputs, mask, bed.plain_kept)
    sides: dict[str, Callable[[int], Any]] = {
        "module": lambda _: bed.module(**bed.inputs),
        "no stretches": lambda _: bed.plain.edit([plain]),
        **{f"{k}": lambda _, s=step: bed.denoiser.edit([s]) for k, step in steps.items()},  # type: ignore[misc]
    }
    results = {name: first_tensor(run(0)) for name, run in sides.items()}  # warm, too
    seconds = harness.alternate(sides, rounds)
    wanted = bed.shape.masked(results["module"], grid)
    least = bed.counted(steps[0])[0]

    def row(name: str) -> dict[str, Any]:
        found = bed.shape.masked(results[name], grid)
        return {
            "seconds": harness.figure(seconds[name]),
            "times_slower": harness.ratio(seconds[name], seconds["0"]),
            "faster_than_module": harness.ratio(seconds["module"], seconds[name]),
            "error": float((found - wanted).norm() / wanted.norm()),
        }

    rows = []
    for k, step in steps.items():
        flops, loaded = bed.counted(step)
        counts = {"flops": flops, "flops_ratio": flops / least, "loaded_bytes": loaded}
        rows.append({"wide_blocks": k, **counts, **row(str(k))})
    return {
        "masked": float(grid.float().mean()),
        "module_seconds": harness.figure(seconds["module"]),
        "without_stretches": row("no stretches"),
        "rows": rows,
    }


def first_tensor(output: Any) -> Tensor:
    """The picture in what a call gives back."""
    while not isinstance(output, Tensor):
        output = output[0]
    return output


def recorded_bytes(bed: Bed) -> dict[str, int]:
    """Of one recorded step, without stretches and with them."""
    return {"plain": bed.plain_kept.nbytes(), "stretches": bed.kept.nbytes()}


def table(result: Mapping[str, Any]) -> str:
    rows = [["m", "wide blocks", "ms", "times slower", "x module", "FLOPs", "loaded MB", "error"]]
    for mask in result["masks"]:
        for own in mask["rows"]:
            rows.append(
                [
                    f"{mask['masked']:.2f}",
                    f"{own['wide_blocks']} of {result['blocks']}",
                    milliseconds(own["seconds"]),
                    times(own["times_slower"]),
                    times(own["faster_than_module"]),
                    f"{own['flops_ratio']:.2f}",
                    f"{own['loaded_bytes'] / 1e6:.1f}",
                    f"{own['error']:.4f}",
                ]
            )
        plain = mask["without_stretches"]
        rows.append(
            [f"{mask['masked']:.2f}", "no stretches", milliseconds(plain["seconds"]),
             times(plain["times_slower"]), times(plain["faster_than_module"]), "", "",
             f"{plain['error']:.4f}"]
        )  # fmt: skip
    return columns(rows)


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--quick", action="store_true", help="a tiny shape, two rounds")
    parser.add_argument("--out", type=Path, default=harness.ROOT / "bench" / "results")
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    rounds = 2 if options.quick else options.rounds
    shape = shapes.choose("c", options.quick)
    with torch.no_grad():
        bed = Bed(shape)
        result: dict[str, Any] = {
            **harness.header("bench.stretches", arguments),
            "weights": "random: errors compare settings, they don't rate pictures",
            "shape": shape.name,
            "title": shape.title,
            "blocks": bed.blocks,
            "rounds": rounds,
            "recorded_bytes": recorded_bytes(bed),
            "masks": [],
        }
        for ratio in RATIOS:
            grid = masks.make("square", shape.size.height, shape.size.width, ratio)
            result["masks"].append(measure(bed, grid, rounds))
    harness.write_json(options.out / f"stretches{'-quick' if options.quick else ''}.json", result)
    print(table(result))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
