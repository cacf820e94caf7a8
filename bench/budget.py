"""A byte budget for a template: what fits, what it does to an edit, and how fast that edit is.

    OMP_NUM_THREADS=1 python -m bench.budget --threads 1

Bytes of the full SDXL's template are counted on shapes: for masks that may be anywhere, anywhere
inside of one region, or are that region. Errors and times are measured on smaller denoisers, which
fit here: |seen - wanted| / |wanted| over masked sites, of an edit with another request's text and
latent, against the edit from a lossless recording of the very step. Steps that share are measured
where they are worst off, in the middle. Weights are random: as drawn, where neighbouring steps have
little in common, and smooth in time as trained ones are (`bench/reuse.py`); how much real
neighbours differ only real weights can say. Writes budget.json to bench/results.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import maskfx
from bench import masks, shapes
from bench.harness import ROOT, alternate, figure, header, ratio, write_json
from bench.report import columns
from bench.reuse import enlarge, smooth_in_time
from bench.shapes import Shape
from bench.storage import FLASHPS_GIB, STEP, inputs_at
from maskfx import Budget, EditStep, Masks, StepCache
from maskfx.errors import InputError
from maskfx.runtime.cache.serialize import relative_error
from maskfx.runtime.planner.blocks import find_blocks
from maskfx.runtime.sites.masks import find_reach
from maskfx.runtime.templates.budget import Keeping, choose, recorded_steps, region_bytes, timed
from maskfx.runtime.templates.footprint import ENCODINGS, Footprint, encoding_of

STEPS, BRANCHES = 50, 2
RATIO = 0.2
SHARES = (1, 2, 3, 4, 6, 8, 12, 13)
MEASURED = (1, 2, 4, 8, 14)
GIB = 2**30
WEIGHTS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "as drawn": lambda module: module,
    "smooth in time": lambda module: enlarge(smooth_in_time(module)),
}
ALLOWED = {
    "any": ("16bit", "8bit", "4bit", *(f"share{n}" for n in SHARES[1:])),
    "no sharing": ("16bit", "8bit", "4bit"),
    "no 4bit": ("16bit", "8bit", *(f"share{n}" for n in SHARES[1:])),
}


def masks_of(grid: Tensor) -> dict[str, Masks]:
    return {
        "anywhere": Masks.anywhere(*grid.shape),
        f"inside {RATIO:g}": Masks.inside(grid),
        f"exactly {RATIO:g}": Masks.exactly(grid),
    }


# The full SDXL, counted


def counted(shape: Shape) -> dict[str, Any]:
    """Bytes by kind, by encoding and sharing, and what a budget chooses."""
    with torch.device("meta"):
        module = shape.build()
    inputs = pytree.tree_map_only(Tensor, lambda v: v.to("meta"), shape.inputs(0))
    denoiser = maskfx.compile(module, example_inputs=inputs, plans=True)
    grid = masks.make("square", shape.size.height, shape.size.width, RATIO)
    found = {}
    for name, allowed in masks_of(grid).items():
        footprint = Footprint.of(denoiser, allowed)
        interface = footprint.program.interface
        kinds = {how: footprint.kinds(encoding_of(how, interface)) for how in ENCODINGS}
        found[name] = {
            "bytes_per_step_and_branch": kinds,
            "gib": {how: gib_by_share(footprint, how) for how in ENCODINGS},
            "chosen": {
                told: chosen(footprint, FLASHPS_GIB, allow) for told, allow in ALLOWED.items()
            },
        }
    return {
        "title": f"{shape.title}, {STEPS} steps, {BRANCHES} branches",
        "budget_gib": FLASHPS_GIB,
        "masks": found,
    }


def gib_by_share(footprint: Footprint, how: str) -> dict[int, float]:
    """GiB of the template that keeps of each attention what is smaller."""
    interface = footprint.program.interface
    step = footprint.together(encoding_of(how, interface), interface.fixed_taps())
    step += sum(map(min, region_bytes(footprint, how)))
    out = {}
    for share in SHARES:
        whole = len(recorded_steps(STEPS, share))
        out[share] = BRANCHES * (whole * step + (STEPS - whole) * footprint.alone) / GIB
    return out


def chosen(footprint: Footprint, gib: float, allow: Sequence[str]) -> dict[str, Any]:
    """What a budget makes of it: bytes, and an edit's FLOPs over those with all keys at hand."""
    budget = Budget(gib * GIB, STEPS, BRANCHES, allow)
    try:
        found = choose(footprint, budget)
    except InputError as error:
        return {"unmet": str(error)}
    whole = len(recorded_steps(STEPS, found.share))
    nbytes = BRANCHES * (whole * found.nbytes + (STEPS - whole) * footprint.alone)
    kept = {side: found.regions.count(side) for side in ("both", "keys", "inputs")}
    return {
        "encoding": found.encoding,
        "share": found.share,
        "regions": kept,
        "gib": nbytes / GIB,
        "flops_over_all_keys": flops_ratio(footprint, found),
    }


def flops_ratio(footprint: Footprint, found: Keeping) -> float:
    """FLOPs of an edit that projects again what isn't kept, over one that loads all of it."""
    blocks = find_blocks(footprint.program, footprint.sites)
    times = timed(footprint, blocks, region_bytes(footprint, found.encoding), None)
    least = seen = 0.0
    for block, own in zip(blocks, times, strict=True):
        first, *others = own.members[0]
        side = found.regions[block.region - 1] if block.region else "keys"
        least += first.compute_seconds
        seen += others[0].compute_seconds if side == "inputs" else first.compute_seconds
    return seen / least


# Smaller ones, measured


class Measured:
    """One denoiser: recordings of some steps, and edits of one step from any of them."""

    def __init__(self, shape: Shape, weights: str, allowed: Masks, grid: Tensor) -> None:
        self.shape, self.grid, self.allowed = shape, grid, allowed
        self.denoiser = maskfx.compile(WEIGHTS[weights](shape.build()), plans=True)
        self.recorded: dict[int, StepCache] = {}

    def record(self, step: int) -> StepCache:
        if step not in self.recorded:
            self.recorded[step] = self.denoiser.record(**inputs_at(self.shape, step))[1]
        return self.recorded[step]

    def packed(self, step: int, how: str) -> StepCache:
        """What a template keeps of a step, inputs instead of keys and values."""
        cache = self.record(step)
        interface = self.denoiser.programs[cache.program].interface
        kept = interface.taps_for(["inputs"] * len(interface.regions)) & cache.rows.keys()
        reach = find_reach(interface, cache.sizes, self.allowed)
        return cache.within(self.allowed, reach).packed(encoding_of(how, interface), kept)

    def served(self, step: int, share: int, how: str, weight: float = 0.5) -> StepCache:
        """The recording of a step in the middle between two that are kept."""
        if share == 1:
            return self.packed(step, how)
        before = self.packed(step - share // 2, how)
        after = self.packed(step + share // 2, how)
        return self.record(step).served_by(before, after, weight)

    def edit(self, step: int, cache: StepCache) -> Tensor:
        inputs = inputs_at(self.shape, step, 1)
        edit = EditStep(inputs, self.shape.as_mask(self.grid), cache, any_step=True)
        return self.shape.masked(self.denoiser.edit([edit])[0][0], self.grid)


def errors_of(measured: Measured) -> list[dict[str, Any]]:
    """By sharing and encoding, for a step in the middle; `held`: from the step before alone."""
    wanted = measured.edit(STEP, measured.record(STEP))
    rows = []
    for share in MEASURED:
        seen = {
            how: relative_error(measured.edit(STEP, measured.served(STEP, share, how)), wanted)
            for how in ENCODINGS
        }
        row: dict[str, Any] = {"share": share, "errors": seen}
        if share > 1:
            held = measured.served(STEP, share, "lossless", 0.0)
            row["held"] = relative_error(measured.edit(STEP, held), wanted)
        rows.append(row)
    return rows


def seconds_of(measured: Measured, rounds: int) -> dict[str, Any]:
    """Seconds of one edit by encoding and sharing, over the lossless edit with all keys at hand."""
    runs: dict[str, Callable[[int], Any]] = {}
    caches = {"all kept": measured.record(STEP)}
    for how in ENCODINGS:
        for share in MEASURED[:2]:
            caches[f"{how}, share {share}"] = measured.served(STEP, share, how)
    for name, cache in caches.items():
        measured.edit(STEP, cache)
        runs[name] = partial(lambda cache, _: measured.edit(STEP, cache), cache)
    samples = alternate(runs, rounds)
    return {
        name: {"seconds": figure(own), "over_all_kept": ratio(own, samples["all kept"])}
        for name, own in samples.items()
    }


def run_shape(name: str, options: argparse.Namespace) -> dict[str, Any]:
    shape = shapes.choose(name, options.quick)
    grid = masks.make("square", shape.size.height, shape.size.width, RATIO)
    allowed = Masks.exactly(shape.as_mask(grid))
    result: dict[str, Any] = {"shape": name, "title": shape.title, "errors": {}}
    for weights in WEIGHTS:
        measured = Measured(shape, weights, allowed, grid)
        result["errors"][weights] = errors_of(measured)
        if weights == next(iter(WEIGHTS)):
            result["seconds"] = seconds_of(measured, options.rounds)
            result["bytes_per_step"] = {
                how: measured.packed(STEP, how).nbytes() for how in ENCODINGS
            }
            result["all_kept"] = measured.record(STEP).nbytes()
    return result


# Reports for readers


def counted_table(found: dict[str, Any]) -> str:
    rows = [["masks", "encoding", *(f"GiB, share {n}" for n in SHARES)]]
    told = []
    for name, own in found["masks"].items():
        for how, by_share in own["gib"].items():
            rows.append([name, how, *(f"{by_share[n]:.2f}" for n in SHARES)])
        for allow, one in own["chosen"].items():
            what = one.get("unmet") or (
                f"{one['encoding']}, share {one['share']}, {one['regions']}, {one['gib']:.2f} GiB, "
                f"{one['flops_over_all_keys']:.2f} x the FLOPs"
            )
            told.append(f"{found['budget_gib']} GiB, masks {name}, allowed {allow}: {what}")
    return "\n".join([found["title"], columns(rows), "", *told])


def measured_table(found: Sequence[dict[str, Any]]) -> str:
    rows = [["error", "weights", "share", *ENCODINGS, "held"]]
    times = [["edit", "seconds", "over all kept"]]
    for result in found:
        for weights, own in result["errors"].items():
            for row in own:
                cells = [f"{row['errors'][how]:.2%}" for how in ENCODINGS]
                held = f"{row['held']:.2%}" if "held" in row else ""
                rows.append([result["shape"], weights, str(row["share"]), *cells, held])
        for name, one in result["seconds"].items():
            cells = [f"{one['seconds']['median']:.3f}", f"{one['over_all_kept']['median']:.2f}"]
            times.append([f"{result['shape']} {name}", *cells])
    return f"{columns(rows)}\n\n{columns(times)}"


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--shapes", default="b,c", help="of bench/shapes.py")
    parser.add_argument("--rounds", type=int, default=5, help="timings of each edit")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--quick", action="store_true", help="small stand-ins, no full SDXL")
    parser.add_argument("--out", type=Path, default=ROOT / "bench" / "results")
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    result = {**header("bench.budget", arguments), "note": (__doc__ or "").split("\n\n")[2]}
    full = next(s for s in shapes.FULL_DEPTH if s.name == "sdxl")
    result["template"] = counted(shapes.choose("b", True) if options.quick else full)
    print(counted_table(result["template"]), flush=True)
    found = result["shapes"] = []
    for name in options.shapes.split(","):
        print(f"{name}: {shapes.choose(name, options.quick).title}", file=sys.stderr, flush=True)
        found.append(run_shape(name, options))
        write_json(options.out / "budget.json", result)
    print(measured_table(found))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
