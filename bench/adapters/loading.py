"""What loading two LoRA files from a slow store adds to a request, and what patching them costs.

    python -m bench.adapters.loading

A request of the shipped UNet computes all sites at 25 steps, and each of two files takes a second
to read. The sides:

- `none`: without LoRAs.
- `resident`: both files are in memory already.
- `late`: neither is; the request begins without them, and they act from step 10 on (`--start`).
- `strict`: neither is; the request waits before its first step.
- `plain`: diffusers without LoRAs.
- `serial`: diffusers' way, one file after the other before the run: read, converted, and put into
  the layers; with `load_lora_weights` where peft is installed, else with the weights merged, which
  takes less than creating peft's layers.
- `hotswap`: diffusers' way with `hotswap=True`, if peft is installed: each file is written into
  peft's layers, which stay in the model.

Every round runs all sides, in a changing order; an overhead is a ratio to `none`, or to `plain` for
`serial` and `hotswap`, in the same round.
`late` is also run with other speeds of the store: its latents must be equal bit for bit. `least` is
the overhead that remains if loading beside the steps and the adapters themselves cost nothing: the
steps before `--start` hide no more of the store's seconds than they take. Of a load that nothing
delays, the seconds until it is there and the processor seconds of the loading processes are
measured too. Katz's equations 1 and 2, from measured parts, stand beside the result
(bench/adapters/latency_model.py). Writes adapters-loading.json to bench/results, with another
`--start` or `--side` adapters-loading-START-SIDE.json.
"""

from __future__ import annotations

import argparse
import copy
import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import maskfx
from bench.adapters.latency_model import line, measured, seconds_of
from bench.adapters.store import read, slow_down
from bench.harness import ROOT, alternate, figure, header, ratio, write_json
from bench.report import columns
from maskfx.pipelines.adapters.lora_files import LoraTarget, converted
from maskfx.runtime.lora.adapter import WeightedLayers
from maskfx.runtime.lora.files import FileLimits
from maskfx.runtime.lora.patch import patched
from maskfx.serve.models.model_source import load_pipeline

NAMES = ("one", "two")
RANK = 16
START = 10  # step from which on the files act
SIDE = 256  # of the picture
PEFT = find_spec("peft") is not None
PLAIN = ("plain", "serial", "hotswap")  # sides without maskfx
WANTED = {"late": 1.05, "serial": 1.80}


def write_files(folder: Path, unet: nn.Module) -> list[Path]:
    """Two files with random updates of all attention layers."""
    paths = []
    for seed, name in enumerate(NAMES):
        draw, tensors = torch.Generator().manual_seed(seed), dict[str, Tensor]()
        for layer, own in unet.named_modules():
            if isinstance(own, nn.Linear) and ".attn" in layer:
                outputs, inputs = own.weight.shape
                down, up = (
                    torch.randn(s, generator=draw) for s in ((RANK, inputs), (outputs, RANK))
                )
                tensors[f"unet.{layer}.lora_A.weight"] = down
                tensors[f"unet.{layer}.lora_B.weight"] = 0.01 * up
        save_file(tensors, folder / f"{name}.safetensors")
        paths.append(folder / f"{name}.safetensors")
    return paths


def processor_seconds(pids: Sequence[int]) -> float:
    """Processor seconds of these processes so far."""
    fields = (Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split() for pid in pids)
    return sum(sum(map(int, own[11:13])) for own in fields) / os.sysconf("SC_CLK_TCK")


def arguments(steps: int, side: int) -> dict[str, Any]:
    return {
        "prompt": "a red ball",
        "image": Image.new("RGB", (side, side), (128, 128, 128)),
        "mask_image": Image.new("L", (side, side), 255),
        "num_inference_steps": steps,
        "strength": 1.0,
        "height": side,
        "width": side,
        "generator": torch.Generator().manual_seed(0),
        "output_type": "latent",
    }


class Bed:
    """The pipelines, and one request of each side."""

    def __init__(self, folder: Path, steps: int, side: int, start: int) -> None:
        self.steps, self.side, self.start = steps, side, start
        self.plain = load_pipeline("unet", "float32", "cpu")
        self.paths = write_files(folder, self.plain.unet)
        self.swapping = copy.deepcopy(self.plain)  # in it peft's layers stay
        own = copy.deepcopy(self.plain)
        self.adapters = maskfx.Adapters(read="bench.adapters.store:read")
        self.pipe = maskfx.compile(own, quality="all-steps", adapters=self.adapters)
        quality = maskfx.Quality.of("all-steps")
        self.quality = replace(quality, reuse="steps", refresh=1)  # every step computes all sites

    def run(self, lora: Any = None) -> Tensor:
        given = arguments(self.steps, self.side)
        found: Tensor = self.pipe(**given, quality=self.quality, lora=lora).images
        return found

    def adapted(self, start: int, keep: bool = False) -> Tensor:
        """Run with both files, which are in memory only if they are kept."""
        for name, path in zip(NAMES, self.paths, strict=True):
            if name in self.adapters and not keep:
                self.adapters.remove(name)
            self.adapters.register(name, path, start=start)
        return self.run(list(NAMES))

    def serial(self) -> Tensor:
        """Run diffusers' own pipeline, after loading one file after the other."""
        given, pipe = arguments(self.steps, self.side), self.plain
        if PEFT:
            for name, path in zip(NAMES, self.paths, strict=True):
                read(str(path))
                pipe.load_lora_weights(load_file(path), adapter_name=name)
            pipe.set_adapters(list(NAMES))
            found: Tensor = pipe(**given).images
            pipe.unload_lora_weights()
            return found
        with patched(pipe.unet, [self.read(path) for path in self.paths]):
            return pipe(**given).images  # type: ignore[no-any-return]

    def swapped(self) -> Tensor:
        """Run diffusers' own pipeline, whose layers of peft get one file after the other."""
        pipe = self.swapping
        for name, path in zip(NAMES, self.paths, strict=True):
            read(str(path))
            known = name in pipe.get_list_adapters().get("unet", ())
            pipe.load_lora_weights(load_file(path), adapter_name=name, hotswap=known)
        pipe.set_adapters(list(NAMES))
        found: Tensor = pipe(**arguments(self.steps, self.side)).images
        return found

    def read(self, path: Path) -> WeightedLayers:
        read(str(path))
        target = LoraTarget.of(self.plain)
        adapter = converted(path.name, load_file(path), {}, target, FileLimits())
        return WeightedLayers(adapter.parts["unet"], 1.0, adapter.digest)

    def loads(self) -> tuple[float, float]:
        """Seconds until both files are loaded from a quick store, and the processes' own."""
        self.slow_down(0.0)
        target = LoraTarget.of(self.plain)
        for name, path in zip(NAMES, self.paths, strict=True):
            if name in self.adapters:
                self.adapters.remove(name)
            self.adapters.register(name, path)
        pids = [child.pid for child in self.adapters._loader._idle]
        busy, began = processor_seconds(pids), time.perf_counter()
        known = [self.adapters.get(name) for name in NAMES]
        leases = [self.adapters.acquire(k, target.fields, target.kind_digest) for k in known]
        for lease in leases:
            lease.wait(None)
        took = time.perf_counter() - began
        for lease in leases:
            lease.release()
        return took, processor_seconds(pids) - busy

    def model(self) -> dict[str, Any]:
        """Katz's equations, from the parts of a request of diffusers; files come from the store."""
        parts = measured(self.plain, lambda: arguments(self.steps, self.side), [], self.paths)
        loads = [seconds_of(partial(self.read, path)) for path in self.paths]
        return replace(parts, lora_load=loads).report()

    def patching(self) -> float:
        """Seconds of writing both files' updates into the weights, and taking them out."""
        updates = [self.read(path) for path in self.paths]
        began = time.perf_counter()
        with patched(self.plain.unet, updates):
            pass
        return time.perf_counter() - began

    def equal_for_any_store(self) -> bool:
        """Return whether the latents are equal bit for bit at other speeds of the store."""
        found = []
        for seconds in (0.0, 0.2, 1.5):
            self.slow_down(seconds)
            found.append(self.adapted(self.start))
        return all(torch.equal(found[0], other) for other in found[1:])

    def slow_down(self, seconds: float) -> None:
        for path in self.paths:
            slow_down(path, seconds)


def main(given: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--steps", type=int, default=25)
    parser.add_argument("--start", type=int, default=START)
    parser.add_argument("--side", type=int, default=SIDE)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--sides", nargs="+", help="by default all")
    parser.add_argument("--seconds", type=float, default=1.0, help="of one file")
    parser.add_argument("--out", type=Path, default=ROOT / "bench" / "results")
    asked = parser.parse_args(given)
    with tempfile.TemporaryDirectory() as name:
        bed = Bed(Path(name), asked.steps, asked.side, asked.start)
        bed.slow_down(asked.seconds)
        sides: dict[str, Callable[[int], Any]] = {
            "none": lambda _: bed.run(),
            "resident": lambda _: bed.adapted(0, keep=True),
            "late": lambda _: bed.adapted(asked.start),
            "strict": lambda _: bed.adapted(0),
            "plain": lambda _: bed.plain(**arguments(asked.steps, asked.side)),
            "serial": lambda _: bed.serial(),
        }
        if PEFT:
            sides["hotswap"] = lambda _: bed.swapped()
        sides = {name: run for name, run in sides.items() if name in (asked.sides or sides)}
        for side in sides.values():  # captures, and starts the loading processes
            side(0)
        times = alternate(sides, asked.rounds)
        model = bed.model()
        loads = [bed.loads() for _ in range(asked.rounds)]
        patching = [bed.patching() for _ in range(asked.rounds)]
        same = bed.equal_for_any_store()
        bed.adapters.close()
    result = {
        **header("bench.adapters.loading", given),
        "peft": PEFT,
        "seconds": {side: figure(own) for side, own in times.items()},
        "times_none": {
            side: ratio(own, times["plain" if side in PLAIN else "none"])
            for side, own in times.items()
            if ("plain" if side in PLAIN else "none") in times
        },
        "patch_seconds": figure(patching),
        "load_seconds": figure([took for took, _ in loads]),
        "load_processor_seconds": figure([busy for _, busy in loads]),
        "wanted": WANTED,
        "equal_for_any_store": same,
        **model,
    }
    if "none" in times:
        none = result["seconds"]["none"]["median"]
        hidden = asked.start * none / asked.steps
        result["least"] = 1 + max(0.0, asked.seconds - hidden) / none
    rows = [["side", "seconds", "x none"]]
    for side, own in result["seconds"].items():
        share = result["times_none"][side]["median"]
        rows.append([side, f"{own['median']:.3f}", f"{share:.3f}"])
    print(columns(rows))
    print(f"patching and un-patching two files: {result['patch_seconds']['median']:.4f} s")
    print(
        f"both loaded after {result['load_seconds']['median']:.3f} s from a quick store, with "
        f"{result['load_processor_seconds']['median']:.3f} processor seconds"
    )
    print(f"least overhead of late: {result.get('least', 0.0):.3f}")
    print(f"equal bits for any store: {same}")
    print(line(model))
    ending = "" if asked.start == START else f"-{asked.start}"
    ending += "" if asked.side == SIDE else f"-{asked.side}"
    write_json(asked.out / f"adapters-loading{ending}.json", result)
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
