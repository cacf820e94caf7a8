"""Exported graphs against eager diffusers and against the compiled denoiser, in one process run.

    OMP_NUM_THREADS=1 python -m bench.export --threads 1

One denoiser is compiled, compiled with Inductor, and exported as ONNX and as a package of
AOTInductor. Per mask ratio each side runs the same edit of the same recording; m = 1 computes all
sites. The module itself is the baseline. `of eager` is a side's ratio to the module as a share of
the ratio that maskfx has operator by operator. Also written: the bytes of each file, the seconds
of each export, the error of each edit against the module. Writes bench/results/export-SHAPE.json.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import maskfx
from bench import harness, masks, shapes
from bench.report import columns, milliseconds, times
from maskfx.export.denoiser import ExportedDenoiser
from maskfx.export.exporter import export

RATIOS = (0.05, 0.11, 0.2, 0.35, 1.0)
FORMATS = ("onnx", "aoti")
SMALL: dict[str, Any] = {"num_layers": 1, "num_single_layers": 2}
FULL_WIDTH = replace(shapes.FLUX, title="Flux at full width", size=shapes.Size(32, 32, 512))


class Bed:
    """One module and its sides: compiled, with Inductor, and exported in each format."""

    def __init__(self, shape: shapes.Shape, folder: Path) -> None:
        self.shape, self.module, self.inputs = shape, shape.build(), shape.inputs(0)
        self.seconds: dict[str, float] = {}
        self.bytes: dict[str, dict[str, int]] = {}
        compiled = maskfx.compile(self.module)
        self.recording = compiled.record(**self.inputs)[1]
        self.sides: dict[str, maskfx.CompiledDenoiser] = {
            "maskfx eager": compiled,
            "maskfx inductor": maskfx.compile(self.module, inductor=True),
        }
        for kind in FORMATS:
            path, began = folder / kind, time.perf_counter()
            export(compiled, path, format=kind, part="masked", verify=False)
            self.seconds[kind] = time.perf_counter() - began
            files = [file for file in sorted(path.iterdir()) if file.is_file()]
            self.bytes[kind] = {file.name: file.stat().st_size for file in files}
            self.sides[kind] = ExportedDenoiser(self.module, path, compares=False)

    def runs(self, mask: Tensor) -> dict[str, Callable[[int], Any]]:
        """What each side computes of an edit."""
        step = maskfx.EditStep(self.inputs, mask, self.recording)
        return {
            "module": lambda _: self.module(**self.inputs),
            **{name: lambda _, d=side: d.edit([step])[0] for name, side in self.sides.items()},  # type: ignore[misc]
        }

    def measure(self, grid: Tensor, rounds: int) -> dict[str, Any]:
        """All sides of one mask, in alternation."""
        runs = self.runs(self.shape.as_mask(grid))
        results = {name: first_tensor(run(0)) for name, run in runs.items()}  # warm, too
        seconds = harness.alternate(runs, rounds)
        wanted = results["module"]
        eager = harness.ratio(seconds["module"], seconds["maskfx eager"])["median"]
        rows = {}
        for name in self.sides:
            faster = harness.ratio(seconds["module"], seconds[name])
            rows[name] = {
                "seconds": harness.figure(seconds[name]),
                "faster_than_module": faster,
                "of_eager": faster["median"] / eager,
                "error": float((results[name] - wanted).norm() / wanted.norm()),
            }
        module = harness.figure(seconds["module"])
        return {"masked": float(grid.float().mean()), "module_seconds": module, "sides": rows}


def first_tensor(output: Any) -> Tensor:
    """The picture in what a call gives back."""
    while not isinstance(output, Tensor):
        output = output[0]
    return output


def choose(name: str, quick: bool) -> shapes.Shape:
    """A shape of the benches, or Flux at full width, which `--small` makes short enough."""
    return FULL_WIDTH if name == FULL_WIDTH.name else shapes.choose(name, quick)


def small(shape: shapes.Shape) -> shapes.Shape:
    """The shape with few layers, so that all exports take minutes at most."""
    fewer = {name: n for name, n in SMALL.items() if name in shape.config}
    changed = ", ".join(f"{name} {n}" for name, n in fewer.items())
    return replace(
        shape,
        config={**shape.config, **fewer},
        name=f"{shape.name}-small",
        title=f"{shape.title}; with fewer layers: {changed}",
    )


def table(result: Mapping[str, Any]) -> str:
    rows = [["m", "side", "ms", "x module", "of eager", "error"]]
    for mask in result["masks"]:
        rows.append(
            [f"{mask['masked']:.2f}", "module", milliseconds(mask["module_seconds"]), "", "", ""]
        )
        for name, own in mask["sides"].items():
            faster, share = times(own["faster_than_module"]), f"{own['of_eager']:.0%}"
            error = f"{own['error']:.1e}"
            rows.append(["", name, milliseconds(own["seconds"]), faster, share, error])
    lines = [columns(rows), ""]
    for kind, seconds in result["export_seconds"].items():
        held = sum(result["bytes"][kind].values()) / 1e6
        lines.append(f"{kind}: exported in {seconds:.1f} s, {held:.1f} MB")
    return "\n".join(lines)


def weights_of(module: nn.Module) -> int:
    return sum(weight.nbytes for weight in module.parameters())


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", default="c", choices=[*shapes.SHAPES, FULL_WIDTH.name])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--small", action="store_true", help="few layers: minutes, not an hour")
    parser.add_argument("--quick", action="store_true", help="a tiny shape, two rounds")
    parser.add_argument("--out", type=Path, default=harness.ROOT / "bench" / "results")
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    shape = choose(options.shape, options.quick)
    shape = small(shape) if options.small else shape
    with torch.no_grad(), tempfile.TemporaryDirectory() as folder:
        bed = Bed(shape, Path(folder))
        result: dict[str, Any] = {
            **harness.header("bench.export", arguments),
            "shape": shape.name,
            "title": shape.title,
            "weights_bytes": weights_of(bed.module),
            "export_seconds": bed.seconds,
            "bytes": bed.bytes,
            "rounds": 2 if options.quick else options.rounds,
            "masks": [],
        }
        for ratio in RATIOS:
            grid = masks.make("square", shape.size.height, shape.size.width, ratio)
            result["masks"].append(bed.measure(grid, result["rounds"]))
    print(table(result))
    harness.write_json(options.out / f"export-{shape.name}.json", result)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
