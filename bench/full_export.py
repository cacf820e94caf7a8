"""Exports of denoisers at their real width and depth: seconds, memory, and bytes on disk.

    python -m bench.full_export --shape sdxl flux --format onnx

The weights are random and lie in a folder of safetensors files, in shards with an index, as
diffusers writes them. The module is on the meta device and is exported from that folder, in a
process of its own: it was never called, so that capture and passes are part of the seconds. With
--compare the capture is compared with the module at the example's size, as it is by default;
without, nothing is run. The graphs aren't compared (verify=False). Afterwards some bytes of every
weight of the ONNX graphs are compared with the source, outside of the time.

`anonymous` is the peak of the process's memory without mapped files, `resident` the peak with them.
Writes full-export-<shape>.json to --out; an entry is `onnx`, or `onnx compared` with --compare.
"""

from __future__ import annotations

import argparse
import json
import os
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
from maskfx.export.weight_files import WeightFiles

ASKED = "each export within 5 minutes and 24 GiB"
BLOCK = (1 << 26) + 9  # random numbers that are repeated over the files
SHARD = 5 << 30  # bytes of a file, about
SPOT = 64  # bytes that are compared at three places of each weight
NAMES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
SIZES = {  # of the example; the graphs' sizes are free
    "flux": shapes.Size(8, 8, 16),
    "sdxl": shapes.Size(16, 16, 16),
}
SHAPES = {
    one.name: replace(one, size=SIZES[one.name]) for one in shapes.FULL_DEPTH if one.name in SIZES
}
FORMATS = ("onnx", "pt2", "aoti")


def write_weights(module: nn.Module, dtype: torch.dtype, folder: Path) -> None:
    """Write random numbers for all parameters of a module on the meta device, in shards."""
    block = 0.02 * torch.randn(BLOCK, generator=torch.Generator().manual_seed(0))
    numbers: Any = block.to(dtype).view(torch.uint8).numpy()
    shards: list[dict[str, Tensor]] = [{}]
    for name, value in module.named_parameters():
        if sum(v.numel() for v in shards[-1].values()) * dtype.itemsize > SHARD:
            shards.append({})
        shards[-1][name] = value
    files = {f"model-{i:05}.safetensors": shard for i, shard in enumerate(shards)}
    begin = 0  # in the block, which is repeated over all files
    for file, shard in files.items():
        begin = write_shard(folder / file, shard, dtype, numbers, begin)
    places = {name: file for file, shard in files.items() for name in shard}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))


def write_shard(
    path: Path, shard: dict[str, Tensor], dtype: torch.dtype, numbers: Any, begin: int
) -> int:
    """Write one safetensors file; return where in the numbers the next one begins."""
    header, place = {}, 0
    for name, value in shard.items():
        end = place + value.numel() * dtype.itemsize
        header[name] = {
            "dtype": NAMES[dtype],
            "shape": list(value.shape),
            "data_offsets": [place, end],
        }
        place = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        while place:
            count = file.write(numbers[begin : begin + place])
            place, begin = place - count, (begin + count) % len(numbers)
    return begin


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


def exported(
    shape: shapes.Shape, kind: str, dtype: torch.dtype, weights: Path, compare: bool
) -> dict[str, Any]:
    """Export in this process."""
    load, module = os.getloadavg()[0], on_meta(shape)
    inputs = pytree.tree_map_only(
        Tensor, lambda v: v.to(dtype) if v.is_floating_point() else v, shape.inputs(0)
    )
    memory = Memory()
    memory.start()
    with tempfile.TemporaryDirectory(dir=weights.parent) as folder, torch.no_grad():
        wall, cpu = time.perf_counter(), time.process_time()
        out = Path(folder) / "exported"
        found = maskfx.export(
            module,
            out,
            format=kind,
            example_inputs=inputs,
            weights=weights,
            compare=compare,
            verify=False,
        )
        seconds = {"wall": time.perf_counter() - wall, "cpu": time.process_time() - cpu}
        memory.ended.set()
        memory.join()
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        files = {file.name: file.stat().st_size for file in sorted(out.iterdir())}
        checked = same_weights(out, weights) if kind == "onnx" else None
    [times] = found.times.values()
    return {
        "load_at_start": round(load, 2),
        "seconds": seconds,
        "parts": {"wall": times.wall, "cpu": times.cpu},
        "anonymous": memory.peak,
        "resident": peak,
        "not_compared": found.not_compared["denoiser"],
        "weights_with_the_source's_bytes": checked,
        "files": files,
    }


def same_weights(out: Path, weights: Path) -> dict[str, int]:
    """Return, by graph, how many large weights have the bytes of one in the source: all of them."""
    import onnx

    held = set()
    for value in WeightFiles(weights).tensors.values():
        data = value.reshape(-1).view(torch.uint8)
        held.add((tuple(value.shape), *(bytes(data[n : n + SPOT].numpy()) for n in spots(data))))
    counts = {}
    for path in sorted(out.glob("*.onnx")):
        counts[path.stem] = 0
        for one in onnx.load(path, load_external_data=False).graph.initializer:
            place = {entry.key: entry.value for entry in one.external_data}
            if int(place.get("length", 0)) < 1 << 20:
                continue
            data = torch.from_file(
                str(out / place["location"]),
                shared=False,
                size=int(place["offset"]) + int(place["length"]),
                dtype=torch.uint8,
            )[int(place["offset"]) :]
            key = (tuple(one.dims), *(bytes(data[n : n + SPOT].numpy()) for n in spots(data)))
            assert key in held, f"{path.name}: {one.name} has other bytes than every weight"
            counts[path.stem] += 1
    return counts


def spots(data: Tensor) -> tuple[int, ...]:
    """Return the first bytes of the places that are compared."""
    return 0, len(data) // 2, max(len(data) - SPOT, 0)


def in_process(shape: str, kind: str, options: argparse.Namespace, weights: Path) -> dict[str, Any]:
    command = [sys.executable, "-m", "bench.full_export", "--shape", shape, "--format", kind]
    command += ["--dtype", options.dtype, "--weights", str(weights)]
    command += ["--compare"] * options.compare
    done = subprocess.run(command, capture_output=True, text=True, cwd=harness.ROOT, check=False)
    if done.returncode:
        raise RuntimeError(f"{shape} as {kind}: {done.stderr[-2000:]}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def line(shape: str, kind: str, own: dict[str, Any]) -> str:
    seconds, gib = own["seconds"], 2.0**30
    parts = ", ".join(f"{part} {wall:.0f} s" for part, wall in own["parts"]["wall"].items())
    return (
        f"{shape} as {kind}: {seconds['wall']:.0f} s ({seconds['cpu']:.0f} s of CPU; {parts}), "
        f"{own['anonymous'] / gib:.1f} GiB anonymous, {own['resident'] / gib:.1f} GiB resident, "
        f"{sum(own['files'].values()) / 1e9:.1f} GB on disk"
    )


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", nargs="+", default=list(SHAPES), choices=sorted(SHAPES))
    parser.add_argument("--format", nargs="+", default=["onnx"], choices=FORMATS)
    parser.add_argument("--dtype", default="bfloat16", choices=("float32", "bfloat16", "float16"))
    parser.add_argument("--folder", type=Path, help="where there is room for weights and graphs")
    parser.add_argument("--weights", type=Path, help="export in this process, from this folder")
    parser.add_argument("--compare", action="store_true", help="compare the capture, as by default")
    parser.add_argument("--out", type=Path, default=harness.ROOT / "bench" / "results")
    options = parser.parse_args(arguments)
    dtype = getattr(torch, options.dtype)
    if options.weights is not None:
        shape = SHAPES[options.shape[0]]
        kind, compare = options.format[0], options.compare
        print(json.dumps(exported(shape, kind, dtype, options.weights, compare)))
        return 0
    for name in options.shape:
        shape, module = SHAPES[name], on_meta(SHAPES[name])
        path = options.out / f"full-export-{name}.json"
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
            weights.mkdir()
            write_weights(module, dtype, weights)
            for kind in options.format:
                own = in_process(name, kind, options, weights)
                result["formats"][f"{kind} compared" if options.compare else kind] = own
                print(line(name, kind, own), flush=True)
        if path.exists():  # entries of other runs stay
            before = json.loads(path.read_text())
            known = before["formats"] if before["dtype"] == options.dtype else {}
            result["formats"] = {**known, **result["formats"]}
        harness.write_json(path, result)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
