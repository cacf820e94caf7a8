"""An edit whose cached rows lie in a store: what each of two ranks reads, and how long it takes.

    OMP_NUM_THREADS=1 python -m bench.ranks.loads
    OMP_NUM_THREADS=1 python -m bench.ranks.loads --speed 25

A recording of SD3's class, 4 blocks of width 512, in a directory that each process reads at
`--speed` MB/s (`slow_disk.py`). A request has `--steps` steps, each of which opens it anew, so
nothing is in memory. Sides, in turn: one process, which reads the rows that the edit needs; two
ranks that read their rows by themselves, with keys gathered and with keys by rank; both again,
while ranks read the rows of the next step ahead; two ranks that get rows from the first process,
which reads whole tensors. Seconds are those of a step. Writes ranks-loads.json to bench/results.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

import maskfx
from bench.harness import ROOT, alternate, figure, header, ratio, write_json
from bench.ranks.__main__ import SHARE, centre
from bench.ranks.shapes import shape_of
from bench.ranks.slow_disk import SlowDisk
from bench.report import columns
from bench.shapes import Shape
from maskfx import EditStep
from maskfx.distributed.division.partition import Partition
from maskfx.distributed.rank_group import RankGroup
from maskfx.ir.programs.head_sources import AttentionWay
from maskfx.runtime.cache.serialize import SCHEMA, encode
from maskfx.runtime.cache.step_cache import StepCache
from maskfx.runtime.cache.stored_steps import decode_parts
from maskfx.runtime.cache.stores.store import Store
from maskfx.runtime.cache.stores.store_entry import EntryKey

KEY = EntryKey("bench", "sd3", "", "float32", "", SCHEMA, 0)
HALVES = Partition(((1.0, 1.0),), (True,))
ONE = "one rank, which reads its rows"
# ranks, way, whether ranks read, whether they read the next step's rows
SIDES: dict[str, tuple[int, AttentionWay, bool, bool]] = {
    ONE: (1, "gathered", True, False),
    "the same, the next step ahead": (1, "gathered", True, True),
    "two ranks, keys by rank": (2, "keys by rank", True, False),
    "two ranks, keys by rank, the next step ahead": (2, "keys by rank", True, True),
    "two ranks, gathered": (2, "gathered", True, False),
    "two ranks, gathered, the next step ahead": (2, "gathered", True, True),
    "two ranks, keys by rank, rows from this process": (2, "keys by rank", False, False),
    "one rank, rows from this process": (1, "gathered", False, False),
}


def measure(shape: Shape, share: float, speed: float, rounds: int, steps: int) -> dict[str, Any]:
    torch.set_num_threads(1)
    denoiser = maskfx.compile(shape.build())
    mask = shape.as_mask(centre(shape.size.height, share))
    recording = denoiser.record(**shape.inputs(0))[1]
    wanted = denoiser.step([EditStep(shape.inputs(1), mask, recording, any_step=True)])[0]
    group = RankGroup(denoiser, 2)
    with tempfile.TemporaryDirectory() as folder:
        Store(Path(folder)).put(KEY, encode(recording))
        store = Store(Path(folder), SlowDisk(1e6 * speed))
        errors: list[float] = []

        def run(name: str) -> None:
            ranks, way, group.pool.steps.ranged, ahead = SIDES[name]
            given = (HALVES, way) if ranks == 2 else (Partition(((1.0,),)), way)
            caches: list[StepCache | None] = [opened(store) for _ in range(steps)]
            for cache, later in zip(caches, [*caches[1:], None], strict=True):
                assert cache is not None
                then = later if ahead else None
                step = EditStep(shape.inputs(1), mask, cache, any_step=True, then=then)
                (found,) = denoiser.step([step], group.on(ranks, *given))
                errors.append(float((found[0] - wanted[0]).abs().max() / wanted[0].abs().max()))

        try:
            sides = {name: lambda _, name=name: run(name) for name in SIDES}
            taken = alternate(sides, rounds + 1)
            times = {name: [t / steps for t in took[1:]] for name, took in taken.items()}
        finally:
            group.stop()
        assert group.computed_here == group.failures == 0, "a step ran in this process"
    return {
        "bytes of the recording": recording.nbytes(),
        "largest relative error": max(errors),
        "seconds": {name: figure(took) for name, took in times.items()},
        "times faster than one rank": {
            name: ratio(times[ONE], took) for name, took in times.items()
        },
    }


def opened(store: Store) -> StepCache:
    parts = store.parts(KEY)
    assert parts is not None, "it was written"
    cache = decode_parts(parts)
    assert cache is not None, "it has checksums"
    return cache


def main(arguments: Sequence[str] | None = None) -> int:
    given = sys.argv[1:] if arguments is None else list(arguments)
    parser = argparse.ArgumentParser(prog="python -m bench.ranks.loads", description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--side", type=int, default=64, help="of the latent")
    parser.add_argument("--share", type=float, default=SHARE, help="of sites that are masked")
    parser.add_argument("--speed", type=float, default=50.0, help="of each process, in MB/s")
    parser.add_argument("--steps", type=int, default=4, help="of a request")
    parser.add_argument("--out", type=Path, default=ROOT / "bench" / "results")
    options = parser.parse_args(given)
    result = header("bench.ranks.loads", given)
    shape = shape_of("sd3", options.side)
    result["shape"] = shape.title
    result |= measure(shape, options.share, options.speed, options.rounds, options.steps)
    lines = [["side", "seconds", "times faster"]]
    for name, took in result["seconds"].items():
        faster = result["times faster than one rank"][name]["median"]
        lines.append([name, f"{took['median']:.2f}", f"{faster:.2f}"])
    print(shape.title, columns(lines), result["largest relative error"], sep="\n")
    write_json(options.out / "ranks-loads.json", result)
    return 0


if __name__ == "__main__":
    sys.exit(main())
