"""The time until a module's first recording, where its trial run leaves out large products or not.

    OMP_NUM_THREADS=1 python -m bench.capture

Before a module is exported, it runs once, so that Python's branches on tensors are known. A light
run (maskfx/compiler/capture/tracing/light_run.py) takes the place of a full one where Python asks
nothing. Each time holds the export, the passes, the comparison with the module, and the recording
of one call: CPU seconds, because machines are shared. The modules have random weights. Writes
bench/results/capture.json.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast
from unittest import mock

import torch
from diffusers import AutoencoderKL

import maskfx
from bench import harness, shapes
from bench.report import columns, times
from maskfx.compiler.capture.tracing import branches
from maskfx.pipelines.handlers.autoencoder import INPUT, AutoencoderMethod
from maskfx.runtime.programs.shared_programs import shared_programs

STABLE_DIFFUSION = {
    "block_out_channels": (128, 256, 512, 512),
    "down_block_types": ("DownEncoderBlock2D",) * 4,
    "up_block_types": ("UpDecoderBlock2D",) * 4,
    "layers_per_block": 2,
    "latent_channels": 4,
}
LATENTS = 16  # a side


def subjects(names: Sequence[str], small: bool) -> dict[str, tuple[torch.nn.Module, Any]]:
    """The modules and a call's inputs, by what they are."""
    found: dict[str, tuple[torch.nn.Module, Any]] = {}
    for name in names:
        if name in shapes.SHAPES:
            shape = shapes.choose(name, small)
            found[shape.title] = shape.build(), shape.inputs(0)
            continue
        config = {**STABLE_DIFFUSION, **({"block_out_channels": (32,) * 4} if small else {})}
        vae: Any = cast(Any, AutoencoderKL)(**config)
        inputs = {INPUT: shapes.normal(0, 1, 4, LATENTS, LATENTS)}
        found["decoder of Stable Diffusion"] = AutoencoderMethod(vae.eval(), "decode"), inputs
    return found


def first_recording(module: torch.nn.Module, inputs: dict[str, Any], light: bool) -> None:
    shared_programs().clear()
    with mock.patch.object(branches, "light_run", branches.light_run if light else lambda *_: None):
        compiled: maskfx.CompiledDenoiser = maskfx.compile(module)
        compiled.record(**inputs)


def measure(module: torch.nn.Module, inputs: dict[str, Any], rounds: int) -> dict[str, Any]:
    sides: dict[str, Callable[[int], Any]] = {
        "full": lambda _: first_recording(module, inputs, light=False),
        "light": lambda _: first_recording(module, inputs, light=True),
        "module": lambda _: module(**inputs),
    }
    with torch.no_grad():
        sides["module"](0)
        seconds = harness.alternate(sides, rounds, time.process_time)
    return {
        "seconds": {name: harness.figure(taken) for name, taken in seconds.items()},
        "times_faster": harness.ratio(seconds["full"], seconds["light"]),
        "module_runs": harness.ratio(seconds["light"], seconds["module"]),
        "module_runs_before": harness.ratio(seconds["full"], seconds["module"]),
    }


def table(rows: dict[str, Any]) -> str:
    head = ["module", "times faster", "module runs", "before"]
    return columns(
        [
            head,
            *(
                [
                    name,
                    times(row["times_faster"]),
                    times(row["module_runs"]),
                    times(row["module_runs_before"]),
                ]
                for name, row in rows.items()
            ),
        ]
    )


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--modules", nargs="*", default=["a", "c", "vae"])
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--quick", action="store_true", help="small modules")
    parser.add_argument("--out", type=Path, default=harness.ROOT / "bench" / "results")
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    result = harness.header("bench.capture", arguments)
    result["modules"] = {
        name: measure(module, inputs, options.rounds)
        for name, (module, inputs) in subjects(options.modules, options.quick).items()
    }
    print(table(result["modules"]))
    harness.write_json(options.out / "capture.json", result)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
