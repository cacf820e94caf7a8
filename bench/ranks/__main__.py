"""The time of one step on one and on two ranks: processes of one thread each.

    python -m bench.ranks
    python -m bench.ranks --shape sdxl --rounds 3

A diffusion transformer (SD3's class, 4 blocks of width 512) with 1,024 image tokens, or those of
another latent (`--side`); Flux at half width, or SDXL's UNet at its real widths and less depth
(`--shape`). Batches: one dense member; an edit of 11 % of the sites (`--share`); two such edits, as
the branches of guidance are, which need no exchange. Per batch and number of ranks: seconds of a
step, with the messages to the ranks; seconds that the ranks computed, and their CPU time; bytes
that each sent to others, and of cached rows that each read. Edits also run with keys and values
gathered, and with each rank's share of the cached keys; where the text has rows, the dense member
and the edit also run with the text whole on each rank. Writes ranks.json to bench/results
(ranks-SIDE.json for another latent, ranks-SHAPE.json for another shape). With fewer idle cores than
ranks, the ratios mean nothing.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

import maskfx
from bench.harness import ROOT, alternate, figure, header, ratio, write_json
from bench.ranks.shapes import SHAPES, shape_of
from bench.report import columns
from bench.shapes import Shape
from maskfx import DenseStep, EditStep
from maskfx.distributed.division.links import LinkCosts
from maskfx.distributed.division.measured_steps import WHOLE
from maskfx.distributed.rank_group import RankGroup
from maskfx.ir.programs.head_sources import AttentionWay
from maskfx.ir.programs.program import Program
from maskfx.runtime.batch.member import Member

SIDE, SHARE = 64, 0.11
SEEDS = 0, 40, 80  # of one timestep
SHARED_TEXT = LinkCosts()
WHOLE_TEXT = LinkCosts(send=1.0)  # the text is computed by each rank


def step_options(name: str, doc: str | None) -> argparse.ArgumentParser:
    """Return the options of a script that measures steps of one shape."""
    parser = argparse.ArgumentParser(prog=f"python -m {name}", description=doc)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--shape", choices=SHAPES, default="sd3")
    parser.add_argument("--blocks", type=int, help="of the transformer, or its deepest level")
    parser.add_argument("--side", type=int, default=SIDE, help="of the latent, 192 at most")
    parser.add_argument("--share", type=float, default=SHARE, help="of sites that are masked")
    parser.add_argument("--out", type=Path, default=ROOT / "bench" / "results")
    return parser


def centre(side: int, share: float) -> torch.Tensor:
    """A square of the share of all sites, in the middle."""
    inner = 2 * round(side * share**0.5 / 2)
    mask = torch.zeros(side, side, dtype=torch.bool)
    start = (side - inner) // 2
    mask[start : start + inner, start : start + inner] = True
    return mask


def measure(shape: Shape, rounds: int, share: float) -> list[dict[str, Any]]:
    torch.set_num_threads(1)
    denoiser = maskfx.compile(shape.build())
    cache = denoiser.record(**shape.inputs(SEEDS[0]))[1]
    mask = shape.as_mask(centre(shape.size.height, share))
    edits = [EditStep(shape.inputs(seed), mask, cache) for seed in SEEDS[1:]]
    dense = [DenseStep(shape.inputs(SEEDS[1]))]
    batches: dict[str, tuple[list[Any], LinkCosts, AttentionWay]] = {
        "dense": (dense, SHARED_TEXT, "gathered"),
        "edit, gathered": (edits[:1], SHARED_TEXT, "gathered"),
        "edit, keys by rank": (edits[:1], SHARED_TEXT, "keys by rank"),
        "two edits": (edits, SHARED_TEXT, "gathered"),
    }
    if not shape.has_convolutions:
        batches["dense, whole text"] = dense, WHOLE_TEXT, "gathered"
        batches["edit, gathered, whole text"] = edits[:1], WHOLE_TEXT, "gathered"
    group = RankGroup(denoiser, 2)
    try:
        rows = [row_of(group, name, *batch, rounds) for name, batch in batches.items()]
        assert group.computed_here == group.failures == 0, "a step ran in this process"
    finally:
        group.stop()
    return rows


def batch_of(denoiser: maskfx.CompiledDenoiser, steps: list[Any]) -> tuple[Program, list[Member]]:
    """Return the program and the members of the batch of some steps."""
    found: list[tuple[Program, list[Member]]] = []

    def seen(program: Any, recording: bool, frame: Any, calls: Any, members: Any) -> None:
        found.append((program, members))

    denoiser.step(steps, seen)
    [batch] = found
    return batch


def row_of(
    group: RankGroup,
    name: str,
    steps: list[Any],
    costs: LinkCosts,
    attention: AttentionWay,
    rounds: int,
) -> dict[str, Any]:
    group.given_costs = costs
    parts: dict[int, list[Any]] = {1: [], 2: []}
    program, members = batch_of(group.denoiser, steps)
    ways = group.divider.ways(program, members, 2, costs)
    # members of their own for each rank, or one that is cut
    partition = ways[WHOLE if len(members) > 1 else 2][0]

    def run(ranks: int) -> None:
        given = (partition, attention) if ranks == 2 else ()
        group.denoiser.step(steps, group.on(ranks, *given))
        parts[ranks] = [part for part in group.last if part is not None]

    times = alternate({str(n): lambda _, n=n: run(n) for n in (1, 2)}, rounds + 1)
    times = {n: found[1:] for n, found in times.items()}
    row: dict[str, Any] = {"batch": name, "ratio": ratio(times["1"], times["2"])}
    for ranks, found in parts.items():
        row[f"ranks {ranks}"] = {
            "seconds": figure(times[str(ranks)]),
            "computing": [part.seconds for part in found],
            "cpu": [part.cpu for part in found],
            "sent": [part.sent for part in found],
            "loaded": [part.part.loaded for part in found],
        }
    return row


def table(rows: Sequence[dict[str, Any]]) -> str:
    lines = [["batch", "ranks", "ms", "times faster", "ms of CPU", "KiB sent", "KiB read"]]
    for row in rows:
        for ranks in (1, 2):
            found = row[f"ranks {ranks}"]
            faster = f"{row['ratio']['median']:.2f}" if ranks == 2 else ""
            sent, read = (
                " + ".join(str(round(n / 1024)) for n in found[key]) for key in ("sent", "loaded")
            )
            ms = f"{1000 * found['seconds']['median']:.0f}"
            cpu = " + ".join(f"{1000 * n:.0f}" for n in found["cpu"])
            lines.append([row["batch"], str(ranks), ms, faster, cpu, sent, read])
    return columns(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    given = sys.argv[1:] if arguments is None else list(arguments)
    options = step_options("bench.ranks", __doc__).parse_args(given)
    result = header("bench.ranks", given)
    shape = shape_of(options.shape, options.side, options.blocks)
    result["shape"] = shape.title
    result["rows"] = measure(shape, options.rounds, options.share)
    print(shape.title, table(result["rows"]), sep="\n")
    name = "-".join(
        ["ranks"]
        + ([options.shape] if options.shape != "sd3" else [])
        + ([str(options.side)] if options.side != SIDE else [])
    )
    write_json(options.out / f"{name}.json", result)
    return 0


if __name__ == "__main__":
    sys.exit(main())
