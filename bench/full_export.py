"""Exports of denoisers at their real width and depth: seconds, memory, and bytes on disk.

    python -m bench.full_export --shape sdxl flux --format onnx pt2

The weights are random and lie in one file, which the module maps, so that its memory is that of
the system's page cache and not of the process. Each export runs in a process of its own, and
begins with a module that was never called: capture and passes are part of its seconds, and so is
the comparison of the capture with the module at a small size. The graphs aren't compared
(verify=False).

`anonymous` is the peak of the process's memory without mapped files, `resident` the peak with them.
Writes full-export-<shape>.json to --out.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import maskfx
from bench import harness, shapes

ASKED = "each export within 5 minutes and 24 GiB"
ALIGNED = 64  # bytes, between weights of the file
BLOCK = 1 << 26  # random numbers that are repeated over the file
SIZES = {  # of the example; the graphs' sizes are free
    "flux": shapes.Size(8, 8, 16),
    "sdxl": shapes.Size(16, 16, 16),
}
SHAPES = {
    one.name: replace(one, size=SIZES[one.name]) for one in shapes.FULL_DEPTH if one.name in SIZES
}
FORMATS = ("onnx", "pt2", "aoti")


def sizes_of(module: nn.Module, dtype: torch.dtype) -> dict[str, tuple[int, int]]:
    """Where each parameter lies in the file, in numbers of the dtype: first and count."""
    found, place, step = {}, 0, ALIGNED // dtype.itemsize
    for name, value in module.named_parameters():
        found[name] = place, value.numel()
        place += -(-value.numel() // step) * step
    return found


def write_weights(module: nn.Module, dtype: torch.dtype, path: Path) -> None:
    """Write random numbers for all parameters of a module on the meta device."""
    places = sizes_of(module, dtype).values()
    count = max(first + own for first, own in places)
    block = 0.02 * torch.randn(min(BLOCK, count), generator=torch.Generator().manual_seed(0))
    data: Any = block.to(dtype).view(torch.uint8).numpy()
    left = count * dtype.itemsize
    with path.open("wb") as file:
        while left:
            left -= file.write(data[:left])


def mapped(module: nn.Module, dtype: torch.dtype, path: Path) -> nn.Module:
    """The module with the file's numbers as its parameters."""
    count = path.stat().st_size // dtype.itemsize
    held = torch.from_file(str(path), shared=False, size=count, dtype=dtype)
    places = sizes_of(module, dtype)
    state: dict[str, Tensor] = {
        name: held[places[name][0] :][: places[name][1]].view(value.shape)
        for name, value in module.named_parameters()
    }
    module.load_state_dict(state, strict=False, assign=True)
    assert not any(value.is_meta for value in module.parameters())
    return module.eval().requires_grad_(False)


def on_meta(shape: shapes.Shape) -> nn.Module:
    with torch.device("meta"):
        return shape.build()


class Memory(threading.Thread):
    """Watches the anonymous memory of this process."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.peak, self.ended = 0, threading.Event()

    def run(self) -> None:
        while not self.ended.wait(0.05):
            self.peak = max(self.peak, harness.resident("RssAnon"))


def exported(shape: shapes.Shape, kind: str, dtype: torch.dtype, weights: Path) -> dict[str, Any]:
    """Export in this process."""
    module = mapped(on_meta(shape), dtype, weights)
    inputs = pytree.tree_map_only(
        Tensor, lambda v: v.to(dtype) if v.is_floating_point() else v, shape.inputs(0)
    )
    memory = Memory()
    memory.start()
    with tempfile.TemporaryDirectory(dir=weights.parent) as folder, torch.no_grad():
        wall, cpu = time.perf_counter(), time.process_time()
        out = Path(folder) / "exported"
        maskfx.export(module, out, format=kind, example_inputs=inputs, verify=False)
        seconds = {"wall": time.perf_counter() - wall, "cpu": time.process_time() - cpu}
        files = {file.name: file.stat().st_size for file in sorted(out.iterdir())}
    memory.ended.set()
    memory.join()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return {"seconds": seconds, "anonymous": memory.peak, "resident": peak, "files": files}


def in_process(shape: str, kind: str, options: argparse.Namespace, weights: Path) -> dict[str, Any]:
    command = [sys.executable, "-m", "bench.full_export", "--shape", shape, "--format", kind]
    command += ["--dtype", options.dtype, "--weights", str(weights)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=harness.ROOT, check=False)
    if done.returncode:
        raise RuntimeError(f"{shape} as {kind}: {done.stderr[-2000:]}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def line(shape: str, kind: str, own: dict[str, Any]) -> str:
    seconds, gib = own["seconds"], 2.0**30
    return (
        f"{shape} as {kind}: {seconds['wall']:.0f} s ({seconds['cpu']:.0f} s of CPU), "
        f"{own['anonymous'] / gib:.1f} GiB anonymous, {own['resident'] / gib:.1f} GiB resident, "
        f"{sum(own['files'].values()) / 1e9:.1f} GB on disk"
    )


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", nargs="+", default=list(SHAPES), choices=sorted(SHAPES))
    parser.add_argument("--format", nargs="+", default=["onnx", "pt2"], choices=FORMATS)
    parser.add_argument("--dtype", default="bfloat16", choices=("float32", "bfloat16", "float16"))
    parser.add_argument("--folder", type=Path, help="where there is room for weights and graphs")
    parser.add_argument("--weights", type=Path, help="export in this process, from this file")
    parser.add_argument("--out", type=Path, default=harness.ROOT / "bench" / "results")
    options = parser.parse_args(arguments)
    dtype = getattr(torch, options.dtype)
    if options.weights is not None:
        shape = SHAPES[options.shape[0]]
        print(json.dumps(exported(shape, options.format[0], dtype, options.weights)))
        return 0
    for name in options.shape:
        shape, module = SHAPES[name], on_meta(SHAPES[name])
        result: dict[str, Any] = {
            **harness.header("bench.full_export", arguments),
            "asked": ASKED,
            "title": shape.title,
            "dtype": options.dtype,
            "parameters": sum(value.numel() for value in module.parameters()),
            "formats": {},
        }
        with tempfile.TemporaryDirectory(dir=options.folder) as folder:
            weights = Path(folder) / "weights"
            write_weights(module, dtype, weights)
            for kind in options.format:
                own = in_process(name, kind, options, weights)
                result["formats"][kind] = own
                print(line(name, kind, own), flush=True)
        harness.write_json(options.out / f"full-export-{name}.json", result)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
