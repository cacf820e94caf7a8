"""What a recorded step takes in memory in 32, 16 and 8 bits, and what rounding it does to an edit.

    python -m bench.storage

Bytes are those held, scales included. An edit's error is |seen - wanted| / |wanted| over masked
sites: against the dense run where the inputs are the recorded ones, against the lossless edit
where text and latent are another request's. Sharing one recording among neighbouring steps is
measured along a made-up trajectory. Weights are random: rounding errors carry over to real
weights roughly, sharing errors don't at all. Bytes per template of the full SDXL are counted on
shapes. Writes storage.json to bench/results.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

import maskfx
from bench import masks, shapes
from bench.harness import ROOT, alternate, figure, header, write_json
from bench.report import columns
from bench.shapes import Inputs, Shape
from maskfx import CompiledDenoiser, EditStep, StepCache
from maskfx.ir.programs.program import Program
from maskfx.ir.programs.sources import Halo, Rest
from maskfx.runtime.batch import flops
from maskfx.runtime.batch.layout import Layout
from maskfx.runtime.cache.quantize import LOSSLESS, Encoding, Format
from maskfx.runtime.cache.serialize import relative_error
from maskfx.runtime.explain import output_dtype
from maskfx.runtime.sites.active import ActiveSites

ENCODINGS = {
    "lossless": LOSSLESS,
    "16 bit": Encoding(rows=Format.FP16, stats=Format.FP16),
    "8 bit": Encoding(rows=Format.INT8, stats=Format.INT8),
}
ASKED = 0.01  # of 8 against 16 bit
MASKS = (("square", 0.11), ("strokes", 0.2))
STEP = 20  # of 50
SHARED = (2, 4)
SHARED_AS = ("lossless", "8 bit")
SDXL_STEPS, SDXL_BRANCHES = 50, 2
READ_RATIO = 0.2
FLASHPS_GIB = 2.6  # per template, as the paper reports
NOTE = (
    "Random weights. Rounding errors carry over to real ones roughly; sharing errors are "
    "meaningless in absolute terms: how much neighbouring steps differ is a matter of training."
)


# A request's steps


def inputs_at(shape: Shape, step: int, request: int = 0) -> Inputs:
    """One step of a request: all start from one noise, each has a picture and a text of its own."""
    inputs = shape.inputs(100 + request)
    timestep = shape.inputs(step)["timestep"]
    latent = "sample" if "sample" in inputs else "hidden_states"
    clean, noisy = shares_of(shape, float(timestep))
    mixed = clean * inputs[latent] + noisy * shape.inputs(99)[latent]
    return {**inputs, latent: mixed, "timestep": timestep}


def shares_of(shape: Shape, timestep: float) -> tuple[float, float]:
    """Shares of picture and noise: Stable Diffusion's variances, or a straight line between."""
    if shape.has_convolutions:
        betas = torch.linspace(0.00085**0.5, 0.012**0.5, 1000, dtype=torch.float64) ** 2
        left = float((1 - betas).cumprod(0)[int(timestep)])
        return left**0.5, (1 - left) ** 0.5
    noise = timestep if timestep <= 1 else timestep / 1000
    return 1 - noise, noise


# One denoiser


class Recorded:
    """A denoiser, and one recording of it in every encoding."""

    def __init__(self, shape: Shape) -> None:
        self.shape, self.module = shape, shape.build()
        self.denoiser: CompiledDenoiser = maskfx.compile(self.module)
        lossless = self.denoiser.record(**inputs_at(shape, STEP))[1]
        self.caches = {name: lossless.packed(how) for name, how in ENCODINGS.items()}

    @property
    def program(self) -> Program:
        return next(iter(self.denoiser.programs.values()))

    def dense(self, inputs: Inputs) -> Tensor:
        with torch.no_grad():
            output: Tensor = self.module(**inputs)[0]
        return output

    def edit(self, inputs: Inputs, grid: Tensor, cache: StepCache) -> Tensor:
        """What an edit gives at the masked sites; the cache may be another step's."""
        step = EditStep(inputs, self.shape.as_mask(grid), cache, any_step=True)
        return self.shape.masked(self.denoiser.edit([step])[0][0], grid)


def bytes_by_kind(program: Program, cache: StepCache) -> dict[str, int]:
    """What a recording holds; rows that several taps share count once."""
    kinds = flops.tap_kinds(program.interface)
    out: Counter[str] = Counter()
    before = 0
    alone = replace(cache, rows={}, stats={}, output=[], sums={})
    for tap, rows in cache.rows.items():
        alone.rows[tap] = rows
        out[kinds[tap]] += alone.nbytes() - before
        before = alone.nbytes()
    out["group statistics"] = sum(stats.nbytes() for stats in cache.stats.values())
    out["output"] = replace(cache, rows={}, stats={}, sums={}).nbytes()
    return {**{kind: out[kind] for kind in flops.KINDS if out[kind]}, "together": cache.nbytes()}


def edit_errors(recorded: Recorded, grid: Tensor) -> list[dict[str, Any]]:
    """Errors of an edit with the recorded inputs, and with another request's."""
    rows = []
    for request, name in ((0, "recorded"), (1, "changed")):
        inputs = inputs_at(recorded.shape, STEP, request)
        seen = {how: recorded.edit(inputs, grid, cache) for how, cache in recorded.caches.items()}
        dense = recorded.shape.masked(recorded.dense(inputs), grid)
        wanted = dense if name == "recorded" else seen["lossless"]
        apart = relative_error(seen["8 bit"], seen["16 bit"])
        rows.append(
            {
                "inputs": name,
                "against": "the dense run" if name == "recorded" else "the lossless edit",
                "errors": {how: relative_error(value, wanted) for how, value in seen.items()},
                "eight_against_sixteen": apart,
                "asked": ASKED,
                "met": apart < ASKED,
            }
        )
    return rows


def edit_seconds(recorded: Recorded, grid: Tensor, rounds: int) -> dict[str, dict[str, float]]:
    """Seconds of one edit by encoding: what widening the picked rows costs."""
    inputs = inputs_at(recorded.shape, STEP, 1)
    runs: dict[str, Callable[[int], Any]] = {}
    for how, cache in recorded.caches.items():
        recorded.edit(inputs, grid, cache)
        runs[how] = partial(lambda cache, _: recorded.edit(inputs, grid, cache), cache)
    return {how: figure(samples) for how, samples in alternate(runs, rounds).items()}


def sharing(recorded: Recorded, grids: dict[str, Tensor]) -> list[dict[str, Any]]:
    """Steps that use the recording of the first step of their group of 2 or 4; the first mask."""
    grid = next(iter(grids.values()))
    caches = {how: recorded.caches[how] for how in SHARED_AS}
    errors: dict[str, dict[str, list[float]]] = {}
    for request, name in ((0, "recorded"), (1, "changed")):
        found: dict[str, list[float]] = {how: [] for how in caches}
        for later in range(1, max(SHARED)):
            inputs = inputs_at(recorded.shape, STEP + later, request)
            if request:
                own = recorded.denoiser.record(**inputs_at(recorded.shape, STEP + later))[1]
                wanted = recorded.edit(inputs, grid, own)
            else:
                wanted = recorded.shape.masked(recorded.dense(inputs), grid)
            for how, cache in caches.items():
                found[how].append(relative_error(recorded.edit(inputs, grid, cache), wanted))
        errors[name] = found
    held = {how: cache.nbytes() for how, cache in recorded.caches.items()}
    outputs = sum(t.nbytes for t in recorded.caches["lossless"].output if isinstance(t, Tensor))
    return [
        {
            "steps_per_recording": steps,
            "bytes_per_step": {how: shared_bytes(n, outputs, steps) for how, n in held.items()},
            "errors_by_distance": {
                name: {how: values[: steps - 1] for how, values in found.items()}
                for name, found in errors.items()
            },
        }
        for steps in SHARED
    ]


def shared_bytes(together: int, outputs: int, steps: int) -> int:
    """Bytes per step: what lies outside the mask is each step's own output."""
    return (together - outputs) // steps + outputs


def run_shape(name: str, options: argparse.Namespace) -> dict[str, Any]:
    shape = shapes.choose(name, options.quick)
    recorded = Recorded(shape)
    kinds = {how: bytes_by_kind(recorded.program, c) for how, c in recorded.caches.items()}
    size = shape.size
    grids = {f"{kind} {m:g}": masks.make(kind, size.height, size.width, m) for kind, m in MASKS}
    return {
        "shape": name,
        "title": shape.title,
        "bytes_per_step": kinds,
        "eight_to_sixteen": {
            kind: kinds["8 bit"][kind] / kinds["16 bit"][kind] for kind in kinds["8 bit"]
        },
        "masks": [
            {
                "mask": label,
                "sites": int(grid.sum()),
                "edits": edit_errors(recorded, grid),
                "seconds": edit_seconds(recorded, grid, options.rounds),
            }
            for label, grid in grids.items()
        ],
        "sharing": {"mask": next(iter(grids)), "by_steps": sharing(recorded, grids)},
    }


# A template of the full SDXL, counted


def template_bytes() -> dict[str, Any]:
    """1024 x 1024, 50 steps with guidance: two recordings a step. No weights, shapes alone."""
    shape = next(s for s in shapes.FULL_DEPTH if s.name == "sdxl")
    with torch.device("meta"):
        module = shape.build()
    inputs = pytree.tree_map_only(Tensor, lambda v: v.to("meta"), shape.inputs(0))
    denoiser = maskfx.compile(module, example_inputs=inputs, plans=True)
    program, compilation = next(iter(denoiser.programs.values())), denoiser.compilations[0]
    sizes = {**flops.capture_sizes(compilation.capture.pyramid), "batch": 1}
    sizes.update(y=shape.size.height, x=shape.size.width)
    sites = ActiveSites(program.interface.pyramid, sizes, None)
    masked = flops.square_sites(program.interface.pyramid, sizes, READ_RATIO)
    per_step = {}
    for how, encoding in ENCODINGS.items():
        found: Counter[str] = Counter()
        held = flops.cache_bytes(program, sites, output_dtype(compilation), encoding)
        for (kind, _), nbytes in held.items():
            found[kind] += nbytes
        per_step[how] = dict(found)
    return {
        "title": f"{shape.title}, 1024 x 1024, {SDXL_STEPS} steps, {SDXL_BRANCHES} branches",
        "flashps_gib": FLASHPS_GIB,
        "bytes_per_step_and_branch": per_step,
        "read_by_an_edit": {
            "mask": f"square, {READ_RATIO:g}",
            **{how: read_by(program, masked, encoding) for how, encoding in ENCODINGS.items()},
        },
        "templates": [
            template(choice, left_out, how, kinds, shared)
            for choice, left_out in CHOICES.items()
            for how, kinds in per_step.items()
            for shared in (1, *SHARED)
        ],
    }


def read_by(program: Program, sites: ActiveSites, encoding: Encoding) -> int:
    """Bytes of a recording that edits under one mask read: the rest's keys and values, the halos,
    statistics of active sites and their sums.
    """
    interface, found = program.interface, 0
    layout = Layout((sites,), (1,))
    read: dict[str, list[Tensor]] = {}
    for source in interface.inputs.values():
        if isinstance(source, (Rest, Halo)):
            read.setdefault(source.tap, []).extend(layout.picks(source))
    for name, picks in read.items():
        tap = interface.taps[name]
        count = len(torch.cat(picks).unique())
        found += count * flops.site_bytes(tap.shape, tap.dtype, encoding.of(name))
    for tap in interface.taps.values():
        if tap.stats and interface.stats_index(tap.name) == 0:
            norms = len(interface.stats_taps(tap.segments, tap.stats))
            active = sum(sites.active_count(s) for s in tap.segments)
            found += flops.stats_bytes(tap, norms, active, encoding.stats)
    return found


CHOICES = {
    "keys and values": "inputs of keys and values",
    "their inputs": "attention keys and values",
}


def template(
    choice: str, left_out: str, how: str, kinds: dict[str, int], shared: int
) -> dict[str, Any]:
    """All steps and branches with one choice for every attention."""
    kept = sum(nbytes for kind, nbytes in kinds.items() if kind != left_out)
    each = shared_bytes(kept, kinds["output"], shared)
    gib = each * SDXL_STEPS * SDXL_BRANCHES / 2**30
    return {
        "kept": choice,
        "encoding": how,
        "steps_per_recording": shared,
        "gib": gib,
        "times_flashps": gib / FLASHPS_GIB,
    }


# Reports for readers


def bytes_table(found: Sequence[dict[str, Any]]) -> str:
    kinds = [k for k in flops.KINDS if any(k in r["bytes_per_step"]["8 bit"] for r in found)]
    kinds.append("together")
    rows = [["MB per step", "encoding", *kinds]]
    for result in found:
        for how, held in result["bytes_per_step"].items():
            cells = [f"{held[k] / 1e6:.2f}" if k in held else "" for k in kinds]
            rows.append([result["shape"], how, *cells])
        ratios = result["eight_to_sixteen"]
        cells = [f"{ratios[k]:.3f}" if k in ratios else "" for k in kinds]
        rows.append([result["shape"], "8 / 16 bit", *cells])
    return columns(rows)


def error_table(found: Sequence[dict[str, Any]]) -> str:
    rows = [["edit", "mask", "inputs", *ENCODINGS, "8 against 16", "asked", *(
        f"{how} ms" for how in ENCODINGS)]]  # fmt: skip
    for result in found:
        for mask in result["masks"]:
            for edit in mask["edits"]:
                cells = [f"{edit['errors'][how]:.1e}" for how in ENCODINGS]
                asked = f"{ASKED:.0%} " + ("met" if edit["met"] else "missed")
                times = [f"{1e3 * mask['seconds'][how]['median']:.1f}" for how in ENCODINGS]
                start = [result["shape"], mask["mask"], edit["inputs"]]
                rows.append([*start, *cells, f"{edit['eight_against_sixteen']:.2%}", asked, *times])
    return columns(rows)


def sharing_table(found: Sequence[dict[str, Any]]) -> str:
    """Bytes by how many steps share a recording; errors by how far from it a step is."""
    sizes = [["sharing: MB a step", "encoding", "1 step", *(f"{n} steps" for n in SHARED)]]
    errors = [["sharing: error", "mask", "inputs", *(
        f"{how}, {n} off" for how in SHARED_AS for n in range(1, max(SHARED)))]]  # fmt: skip
    for result in found:
        shared = result["sharing"]["by_steps"]
        for how, held in result["bytes_per_step"].items():
            each = [held["together"], *(one["bytes_per_step"][how] for one in shared)]
            sizes.append([result["shape"], how, *(f"{n / 1e6:.2f}" for n in each)])
        for name, seen in shared[-1]["errors_by_distance"].items():
            cells = [f"{e:.1%}" for how in SHARED_AS for e in seen[how]]
            errors.append([result["shape"], result["sharing"]["mask"], name, *cells])
    return f"{columns(sizes)}\n\n{columns(errors)}"


def template_table(found: dict[str, Any]) -> str:
    rows = [["kept", "encoding", *(f"GiB, {n} steps a recording" for n in (1, *SHARED)),
             *(f"x {FLASHPS_GIB:g} GiB, {n}" for n in (1, *SHARED))]]  # fmt: skip
    for choice in CHOICES:
        for how in ENCODINGS:
            own = [t for t in found["templates"] if (t["kept"], t["encoding"]) == (choice, how)]
            sizes = [f"{t['gib']:.1f}" for t in own]
            rows.append([choice, how, *sizes, *(f"{t['times_flashps']:.1f}" for t in own)])
    kinds = [
        f"{kind} {nbytes / 1e6:.1f} MB"
        for kind, nbytes in found["bytes_per_step_and_branch"]["8 bit"].items()
    ]
    read = found["read_by_an_edit"]
    sizes = [f"{read[how] / 1e6:.1f} MB in {how}" for how in ENCODINGS]
    return "\n".join(
        [
            found["title"],
            f"a step and branch in 8 bits: {', '.join(kinds)}",
            f"of these, an edit ({read['mask']}) with keys and values reads {', '.join(sizes)}",
            columns(rows),
        ]
    )


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--shapes", default="a,b,c,d", help="of bench/shapes.py")
    parser.add_argument("--rounds", type=int, default=3, help="timings of each edit")
    parser.add_argument("--quick", action="store_true", help="small stand-ins, no SDXL")
    parser.add_argument("--out", type=Path, default=ROOT / "bench" / "results")
    options = parser.parse_args(arguments)
    result = {**header("bench.storage", arguments), "note": NOTE}
    if not options.quick:
        result["template"] = template_bytes()
        print(template_table(result["template"]), flush=True)
    found = result["shapes"] = []
    for name in options.shapes.split(","):
        print(f"{name}: {shapes.choose(name, options.quick).title}", file=sys.stderr, flush=True)
        found.append(run_shape(name, options))
        write_json(options.out / "storage.json", result)
    print(bytes_table(found), error_table(found), sharing_table(found), NOTE, sep="\n\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
