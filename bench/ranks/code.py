"""A step on ranks of one thread: operator by operator, and by code that Inductor compiled.

    python -m bench.ranks.code
    python -m bench.ranks.code --shape flux --side 32

The denoisers of `bench.ranks`, each compiled without and with `inductor=True`, with two ranks
each. Batches: one dense member; an edit of 11 % of the sites (`--share`), whose keys are gathered.
Each runs on one rank and divided over two, in rounds that alternate between the two. Before, the
steps run until all ranks have loaded the code. Per side: seconds of a step, and the CPU seconds of
the ranks together; and per graph the seconds of its compile, beside the ranks, and the most bytes
of the process that compiled it. Writes ranks-code-SHAPE.json to bench/results. With fewer idle
cores than ranks only the CPU seconds mean something.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from statistics import median
from typing import Any

import torch

import maskfx
from bench.harness import alternate, figure, header, ratio, write_json
from bench.ranks.__main__ import SEEDS, batch_of, centre, step_options
from bench.ranks.shapes import shape_of
from bench.report import columns
from bench.shapes import Shape
from maskfx import CompiledDenoiser, DenseStep, EditStep
from maskfx.distributed.code_compiler import name_of
from maskfx.distributed.division.links import LinkCosts
from maskfx.distributed.division.partition import Partition
from maskfx.distributed.heartbeat import Waits
from maskfx.distributed.rank_group import RankGroup

SIDES = "operators", "code"
SECONDS = 3600.0  # until ranks run code
WAITS = Waits(*[SECONDS] * 6)  # other processes may have the cores for minutes


class Side:
    """A denoiser with its ranks, and its steps."""

    def __init__(self, shape: Shape, inductor: bool, share: float) -> None:
        self.denoiser: CompiledDenoiser = maskfx.compile(shape.build(), inductor=inductor)
        cache = self.denoiser.record(**shape.inputs(SEEDS[0]))[1]
        mask = shape.as_mask(centre(shape.size.height, share))
        inputs = shape.inputs(SEEDS[1])
        self.batches: dict[str, list[Any]] = {
            "dense": [DenseStep(inputs)],
            "edit": [EditStep(inputs, mask, cache)],
        }
        self.group = RankGroup(self.denoiser, 2, waits=WAITS, costs=LinkCosts())
        self.shares: dict[str, Partition] = {}
        for name, steps in self.batches.items():
            program, members = batch_of(self.denoiser, steps)
            ways = self.group.divider.ways(program, members, 2, LinkCosts())
            self.shares[name] = ways[2][0]

    def run(self, name: str, ranks: int) -> list[Any]:
        """Run a batch; return its results."""
        if ranks == 1:
            return self.group.on(1).run(self.denoiser, self.batches[name])
        split = self.group.on(2, self.shares[name], "gathered")
        return self.denoiser.step(self.batches[name], split)

    @property
    def cpu(self) -> float:
        """The CPU seconds of the ranks in the last step."""
        return sum(one.cpu for one in self.group.last if one is not None)

    def wait_for_code(self) -> None:
        """Run all batches until ranks run code in all of them."""
        until, missing = time.monotonic() + SECONDS, True
        while missing:
            missing = False
            for name in self.batches:
                for ranks in (1, 2):
                    self.run(name, ranks)
                    missing |= any(one is not None and not one.code.ran for one in self.group.last)
            assert time.monotonic() < until, self.denoiser.explain()
            time.sleep(2.0 * missing)


def measure(shape: Shape, rounds: int, share: float) -> dict[str, Any]:
    torch.set_num_threads(1)
    sides = {name: Side(shape, name == "code", share) for name in SIDES}
    try:
        sides["code"].wait_for_code()
        rows = [
            row_of(sides, name, ranks, rounds) for name in ("dense", "edit") for ranks in (1, 2)
        ]
        for side in sides.values():
            assert side.group.computed_here == side.group.failures == 0, "a step ran elsewhere"
        code = sides["code"].group.pool.code
        assert code is not None
        compiles = {
            name_of(key): {"seconds": one.seconds, "MiB": one.nbytes / (1 << 20)}
            for key, one in code.results.items()
        }
    finally:
        for side in sides.values():
            side.group.stop()
    return {"rows": rows, "compiles": compiles}


def row_of(sides: dict[str, Side], name: str, ranks: int, rounds: int) -> dict[str, Any]:
    cpu: dict[str, list[float]] = {side: [] for side in sides}
    results: dict[str, Any] = {}

    def run(side: str, number: int) -> None:
        (results[side],) = sides[side].run(name, ranks)
        cpu[side].append(sides[side].cpu)

    runs: dict[str, Callable[[int], None]] = {side: partial(run, side) for side in sides}
    times = {side: found[1:] for side, found in alternate(runs, rounds + 1).items()}
    one, other = (first_tensor(results[side]) for side in SIDES)
    return {
        "batch": name,
        "ranks": ranks,
        "ratio": ratio(times["operators"], times["code"]),
        "cpu ratio": median(cpu["operators"][1:]) / median(cpu["code"][1:]),
        "relative error": float((one - other).norm() / one.norm()),
        **{side: {"seconds": figure(times[side]), "cpu": figure(cpu[side][1:])} for side in sides},
    }


def first_tensor(value: Any) -> torch.Tensor:
    leaves = torch.utils._pytree.tree_leaves(value)
    return next(leaf for leaf in leaves if isinstance(leaf, torch.Tensor))


def table(found: dict[str, Any]) -> str:
    lines = [
        ["batch", "ranks", "operators, ms", "code, ms", "times faster", "in CPU time", "error"]
    ]
    for row in found["rows"]:
        ms = [f"{1000 * row[side]['seconds']['median']:.0f}" for side in SIDES]
        more = f"{row['ratio']['median']:.2f}", f"{row['cpu ratio']:.2f}"
        error = f"{row['relative error']:.0e}"
        lines.append([row["batch"], str(row["ranks"]), *ms, *more, error])
    made = [
        f"{name}: compiled in {one['seconds']:.0f} s, {one['MiB']:.0f} MiB"
        for name, one in found["compiles"].items()
    ]
    return "\n".join([columns(lines), *made])


def main(arguments: Sequence[str] | None = None) -> int:
    given = sys.argv[1:] if arguments is None else list(arguments)
    options = step_options("bench.ranks.code", __doc__).parse_args(given)
    result = header("bench.ranks.code", given)
    shape = shape_of(options.shape, options.side, options.blocks)
    result["shape"] = shape.title
    result.update(measure(shape, options.rounds, options.share))
    print(shape.title, table(result), sep="\n")
    write_json(options.out / f"ranks-code-{options.shape}.json", result)
    return 0


if __name__ == "__main__":
    sys.exit(main())
