"""Pictures of several sizes in one batch, nothing reused: in rows, size by size, and padded.

    OMP_NUM_THREADS=1 python -m bench.patches.mixed

A batch of dense requests of one denoiser, each of one of three sizes in turn. Sides:

- rows: one ragged batch (`CompiledDenoiser.batch`).
- one size at a time: one call of the module for the requests of each size.
- padding: one call of the module, latents padded with zeros to the largest size. What it computes
  of a smaller picture isn't that picture's; it stands for its time alone.
- one by one: one call of the module for each request.
- patch_batch: what `mode="patch_batch"` runs, after it has measured its ways.
- mask_cache: the same with templates, as in an engine, by a denoiser that has recorded a call.

Products of matrices are the part that a joint batch can make faster without computing less: each
weight is read once for all requests. `products` times those of all linear layers alone, with the
rows of one size at a time and with the rows of all requests at once; `allowed` is how much faster
than one size at a time a step would be that differed in nothing else.

Asked for: 1.3 times the better of one size at a time and padding where launches count (many small
requests), and never below it. CPU time, because machines are shared; sides take turns. Results of
rows, patch_batch and mask_cache are compared with the module's. `sd3, real width` has latents of
pictures of 512, 768 and 1024 pixels, and one block; `smaller` of half as many pixels along a side.
Writes results/patches-mixed.json, or another name.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

import maskfx
from bench import harness
from bench.ranks.shapes import sd3, sdxl
from bench.report import columns, milliseconds, times
from bench.shapes import Inputs, Shape, Size
from maskfx.pipelines.runs.dense_members import run_by_module
from maskfx.pipelines.runs.step_members import CallMember
from maskfx.runtime.denoiser import CompiledDenoiser
from maskfx.runtime.dense_ways import TRIES
from maskfx.runtime.steps import DenseStep

ROWS, SIZES, PADDED, SINGLE = "rows", "one size at a time", "padding", "one by one"
CHOSEN, KEPT = "patch_batch", "mask_cache"
ASKED = 1.3


@dataclass(frozen=True)
class Case:
    """Requests of several sizes of one denoiser."""

    name: str
    shape: Shape
    sides: tuple[int, ...]  # of the latents
    requests: int
    small: bool  # whether launches count

    def inputs(self) -> list[Inputs]:
        found = []
        for number in range(self.requests):
            side = self.sides[number % len(self.sides)]
            found.append(self.shape.inputs(number, Size(side, side, self.shape.size.text)))
        return found


def wide_sd3(side: int, blocks: int) -> Shape:
    """SD3 (medium) with few blocks."""
    own = sd3(side, blocks)
    config = own.config | {
        "num_attention_heads": 24,
        "joint_attention_dim": 4096,
        "caption_projection_dim": 1536,
        "pooled_projection_dim": 2048,
    }
    return replace(own, config=config, title=f"SD3, real width, {blocks} block")


CASES = {
    "small": Case("small", sd3(16, 2), (8, 12, 16), 24, True),
    "small, few": Case("small, few", sd3(16, 2), (8, 12, 16), 6, True),
    "sd3": Case("sd3", sd3(128, 2), (64, 96, 128), 3, False),
    "sd3, real width": Case("sd3, real width", wide_sd3(128, 1), (64, 96, 128), 3, False),
    "sd3, real width, smaller": Case(
        "sd3, real width, smaller", wide_sd3(64, 1), (32, 48, 64), 3, False
    ),
    "sdxl": Case("sdxl", sdxl(32, 1), (16, 24, 32), 3, False),
}


def joined(calls: Sequence[Inputs]) -> Inputs:
    """Return several calls of one size as one."""
    first = calls[0]
    return {
        name: torch.cat([call[name] for call in calls])
        if isinstance(value, Tensor) and value.dim()
        else {key: torch.cat([call[name][key] for call in calls]) for key in value}
        if isinstance(value, Mapping)
        else value
        for name, value in first.items()
    }


def picture_name(call: Inputs) -> str:
    return next(
        name for name, value in call.items() if isinstance(value, Tensor) and value.dim() == 4
    )


def padded(call: Inputs, side: int) -> Inputs:
    name = picture_name(call)
    more = side - call[name].shape[-1]
    return {**call, name: torch.nn.functional.pad(call[name], (0, more, 0, more))}


def sides_of(module: torch.nn.Module, calls: Sequence[Inputs]) -> dict[str, Callable[[int], Any]]:
    """Return what each side runs; its results are by request, except for padding."""
    denoiser, recorded = (maskfx.compile(module, mode=mode) for mode in (CHOSEN, KEPT))
    recorded.record(**calls[0])
    numbers: dict[int, list[int]] = {}
    for number, call in enumerate(calls):
        numbers.setdefault(call[picture_name(call)].shape[-1], []).append(number)
    largest = max(numbers)

    def by_size(_: int) -> list[Any]:
        found: dict[int, Any] = {}
        for own in numbers.values():
            [output] = denoiser.module(**joined([calls[number] for number in own]))
            found |= dict(zip(own, output.split(1), strict=True))
        return [(found[number],) for number in range(len(calls))]

    def chosen(by: CompiledDenoiser) -> list[Any]:
        runs: list[Any] = [SimpleNamespace(run=object()) for _ in calls]
        none: Any = SimpleNamespace()
        members = [CallMember(run, none, DenseStep(c)) for run, c in zip(runs, calls, strict=True)]
        left = run_by_module(by, members)
        assert not left, "a step in rows failed"
        return [member.result for member in members]

    return {
        ROWS: lambda _: denoiser.batch(calls),
        SIZES: by_size,
        PADDED: lambda _: denoiser.module(**joined([padded(call, largest) for call in calls])),
        SINGLE: lambda _: [denoiser.module(**call) for call in calls],
        CHOSEN: lambda _: chosen(denoiser),
        KEPT: lambda _: chosen(recorded),
    }


def products_of(
    module: torch.nn.Module, run: Callable[[int], Any]
) -> dict[str, Callable[[int], Any]]:
    """Return the products of a run's linear layers: as they ran, and with all rows at once."""
    seen: dict[torch.nn.Linear, list[Tensor]] = {}

    def note(layer: Any, given: tuple[Tensor, ...]) -> None:
        seen.setdefault(layer, []).append(given[0].reshape(-1, layer.in_features))

    layers = [layer for layer in module.modules() if isinstance(layer, torch.nn.Linear)]
    hooks = [layer.register_forward_pre_hook(note) for layer in layers]
    run(0)
    for hook in hooks:
        hook.remove()
    once = {layer: torch.cat(rows) for layer, rows in seen.items()}
    linear = torch.nn.functional.linear
    return {
        SIZES: lambda _: [linear(x, own.weight) for own, rows in seen.items() for x in rows],
        ROWS: lambda _: [linear(rows, own.weight) for own, rows in once.items()],
    }


@torch.no_grad()
def measured(case: Case, rounds: int) -> dict[str, Any]:
    """Return the seconds of all sides, and what was asked for."""
    calls = case.inputs()
    module = case.shape.build()
    sides = sides_of(module, calls)
    wanted = sides[SINGLE](0)
    errors = {}
    for name in (ROWS, SIZES, CHOSEN, KEPT):
        pairs = zip(sides[name](0), wanted, strict=True)
        errors[name] = max(float((a[0] - b[0]).norm() / b[0].norm()) for a, b in pairs)
    for number in range(2 * TRIES):  # the ways are measured
        sides[CHOSEN](number)
        sides[KEPT](number)
    sides[PADDED](0)
    spent = harness.alternate(sides, rounds, time.process_time)
    better = [min(pair) for pair in zip(spent[SIZES], spent[PADDED], strict=True)]
    gain = {name: harness.ratio(better, spent[name]) for name in (ROWS, CHOSEN, KEPT)}
    products = harness.alternate(products_of(module, sides[SIZES]), rounds, time.process_time)
    whole, *parts = (min(each) for each in (spent[SIZES], products[SIZES], products[ROWS]))
    saved = max(0.0, parts[0] - parts[1])
    return {
        "case": case.name,
        "title": case.shape.title,
        "latents": list(case.sides),
        "requests": case.requests,
        "seconds": {name: harness.figure(each) for name, each in spent.items()},
        "errors": errors,
        "times_the_better": gain,
        "products": {name: harness.figure(each) for name, each in products.items()},
        "allowed": whole / (whole - saved),
        "asked": ASKED if case.small else 1.0,
        "met": {
            name: one["median"] >= (ASKED if case.small else 1.0) for name, one in gain.items()
        },
    }


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--cases", nargs="+", default=list(CASES), choices=list(CASES))
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--name", default="patches-mixed", help="of the file in --out")
    parser.add_argument("--out", type=Path, default=harness.ROOT / "bench" / "results")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    result = {**harness.header("bench.patches.mixed", arguments), "threads": 1}
    found = []
    for name in options.cases:
        found.append(measured(CASES[name], options.rounds))
        harness.write_json(options.out / f"{options.name}.json", {**result, "cases": found})
    for one in found:
        print(
            f"{one['case']}: {one['title']}, latents {one['latents']}, {one['requests']} requests"
        )
        rows = [[name, milliseconds(each)] for name, each in one["seconds"].items()]
        rows += [
            [f"{name}, times the better", times(x)] for name, x in one["times_the_better"].items()
        ]
        print(columns([["", "ms"], *rows]))
        rows = [[f"products, {name}", milliseconds(each)] for name, each in one["products"].items()]
        print(columns([*rows, ["allowed by them", f"{one['allowed']:.2f}"]]))
        print(f"  errors {one['errors']}, asked {one['asked']}, met {one['met']}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
