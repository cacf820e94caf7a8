"""Adapters written into quantized weights: what rounding leaves of the LoRAs that ship.

    python -m bench.adapters.requantised

A weight that holds whole multiples of a step q can't hold a sum W + D exactly: rounded to the
nearest multiples, each number of the sum is off by up to q / 2, and by q / sqrt(12) in the mean.
The weight of each linear layer that a LoRA of the trained UNet changes is quantized (symmetric, a
scale per output channel), the update is added to the numbers that this stands for, and the sum is
quantized again with the same scales. The error is that of the sum, relative to the update. Beside
it stands q / sqrt(12) over the update's root mean square, which predicts it; steps with adapters
are asked to be exact within 1e-4. Writes adapters-requantised.json to bench/results.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from safetensors.torch import load_file
from torch import Tensor

from bench import harness
from bench.report import columns
from maskfx.pipelines.adapters.lora_files import LoraTarget, converted
from maskfx.runtime.lora.adapter import LowRank
from maskfx.runtime.lora.files import FileLimits
from maskfx.shipped import loras, reference

MODEL, BITS, ASKED = "unet", (8, 4), 1e-4


def scales(weight: Tensor, bits: int) -> Tensor:
    """The step of each output channel."""
    largest = 2 ** (bits - 1) - 1
    return weight.abs().flatten(1).amax(1, keepdim=True) / largest


def error(weight: Tensor, update: Tensor, bits: int) -> tuple[float, float]:
    """The error of the quantized sum relative to the update, and what rounding predicts."""
    step = scales(weight, bits)
    held = (weight / step).round() * step
    wanted = held + update
    found = (wanted / step).round() * step
    predicted = (step.square().mean() / 12).sqrt() / update.square().mean().sqrt()
    return float((found - wanted).norm() / update.norm()), float(predicted)


def measure(path: Path, pipe: Any) -> dict[str, Any]:
    adapter = converted(path.name, load_file(path), {}, LoraTarget.of(pipe), FileLimits())
    found: dict[str, Any] = {}
    for bits in BITS:
        rows = []
        for layer, update in adapter.parts["unet"].items():
            assert isinstance(update, LowRank)
            weight = pipe.unet.get_submodule(layer).weight.detach()
            if weight.dim() == 2:
                change = update.scale * (update.up.flatten(1) @ update.down.flatten(1))
                rows.append(error(weight, change, bits))
        found[f"{bits} bits"] = {
            "error": harness.figure([one for one, _ in rows]),
            "predicted": harness.figure([one for _, one in rows]),
        }
    return found


def main(given: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, default=harness.ROOT / "bench" / "results")
    asked = parser.parse_args(given)
    pipe = reference(MODEL)
    found = {path.stem: measure(path, pipe) for path in sorted(loras(MODEL).glob("*.safetensors"))}
    result = {**harness.header("bench.adapters.requantised", given), "asked": ASKED, **found}
    harness.write_json(asked.out / "adapters-requantised.json", result)
    rows = [["LoRA", "weights", "error of the update", "predicted"]]
    for name, own in found.items():
        for bits, row in own.items():
            error_, predicted = row["error"]["median"], row["predicted"]["median"]
            rows.append([name, bits, f"{error_:.2f}", f"{predicted:.2f}"])
    print(columns(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
