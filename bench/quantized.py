"""Edits of denoisers whose linear layers unpack their weights in each call, against the module.

    OMP_NUM_THREADS=1 python -m bench.quantized

Weights are packed as diffusers holds those of a GGUF file (8 bits, blocks of 32), or by
bitsandbytes (4 bits, `nf4`) where it is installed. Both sides unpack all weights in each step, so
an edit gains less than with plain weights, which stand beside it. Weights are random. Writes
bench/results/quantized.json.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import nn

import maskfx
from bench import harness, masks, shapes
from bench.packing import pack_bitsandbytes, pack_gguf
from bench.report import columns, times

RATIOS = (0.05, 0.1, 0.2, 0.35)
PACKED: dict[str, tuple[str, Callable[[nn.Module], object]]] = {
    "plain": ("torch", lambda module: None),
    "gguf": ("gguf", pack_gguf),
    "bitsandbytes": ("bitsandbytes", pack_bitsandbytes),
}


def measure(shape: shapes.Shape, kind: str, rounds: int) -> dict[str, Any]:
    """Time a step of the module and edits of several sizes, one after the other in each round."""
    module, inputs = shape.build(), shape.inputs(0)
    PACKED[kind][1](module)
    denoiser = maskfx.compile(module)
    wanted, cache = denoiser.record(**inputs)
    grids = {
        share: masks.make("square", shape.size.height, shape.size.width, share) for share in RATIOS
    }
    steps = {
        share: maskfx.EditStep(inputs, shape.as_mask(grid), cache) for share, grid in grids.items()
    }
    sides: dict[str, Callable[[int], Any]] = {"module": lambda _: module(**inputs)}
    for share, step in steps.items():
        sides[str(share)] = lambda _, step=step: denoiser.edit([step])
        apart = (denoiser.edit([step])[0][0] - wanted[0]).norm() / wanted[0].norm()
        assert apart < 1e-4, f"an edit with the inputs of its recording differs by {apart:.0e}"
    seconds = harness.alternate(sides, rounds)
    return {
        "seconds": {name: harness.figure(taken) for name, taken in seconds.items()},
        "masked": {str(s): float(step.mask.float().mean()) for s, step in steps.items()},
        "times_faster": {
            str(share): harness.ratio(seconds["module"], seconds[str(share)]) for share in RATIOS
        },
    }


def table(found: dict[str, dict[str, Any]]) -> str:
    head = ["model", "weights", *(f"{share:.0%} masked" for share in RATIOS)]
    rows = [
        [title, kind, *(times(one["times_faster"][str(share)]) for share in RATIOS)]
        for title, kinds in found.items()
        for kind, one in kinds.items()
    ]
    return columns([head, *rows])


@torch.no_grad()
def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shapes", nargs="*", default=["a", "c"])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--quick", action="store_true", help="small modules")
    parser.add_argument("--out", type=Path, default=harness.ROOT / "bench" / "results")
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    result = harness.header("bench.quantized", arguments)
    kinds = [kind for kind, (package, _) in PACKED.items() if find_spec(package) is not None]
    result["models"] = {}
    for name in options.shapes:
        shape = shapes.choose(name, options.quick)
        result["models"][shape.title] = {
            kind: measure(shape, kind, options.rounds) for kind in kinds
        }
    print(table(result["models"]))
    harness.write_json(options.out / "quantized.json", result)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
