"""Dense steps with LoRAs: low-rank terms, or updates in the weights.

    OMP_NUM_THREADS=1 python -m bench.adapters.dense_layers

Steps of the shipped UNet compute all sites of one request and of four, with guidance. Each request
has two LoRAs of random updates of all attention layers; requests alone share a step, or four have
LoRAs of their own. The sides:

- `without`: without LoRAs.
- `low-rank terms`: each layer adds the requests' terms to its result.
- `in the weights`: the updates are written before and taken out afterwards, which isn't counted;
  for one request alone.

Times are processor seconds of this process, which other work on the machine disturbs less; ratios
are of one round. Each side is compared with the module with merged weights first. Writes
adapters-dense-layers.json to bench/results.
"""

from __future__ import annotations

import argparse
import copy
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import maskfx
from bench import harness
from bench.report import columns
from maskfx.runtime.lora.adapter import LowRank, WeightedLayers
from maskfx.runtime.lora.patch import WeightPatch, patched
from maskfx.serve.models.model_source import load_pipeline

RANK, LORAS, REQUESTS = 16, 2, 4
SIDES = ("without", "low-rank terms", "in the weights")


def lora(unet: torch.nn.Module, seed: int) -> WeightedLayers:
    draw, layers = torch.Generator().manual_seed(seed), {}
    for path, layer in unet.named_modules():
        if isinstance(layer, torch.nn.Linear) and ".attn" in path:
            outputs, inputs = layer.weight.shape
            down, up = (torch.randn(s, generator=draw) for s in ((RANK, inputs), (outputs, RANK)))
            layers[path] = LowRank(down, up, 0.01)
    return WeightedLayers(layers, 1.0, str(seed))


def inputs_of(unet: Any, seed: int, side: int) -> dict[str, Any]:
    draw, config = torch.Generator().manual_seed(seed), unet.config
    return {
        "sample": torch.randn(2, config.in_channels, side, side, generator=draw),
        "timestep": torch.tensor(500 + seed),
        "encoder_hidden_states": torch.randn(2, 8, config.cross_attention_dim, generator=draw),
        "return_dict": False,
    }


def processor_seconds(run: Callable[[], Any]) -> float:
    began = time.process_time()
    run()
    return time.process_time() - began


def measure(asked: argparse.Namespace) -> dict[str, Any]:
    unet: Any = load_pipeline("unet", "float32", "cpu").unet
    denoiser = maskfx.compile(unet)
    found: dict[str, Any] = {}
    patching = []
    for requests in (1, REQUESTS):
        calls = [inputs_of(unet, number, asked.side) for number in range(requests)]
        sets = [
            tuple(lora(unet, LORAS * number + one) for one in range(LORAS))
            for number in range(requests)
        ]
        errors: dict[str, float] = {}
        wanted = []
        for call, own in zip(calls, sets, strict=True):
            merged = copy.deepcopy(unet)
            WeightPatch(merged).apply(own)
            wanted.append(merged(**call)[0])

        def step(own: Any, calls: Any = calls) -> list[Tensor]:
            [group] = denoiser.alike(calls, own)
            return [result[0] for result in denoiser.plain_together(group)]

        def run(side: str, sets: Any = sets, calls: Any = calls) -> tuple[float, list[Tensor]]:
            none = [()] * len(calls)
            if side == "in the weights":
                with patched(unet, sets[0]):
                    step(none)  # follows the change of the weights
                    out: list[Tensor] = []
                    return processor_seconds(lambda: out.extend(step(none))), out
            own = none if side == "without" else sets
            out = []
            return processor_seconds(lambda: out.extend(step(own))), out

        sides = SIDES if requests == 1 else SIDES[:2]
        seconds: dict[str, list[float]] = {side: [] for side in sides}
        for side in sides:  # proofs that calls may share one, and the error
            _, out = run(side)
            if side != "without":
                errors[side] = max(
                    float((a - b).norm() / b.norm()) for a, b in zip(out, wanted, strict=True)
                )
        for number in range(asked.rounds):
            for side in sides if number % 2 == 0 else reversed(sides):
                seconds[side].append(run(side)[0])
            patch = WeightPatch(unet)
            patching.append(
                processor_seconds(lambda p=patch, own=sets[0]: (p.apply(own), p.remove()))
            )
        found[str(requests)] = {
            "processor_seconds": {side: harness.figure(own) for side, own in seconds.items()},
            "times_without": {
                side: harness.ratio(own, seconds["without"]) for side, own in seconds.items()
            },
            "errors": errors,
        }
    return {"requests": found, "write_and_take_out_seconds": harness.figure(patching)}


def main(given: list[str]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--side", type=int, default=32, help="of the latents")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, default=harness.ROOT / "bench" / "results")
    asked = parser.parse_args(given)
    torch.set_num_threads(1)
    with torch.no_grad():
        found = measure(asked)
    rows = [["requests", "side", "processor ms", "times without", "error"]]
    for requests, own in found["requests"].items():
        for side, seconds in own["processor_seconds"].items():
            ratio = own["times_without"][side]["median"]
            error = own["errors"].get(side)
            told = "-" if error is None else f"{error:.1e}"
            rows.append([requests, side, f"{1e3 * seconds['median']:.1f}", f"{ratio:.3f}", told])
    print(columns(rows))
    written = found["write_and_take_out_seconds"]["median"]
    print(f"writing two LoRAs and taking them out: {1e3 * written:.1f} ms")
    sizes = {"rank": RANK, "loras": LORAS, "side": asked.side, "rounds": asked.rounds}
    header = harness.header("bench.adapters.dense_layers", given)
    harness.write_json(asked.out / "adapters-dense-layers.json", {**header, **sizes, **found})
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
