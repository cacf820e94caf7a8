"""LoRA files of a few hundred MB for SDXL's UNet at its full width: loading and patching them.

    OMP_NUM_THREADS=1 python -m bench.adapters.file_sizes

Two files hold updates of rank 128 of all attention layers, in 16 bits, and each read of one takes a
second longer than the disk needs, as from a store. The UNet is a pipeline's, in bfloat16, with
zeros for weights. Measured in each round, in a changing order:

- `loaded`: seconds until `maskfx.Adapters` has both files, which its processes read and convert
  meanwhile, and the processor seconds of this process and of those.
- `patched`, `taken out`: writing both files' updates into the UNet's weights, and restoring them.
- `diffusers`: one file after the other, `load_lora_weights` and in the end `unload_lora_weights`.
- `hotswap`: the same with `hotswap=True` into layers that stay; only where peft is installed.
- `step`: one step of the UNet with guidance, 64x64 latent, as a scale.

`added` is what each way adds to a request of 25 such steps, in percent of them: for ours what the
request's own thread spends while the files load beside its steps, and patching; a load beside the
steps takes processor seconds from them where no core is idle, which `busy` counts. The weights
after taking out must be equal bit for bit. Writes adapters-file-sizes.json to bench/results.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import diffusers
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import maskfx
from bench import shapes
from bench.adapters.loading import NAMES, PEFT, processor_seconds
from bench.adapters.store import read, slow_down
from bench.harness import ROOT, figure, header, write_json
from bench.report import columns
from maskfx.pipelines.adapters.lora_files import LoraTarget
from maskfx.runtime.lora.adapter import WeightedLayers
from maskfx.runtime.lora.patch import WeightPatch

RANK, STEPS, LATENT = 128, 25, 64
DTYPE = torch.bfloat16


def unet() -> Any:
    """SDXL's UNet at full width and depth, whose weights are zeros."""
    shape = next(shape for shape in shapes.FULL_DEPTH if shape.name == "sdxl")
    with torch.device("meta"):
        made = getattr(diffusers, shape.class_name)(**shape.config)
    made = made.to(DTYPE).to_empty(device="cpu").eval().requires_grad_(False)
    for tensor in (*made.parameters(), *made.buffers()):
        tensor.zero_()
    return made


def pipeline(net: nn.Module) -> Any:
    parts: Any = dict.fromkeys(
        ("vae", "text_encoder", "text_encoder_2", "tokenizer", "tokenizer_2")
    )
    scheduler: Any = diffusers.EulerDiscreteScheduler()
    return diffusers.StableDiffusionXLPipeline(unet=net, scheduler=scheduler, **parts)


def write_file(path: Path, net: nn.Module, seed: int) -> None:
    """Random updates of all attention layers, as diffusers names them."""
    draw, tensors = torch.Generator().manual_seed(seed), dict[str, Tensor]()
    for name, own in net.named_modules():
        if isinstance(own, nn.Linear) and ".attn" in name:
            outputs, inputs = own.weight.shape
            down, up = (torch.randn(s, generator=draw) for s in ((RANK, inputs), (outputs, RANK)))
            tensors[f"unet.{name}.lora_A.weight"] = down.half()
            tensors[f"unet.{name}.lora_B.weight"] = (0.01 * up).half()
    save_file(tensors, path)


class Bed:
    def __init__(self, folder: Path, seconds: float) -> None:
        self.net = unet()
        self.pipe = pipeline(self.net)
        self.paths = [folder / f"{name}.safetensors" for name in NAMES]
        for seed, path in enumerate(self.paths):
            write_file(path, self.net, seed)
            slow_down(path, seconds)
        self.target = LoraTarget.of(self.pipe)
        self.adapters = maskfx.Adapters(read="bench.adapters.store:read")
        self.swapping: Any = None

    def loaded(self) -> tuple[dict[str, float], list[WeightedLayers]]:
        """Load both files at the same time, as a request does while its first steps run."""
        for name, path in zip(NAMES, self.paths, strict=True):
            if name in self.adapters:
                self.adapters.remove(name)
            self.adapters.register(name, path)
        pids = [child.pid for child in self.adapters._loader._idle]
        before, own, began = processor_seconds(pids), time.process_time(), time.perf_counter()
        known = [self.adapters.get(name) for name in NAMES]
        leases = [
            self.adapters.acquire(k, self.target.fields, self.target.kind_digest) for k in known
        ]
        for lease in leases:
            lease.wait(None)
        found = [lease.adapter() for lease in leases]
        spent = {
            "seconds": time.perf_counter() - began,
            "own": time.process_time() - own,
            "busy": processor_seconds(pids) - before,
        }
        updates = [WeightedLayers(one.parts["unet"], 1.0, one.digest) for one in found]
        for lease in leases:
            lease.release()
        return spent, updates

    def patched(self, updates: list[WeightedLayers]) -> tuple[float, float]:
        patch = WeightPatch(self.net)
        began = time.perf_counter()
        patch.apply(updates)
        written = time.perf_counter()
        patch.remove()
        return written - began, time.perf_counter() - written

    def plain(self) -> float:
        """Load both files as diffusers does, and unload them."""
        began = time.perf_counter()
        for name, path in zip(NAMES, self.paths, strict=True):
            read(str(path))
            self.pipe.load_lora_weights(load_file(path), adapter_name=name)
        self.pipe.set_adapters(list(NAMES))
        self.pipe.unload_lora_weights()
        return time.perf_counter() - began

    def swapped(self) -> float:
        """Load both files into layers that are there."""
        began = time.perf_counter()
        for name, path in zip(NAMES, self.paths, strict=True):
            read(str(path))
            self.pipe.load_lora_weights(load_file(path), adapter_name=name, hotswap=True)
        self.pipe.set_adapters(list(NAMES))
        return time.perf_counter() - began

    def swapping_layers(self) -> None:
        for name, path in zip(NAMES, self.paths, strict=True):
            self.pipe.load_lora_weights(load_file(path), adapter_name=name)

    def step(self) -> float:
        config = self.net.config
        given = {
            "sample": torch.zeros(2, config.in_channels, LATENT, LATENT, dtype=DTYPE),
            "timestep": torch.tensor(500),
            "encoder_hidden_states": torch.zeros(2, 77, config.cross_attention_dim, dtype=DTYPE),
            "added_cond_kwargs": {
                "text_embeds": torch.zeros(2, 1280, dtype=DTYPE),
                "time_ids": torch.zeros(2, 6, dtype=DTYPE),
            },
        }
        began = time.perf_counter()
        with torch.no_grad():
            self.net(**given)
        return time.perf_counter() - began


def main(given: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=1.0, help="of one file, besides the disk")
    parser.add_argument("--out", type=Path, default=ROOT / "bench" / "results")
    asked = parser.parse_args(given)
    spent: dict[str, list[float]] = {}

    def note(name: str, value: float) -> None:
        spent.setdefault(name, []).append(value)

    with tempfile.TemporaryDirectory() as folder:
        bed = Bed(Path(folder), asked.seconds)
        size = bed.paths[0].stat().st_size
        originals = [p.clone() for n, p in bed.net.named_parameters() if ".attn" in n]
        bed.loaded()  # starts the loading processes

        def ours() -> None:
            times, updates = bed.loaded()
            for name, value in times.items():
                note({"seconds": "loaded"}.get(name, name), value)
            written, out = bed.patched(updates)
            note("patched", written)
            note("taken out", out)

        def theirs(name: str, run: Callable[[], float]) -> None:
            note(name, run())

        sides: list[Callable[[], None]] = [ours, lambda: theirs("step", bed.step)]
        if PEFT:
            sides.append(partial(theirs, "diffusers", bed.plain))
        for number in range(asked.rounds):
            for side in sides if number % 2 == 0 else sides[::-1]:
                side()
        after = [p for n, p in bed.net.named_parameters() if ".attn" in n]
        same = all(torch.equal(a, b) for a, b in zip(originals, after, strict=True))
        if PEFT:
            bed.swapping_layers()
            for _ in range(asked.rounds):
                theirs("hotswap", bed.swapped)
        bed.adapters.close()
    seconds = {name: figure(own) for name, own in spent.items()}
    request = STEPS * seconds["step"]["median"]
    middle = {name: own["median"] for name, own in seconds.items()}
    added = {"maskfx": middle["own"] + middle["patched"] + middle["taken out"]}
    added |= {name: middle[name] for name in ("diffusers", "hotswap") if name in middle}
    result = {
        **header("bench.adapters.file_sizes", given),
        "peft": PEFT,
        "file_bytes": size,
        "store_seconds": asked.seconds,
        "seconds": seconds,
        "added": {name: value / request for name, value in added.items()},
        "equal_after": same,
    }
    rows = [["", "seconds", "least", "most"]]
    rows += [
        [name, *(f"{own[key]:.2f}" for key in ("median", "min", "max"))]
        for name, own in seconds.items()
    ]
    print(columns(rows))
    print(f"two files of {size / 1e6:.0f} MB; weights equal afterwards: {same}")
    for name, value in result["added"].items():
        print(f"{name}: {value:.1%} of {STEPS} steps")
    write_json(asked.out / "adapters-file-sizes.json", result)
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
