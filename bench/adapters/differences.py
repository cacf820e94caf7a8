"""Requests with full differences of weights: in a shared batch, merged, and as diffusers does it.

    OMP_NUM_THREADS=1 python -m bench.adapters.differences

Each request edits a picture with the shipped UNet and has a file of its own, with a difference of
the weight of every linear layer and convolution. `--batch` requests run at once. The sides:

- `none`: without differences.
- `own`: each request has its own difference; they share steps, whose rows are multiplied by each
  request's weights.
- `same`: all requests have one difference, which the engine may write into the weights.
- `merged`: the difference is in the weights for good; nothing is loaded.
- `serial`: diffusers' way, one request after the other, all sites: the file is read, added to the
  weights with `load_state_dict`, and taken out after the picture.
- `serial none`: diffusers without differences.

`--dense` lets maskfx's requests compute all sites and all steps too. Times are processor seconds
of all processes, which other work on the machine disturbs less, and seconds; ratios are of one
round. Of `own` the latents are compared with those of a pipeline with merged weights. Writes
adapters-differences.json to bench/results, with `--dense` adapters-differences-dense.json.
"""

from __future__ import annotations

import argparse
import copy
import sys
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import maskfx
from bench import harness
from bench.adapters.workflow import SCALES, build_workflow, call_of
from bench.report import columns
from maskfx.pipelines.compile import pipeline_state_of

KINDS = (nn.Linear, nn.Conv2d)
LENGTH = 0.02  # of a difference, as a share of its weight's


def write_difference(path: Path, unet: nn.Module, seed: int) -> Path:
    """A file of differences of all linear layers and convolutions, as ComfyUI writes them."""
    draw, tensors = torch.Generator().manual_seed(seed), dict[str, Tensor]()
    for name, layer in unet.named_modules():
        if isinstance(layer, KINDS):
            change = torch.randn(layer.weight.shape, generator=draw)
            change *= LENGTH * float(layer.weight.norm()) / float(change.norm())
            tensors[f"diffusion_model.{name}.diff"] = change
    save_file(tensors, path)
    return path


def merge(unet: nn.Module, path: Path) -> dict[str, Tensor]:
    """Add a file's differences to a module's weights; return the weights before."""
    before = {}
    state = unet.state_dict()
    for key, change in load_file(path).items():
        name = key.removeprefix("diffusion_model.").removesuffix("diff") + "weight"
        before[name] = state[name].clone()
        state[name] = state[name] + change
    unet.load_state_dict(state)
    return before


class Bed:
    """The pipelines and files, and the requests of each side."""

    def __init__(self, asked: argparse.Namespace, folder: Path, engine: maskfx.Engine) -> None:
        self.asked, self.engine, self.scale = asked, engine, SCALES["shipped"]
        self.plain = build_workflow(0, self.scale)
        self.paths = [
            write_difference(folder / f"{n}.safetensors", self.plain.unet, n)
            for n in range(asked.batch)
        ]
        quality = maskfx.Quality.of("all-steps")
        self.quality = replace(quality, reuse="steps", refresh=1) if asked.dense else quality
        tiers = [maskfx.Tiers(host_bytes=asked.template_gib << 30) for _ in range(2)]
        own = copy.deepcopy(self.plain)
        self.pipe = maskfx.compile(own, quality="all-steps", tiers=tiers[0])
        merged = copy.deepcopy(self.plain)
        merge(merged.unet, self.paths[0])
        self.merged = maskfx.compile(merged, quality="all-steps", tiers=tiers[1])

    def call(self, number: int, masked: bool) -> dict[str, Any]:
        return call_of(self.plain, self.scale, number, self.asked.steps, masked)

    def ours(self, pipe: Any, adapters: Callable[[int], list[str] | None]) -> list[Any]:
        tickets = [
            self.engine.submit(
                pipe,
                **self.call(number, not self.asked.dense),
                quality=self.quality,
                adapters=adapters(number),
                output_type="latent",
            )
            for number in range(self.asked.batch)
        ]
        return [ticket.result().images for ticket in tickets]

    def serial(self, differences: bool) -> None:
        for number, path in enumerate(self.paths):
            before = merge(self.plain.unet, path) if differences else {}
            self.plain(**self.call(number, masked=True), output_type="latent")
            self.plain.unet.load_state_dict(before, strict=False)


def measure(asked: argparse.Namespace, folder: Path) -> dict[str, Any]:
    with maskfx.Engine() as engine:
        bed = Bed(asked, folder, engine)
        none: Callable[[int], list[str] | None] = lambda _: None  # noqa: E731 - of three
        own: Callable[[int], list[str] | None] = lambda n: [str(bed.paths[n])]  # noqa: E731
        same: Callable[[int], list[str] | None] = lambda _: [str(bed.paths[0])]  # noqa: E731
        sides: dict[str, Callable[[int], Any]] = {
            "none": lambda _: bed.ours(bed.pipe, none),
            "own": lambda _: bed.ours(bed.pipe, own),
            "same": lambda _: bed.ours(bed.pipe, same),
            "merged": lambda _: bed.ours(bed.merged, none),
            "serial": lambda _: bed.serial(True),
            "serial none": lambda _: bed.serial(False),
        }
        kept = {name: run(0) for name, run in sides.items()}
        first, wanted = kept["own"][0], kept["merged"][0]
        error = float((first - wanted).norm() / wanted.norm())
        busy: dict[str, list[float]] = {name: [] for name in sides}

        def counted(name: str) -> Callable[[int], None]:
            def run(number: int) -> None:
                began = harness.busy_seconds()
                sides[name](number)
                busy[name].append(harness.busy_seconds() - began)

            return run

        seconds = harness.alternate({name: counted(name) for name in sides}, asked.rounds)
        costs = maskfx.explain(bed.pipe)
        notes = [*pipeline_state_of(bed.pipe).notes, *pipeline_state_of(bed.merged).notes]
    written = [line for line in costs.splitlines() if "in the weights" in line]
    return {
        "seconds": {name: harness.figure(found) for name, found in seconds.items()},
        "processor_seconds": {name: harness.figure(found) for name, found in busy.items()},
        "times_none": {n: harness.ratio(f, busy["none"]) for n, f in busy.items()},
        "times_merged": {n: harness.ratio(f, busy["merged"]) for n, f in busy.items()},
        "faster_than_serial": {n: harness.ratio(busy["serial"], f) for n, f in busy.items()},
        "file_bytes": bed.paths[0].stat().st_size,
        "relative_error": error,
        "in_place": written,
        "notes": notes,  # such as templates that didn't fit: then edits record again
    }


def main(given: list[str]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--template-gib", type=int, default=6, help="memory of a side's templates")
    parser.add_argument("--dense", action="store_true", help="all sites, all steps")
    parser.add_argument("--out", type=Path, default=harness.ROOT / "bench" / "results")
    asked = parser.parse_args(given)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        found = measure(asked, Path(folder))
    sizes = {"steps": asked.steps, "batch": asked.batch, "dense": asked.dense}
    header = harness.header("bench.adapters.differences", given)
    ending = "-dense" if asked.dense else ""
    path = asked.out / f"adapters-differences{ending}.json"
    harness.write_json(path, {**header, **sizes, **found})
    rows = [["side", "processor s", "x none", "x merged", "times serial's pictures"]]
    for name, own in found["processor_seconds"].items():
        shares = [found[key][name]["median"] for key in ("times_none", "times_merged")]
        faster = found["faster_than_serial"][name]["median"]
        rows.append([name, f"{own['median']:.2f}", *(f"{s:.2f}" for s in shares), f"{faster:.2f}"])
    print(columns(rows))
    print(f"files of {found['file_bytes'] / 1e6:.1f} MB; error {found['relative_error']:.1e}")
    print("\n".join([*found["in_place"], *found["notes"]]))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
