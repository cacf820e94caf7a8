"""The size from which a step is faster on two ranks than on one, measured and predicted.

    OMP_NUM_THREADS=1 python -m bench.ranks.crossover
    OMP_NUM_THREADS=1 python -m bench.ranks.crossover --shape unet --sides 16,32,64

Per side of the latent, a dense step and an edit of 20 % of the sites: seconds on one rank and cut
into equal parts for two, how much longer or shorter the cost model predicts the cut step to be,
which of the two it chooses, and how much longer that takes than the faster one; what the ranks
choose after all these steps were measured, and how much longer that takes; the number of
exchanges, the bytes that both ranks send, and those that theory gives for keys and values, without
border rows and moments. The costs of exchanges are those that the ranks measured when they
started. Writes ranks-crossover-SHAPE.json to
bench/results. With fewer idle cores than ranks, the sizes mean nothing.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

import maskfx
from bench.harness import ROOT, alternate, figure, header, write_json
from bench.ranks.__main__ import batch_of, centre
from bench.ranks.shapes import SHAPES, shape_of
from bench.report import columns
from bench.shapes import Shape, Size, unet_inputs
from maskfx import DenseStep, EditStep
from maskfx.distributed.division.partition import Partition
from maskfx.distributed.division.step_costs import sent_bytes, step_seconds
from maskfx.distributed.rank_group import RankGroup
from maskfx.shipped import FOLDER

SIDES = "8,16,24,32,48"
SHARE = 0.2
SETTLING = 3
WHOLE, HALVES = Partition(((1.0, 0.0),)), Partition(((1.0, 1.0),))


def shipped_unet(side: int) -> Shape:
    found = json.loads((FOLDER / "unet" / "unet" / "config.json").read_text())
    config = {name: value for name, value in found.items() if not name.startswith("_")}
    title = "the shipped UNet's sizes"
    size = Size(side, side, 32)
    return Shape("unet", title, "UNet2DConditionModel", config, size, unet_inputs)


def measure(shape: Shape, group: RankGroup, rounds: int) -> list[dict[str, Any]]:
    denoiser, side = group.denoiser, shape.size.height
    cache = denoiser.record(**shape.inputs(0, shape.size))[1]
    mask = shape.as_mask(centre(side, SHARE))
    inputs = shape.inputs(40, shape.size)
    steps: dict[str, list[Any]] = {
        "dense": [DenseStep(inputs)],
        "edit": [EditStep(inputs, mask, cache)],
    }
    return [
        {"side": side, "batch": name, **row_of(group, own, rounds)} for name, own in steps.items()
    ]


def row_of(group: RankGroup, steps: list[Any], rounds: int) -> dict[str, Any]:
    ways = {"one": WHOLE, "two": HALVES}
    runs = {
        name: lambda _, own=own: group.denoiser.step(steps, group.on(2, own))
        for name, own in ways.items()
    }
    times = {name: took[1:] for name, took in alternate(runs, rounds + 1).items()}
    program, members = batch_of(group.denoiser, steps)
    work = [group.divider.work.of(program, member) for member in members]
    chosen = group.partition(program, members, 2)
    texts = chosen.texts if any(chosen.cut) else (False,)
    costs, exchanges = group.costs, group.divider.exchanges(program, members[0])
    flop = group.divider.work.flop(costs.flop)
    predicted = [
        step_seconds(exchanges, members, work, Partition(own.shares, texts), costs, flop)
        for own in ways.values()
    ]
    group.denoiser.step(steps, group.on(2, HALVES))
    sent = [part.sent for part in group.last if part is not None]
    theory = [sent_bytes(exchanges, members, Partition(HALVES.shares, (False,)), r) for r in (0, 1)]
    one, two = (figure(times[name]) for name in ways)
    for _ in range(SETTLING):
        group.denoiser.step(steps, group)
    settled = sum(part is not None for part in group.last) > 1
    picked = two if any(chosen.cut) else one
    return {
        "one rank": one,
        "two ranks": two,
        "measured": two["median"] - one["median"],
        "predicted": predicted[1] - predicted[0],
        "cut": any(chosen.cut),
        "lost": picked["median"] / min(one["median"], two["median"]) - 1,
        "settled": settled,
        "lost then": (two if settled else one)["median"] / min(one["median"], two["median"]) - 1,
        "exchanges": exchanges.count,
        "sent": sent,
        "theory": theory,
    }


def table(rows: Sequence[dict[str, Any]]) -> str:
    head = ["batch", "side", "ms on one", "on two", "two - one", "predicted", "predicts", "lost"]
    head += ["then", "lost", "exchanges", "KiB sent", "theory"]
    lines = [head]
    for row in sorted(rows, key=lambda row: row["batch"]):
        numbers = [row["one rank"]["median"], row["two ranks"]["median"]]
        numbers += [row["measured"], row["predicted"]]
        ms = [f"{1000 * number:.1f}" for number in numbers]
        lost = f"{100 * row['lost']:.0f} %"
        then = f"{100 * row['lost then']:.0f} %"
        more = ["two" if row["settled"] else "one", then, str(row["exchanges"])]
        more += [f"{sum(row[name]) / 1024:.0f}" for name in ("sent", "theory")]
        chosen = "two" if row["cut"] else "one"
        lines.append([row["batch"], str(row["side"]), *ms, chosen, lost, *more])
    return columns(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    given = sys.argv[1:] if arguments is None else list(arguments)
    parser = argparse.ArgumentParser(prog="python -m bench.ranks.crossover", description=__doc__)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--shape", choices=[*SHAPES, "unet"], default="sd3")
    parser.add_argument("--sides", default=SIDES, help="of the latent")
    parser.add_argument("--out", type=Path, default=ROOT / "bench" / "results")
    options = parser.parse_args(given)
    result = header("bench.ranks.crossover", given)
    torch.set_num_threads(1)
    rows: list[dict[str, Any]] = []
    group: RankGroup | None = None
    try:
        for side in map(int, options.sides.split(",")):
            shape = shipped_unet(side) if options.shape == "unet" else shape_of(options.shape, side)
            if group is None:
                result["shape"] = shape.title
                group = RankGroup(maskfx.compile(shape.build()), 2)
            rows += measure(shape, group, options.rounds)
        assert group is not None
        assert group.computed_here == group.failures == 0, "a step ran in this process"
        result["costs"] = asdict(group.costs)
    finally:
        if group is not None:
            group.stop()
    result["rows"] = rows
    print(result["shape"], result["costs"], table(rows), sep="\n")
    write_json(options.out / f"ranks-crossover-{options.shape}.json", result)
    return 0


if __name__ == "__main__":
    sys.exit(main())
