"""What Inductor costs a user: seconds to the first edit, and what the caches on disk save.

    OMP_NUM_THREADS=1 python -m bench.compile_seconds [--blocks 2 4] [--rounds 1] [--quick]

Each start is a process of its own, timed from the call of `maskfx.compile` to the end of the first
edit and of the second one. A Flux of width 512, with few blocks (`--blocks`).

- `eager`: without Inductor, nothing on disk.
- `cold`: `inductor=True`, nothing on disk.
- `warm`: the same with Inductor's cache on disk, written by `cold`.
- `programs`: the same with compiled programs on disk too (`programs=`).

Writes results/compile-seconds.json.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from bench.harness import ROOT, figure, header, write_json
from bench.report import columns

SIDES = ("eager", "cold", "warm", "programs")


def start(options: argparse.Namespace) -> dict[str, float]:
    """Compile, record and edit twice; return the seconds of each."""
    import torch

    import maskfx
    from bench import masks, shapes

    torch.set_num_threads(1)
    shape = shapes.choose("c", options.quick)
    joint, single = options.blocks
    config = {**shape.config, "num_layers": joint, "num_single_layers": single}
    shape = shape if options.quick else replace(shape, config=config)
    module, inputs = shape.build(), shape.inputs(0)
    grid = masks.make("square", shape.size.height, shape.size.width, 0.11, 0)
    mask = shape.as_mask(grid)
    programs = None if options.programs is None else Path(options.programs)
    found = {}
    with torch.no_grad():
        began = time.perf_counter()
        denoiser = maskfx.compile(module, inductor=options.side != "eager", programs=programs)
        cache = denoiser.record(**inputs)[1]
        found["recorded"] = time.perf_counter() - began
        for name in ("first_edit", "second_edit"):
            denoiser.edit([maskfx.EditStep(inputs, mask, cache)])
            found[name] = time.perf_counter() - began
    if programs is not None:
        denoiser.save_programs(programs)
    return found


def run_side(side: str, options: argparse.Namespace, folder: Path) -> dict[str, float]:
    command = [sys.executable, "-m", "bench.compile_seconds", "--side", side]
    command += ["--blocks", *map(str, options.blocks)] + (["--quick"] if options.quick else [])
    if side == "programs":
        command += ["--programs", str(folder / "programs")]
    environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor")}
    answer = subprocess.run(
        command, env=environment, cwd=ROOT, check=True, capture_output=True, text=True
    )
    return dict(json.loads(answer.stdout.splitlines()[-1]))


def compare(options: argparse.Namespace) -> dict[str, Any]:
    taken: dict[str, list[dict[str, float]]] = {side: [] for side in SIDES}
    for _ in range(options.rounds):
        with tempfile.TemporaryDirectory() as folder:
            for side in ("eager", "cold", "warm"):
                taken[side].append(run_side(side, options, Path(folder)))
            run_side("programs", options, Path(folder))  # writes the programs
            taken["programs"].append(run_side("programs", options, Path(folder)))
    return {
        side: {name: figure([one[name] for one in own]) for name in own[0]}
        for side, own in taken.items()
    }


def tell(sides: dict[str, Any]) -> str:
    lines = [["start", "recorded, s", "first edit after, s", "of which Inductor", "second edit, s"]]
    eager = sides["eager"]["first_edit"]["median"]
    for side, own in sides.items():
        recorded, first, second = (
            own[n]["median"] for n in ("recorded", "first_edit", "second_edit")
        )
        lines.append(
            [
                side,
                f"{recorded:.1f}",
                f"{first:.1f}",
                f"{first - eager:.1f}",
                f"{second - first:.2f}",
            ]
        )
    return columns(lines)


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="bench.compile_seconds", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("--blocks", type=int, nargs=2, default=[2, 4], help="joint and single ones")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--quick", action="store_true", help="a small denoiser")
    parser.add_argument("--side", choices=SIDES, help=argparse.SUPPRESS)
    parser.add_argument("--programs", help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, default=ROOT / "bench" / "results")
    options = parser.parse_args(arguments)
    if options.side is not None:
        print(json.dumps(start(options)))
        return 0
    sides = compare(options)
    result = {
        **header("bench.compile_seconds", arguments),
        "blocks": options.blocks,
        "load_average": os.getloadavg()[0],
        "sides": sides,
    }
    name = "compile-seconds" + ("-quick" if options.quick else "")
    write_json(options.out / f"{name}.json", result)
    print(tell(sides))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
