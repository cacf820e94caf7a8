"""How near edits come to dense ones, and how much faster they are, beside what others do.

    OMP_NUM_THREADS=1 python -m bench.quality --model unet --edits 300 --folder /tmp/quality-unet

Each edit is of a held-out scene, under a mask of irregular shape whose share of the picture is a
production service's. The template is recorded with no prompt, so with another one than the edit's.
Reference is the dense run with the same noise: the edit's own inside the mask, outside of it the
template's. "dense, other background" changes the noise outside only, which gives the scale.

All sides are timed in one run, each beside a dense run of its own group. Every finished edit is
kept in the folder: a stopped run goes on with the same command, and another --sides adds sides to
the same edits. Writes quality-<model>.json, -frontier.png and -pictures.png to --out.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from bench import harness
from bench.masks import production_ratios
from bench.quality_bed import WARM_UP, Bed, Case, Made, Pixels
from bench.quality_figures import draw_frontiers, draw_pictures
from bench.quality_folder import Folder
from bench.quality_metrics import psnr, ssim
from bench.quality_ours import Opened, Ours
from bench.quality_report import summary, table
from bench.quality_sides import DENSE, Side, chosen, sides_of
from bench.reference.edits import load_probe
from bench.reference.probe import crop_around, scores
from bench.reference.scenes import COLOURS, SHAPES, Thing
from bench.reference.train import RUNS
from bench.reference.vae import as_pictures
from maskfx.shipped import FOLDER as SHIPPED
from maskfx.shipped import reference

PICTURED = 12  # of so many edits all pictures are kept
Row = dict[str, Any]


class Judge:
    """What is said of a side's picture: numbers against the dense one, and what the probe sees."""

    def __init__(self, runs: Path) -> None:
        self.probe = load_probe(runs)

    def row(self, case: Case, made: Made, dense: Pixels) -> Row:
        pixels, mask = made.pixels, case.edit.mask
        return {
            "seconds": made.seconds,
            "whole_seconds": made.whole_seconds,
            "calls": made.calls,
            "ssim": ssim(pixels, dense),
            "psnr": psnr(pixels, dense),
            "psnr_inside": psnr(pixels, dense, mask),
            "outside_kept": bool((pixels[~mask] == case.edit.pixels[~mask]).all()),
            **self.seen(pixels, case.edit.thing),
        }

    @torch.no_grad()
    def seen(self, pixels: Pixels, thing: Thing) -> Row:
        """Is it the thing that was asked for? And the features that say so."""
        crop = crop_around(pixels, thing.x, thing.y, thing.radius)[None].copy()
        layers: Any = self.probe
        hidden: nn.Module = layers[:-1]
        for_shape, for_colour = scores(self.probe, crop)
        return {
            "shape": SHAPES[int(for_shape.argmax())] == thing.shape,
            "colour": COLOURS[int(for_colour.argmax())] == thing.colour,
            "features": [round(x, 4) for x in hidden(as_pictures(crop))[0].tolist()],
        }


class Contest:
    """All sides on one edit after another."""

    def __init__(self, bed: Bed, ours: Ours, judge: Judge, folder: Folder) -> None:
        self.bed, self.ours, self.judge, self.folder = bed, ours, judge, folder

    def run(self, index: int, sides: Sequence[Side]) -> None:
        """What an edit lacks yet; it is kept when all of that is done."""
        found = self.folder.edit(index)
        absent = self.folder.absent
        todo = [s for s in sides if s.name not in found["sides"] and s.name not in absent]
        if not todo:
            return
        case = self.bed.case(index)
        dense = self.bed.dense(case)  # the reference; its time isn't used
        found |= self.about(case)
        found["sides"] |= {name: row for name, row in self.rows(case, todo, dense.pixels)}
        self.folder.keep(index, found)

    def about(self, case: Case) -> Row:
        edit = case.edit
        return {
            "prompt": edit.prompt,
            "masked": float(edit.mask.mean()),
            "masked_sites": float(case.sites.float().mean()),
            "painted": self.judge.seen(edit.wanted, edit.thing),
        }

    def rows(self, case: Case, todo: Sequence[Side], dense: Pixels) -> Iterator[tuple[str, Row]]:
        """Group after group, in another order for every edit; so are the sides of a group."""
        ordered = sorted(todo, key=lambda side: side.group)
        groups = [list(members) for _, members in groupby(ordered, key=lambda side: side.group)]
        shift = case.index % len(groups)
        for members in groups[shift:] + groups[:shift]:
            if case.index % 2:
                members.reverse()
            first = case.index % 2 == 0  # the group's own dense run, before or after the others
            with self.opened(case, members[0]) as opened:
                beside = self.bed.dense(case) if first else None
                made = {s: one for s in members if (one := self.made(s, case, opened)) is not None}
                beside = beside or self.bed.dense(case)
            if not np.array_equal(beside.pixels, dense):
                raise RuntimeError(f"edit {case.index}: two dense runs differ")
            for side, one in made.items():
                row = self.judge.row(case, one, dense)
                row["dense_seconds"] = beside.seconds
                row["dense_whole_seconds"] = beside.whole_seconds
                if side.ours and opened is not None:
                    row |= {"record_seconds": opened.seconds, "template_bytes": opened.nbytes}
                if case.index < PICTURED:
                    self.folder.keep_picture(case.index, side.name, one.pixels)
                yield side.name, row
        if case.index < PICTURED:
            self.folder.keep_pictures(case)

    @contextmanager
    def opened(self, case: Case, first: Side) -> Iterator[Opened | None]:
        if first.kept is None:
            yield None
            return
        with self.ours.opened(case, first.kept, records=not first.cold) as opened:
            yield opened

    def made(self, side: Side, case: Case, opened: Opened | None) -> Made | None:
        """A baseline that a model doesn't take, or that isn't installed, is left out; it is said
        why. Ours must work.
        """
        try:
            return side.make(self.bed, self.ours, case, opened)
        except Exception as error:
            if side.ours or side.family in ("dense", "fewer steps", "crop"):
                raise
            self.folder.leave_out(side.name, harness.describe(error))
            return None


def go_on(contest: Contest, sides: Sequence[Side], edits: int) -> None:
    """Warm up, then every edit."""
    begun = time.monotonic()
    left = [i for i in range(edits) if contest.folder.lacks(i, [s.name for s in sides])]
    if left:
        warm_up(contest, sides)
    for done, index in enumerate(left, 1):
        contest.run(index, sides)
        spent = time.monotonic() - begun
        print(f"edit {index}: {spent / done:.0f} s each, {len(left) - done} left", flush=True)


def warm_up(contest: Contest, sides: Sequence[Side]) -> None:
    """Captures and first calls are no part of any time."""
    bed, ours = contest.bed, contest.ours
    case = bed.case(WARM_UP)
    bed.dense(case)
    for stretches in {side.kept.stretches for side in sides if side.kept is not None}:
        first = next(s for s in sides if s.kept is not None and s.kept.stretches == stretches)
        with contest.opened(case, first) as opened:
            first.make(bed, ours, case, opened)


def report(folder: Folder, sides: Sequence[Side], edits: int, out: Path, name: str) -> None:
    families = {side.name: side.family for side in sides}
    result = {
        **folder.about(),
        **summary(folder.edits(edits), families),
        "absent": folder.absent,
    }
    harness.write_json(out / f"quality-{name}.json", result)
    print(table(result))
    draw_frontiers(result, out / f"quality-{name}-frontier.png")
    draw_pictures(folder, result, out / f"quality-{name}-pictures.png")


def settings_of(options: argparse.Namespace, origin: Any) -> dict[str, Any]:
    """What all edits of a folder must have in common."""
    weights = torch.cat([p.detach().flatten().double() for p in denoiser_weights(origin)])
    measured = production_ratios() is not None
    return {
        "model": options.model,
        "steps": options.steps,
        "threads": options.threads,
        "compiled_as": options.compiled_as,
        "weights": f"{weights.numel()} numbers, {weights.sum():.9g}, {weights.abs().sum():.9g}",
        "mask_ratios": "those of the service" if measured else "the distribution fitted to them",
    }


def denoiser_weights(pipe: Any) -> list[nn.Parameter]:
    found: nn.Module = pipe.unet if hasattr(pipe, "unet") else pipe.transformer
    return list(found.parameters())


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", choices=("unet", "dit"), required=True)
    parser.add_argument("--edits", type=int, default=300)
    parser.add_argument("--steps", type=int, default=25)
    parser.add_argument("--folder", type=Path, required=True, help="where finished edits are kept")
    parser.add_argument("--sides", nargs="*", default=["*"], help="names or families; * and ? work")
    parser.add_argument(
        "--compiled-as", nargs="*", default=[], choices=("prepack", "inductor"), help="ours"
    )
    parser.add_argument("--pipelines", type=Path, default=SHIPPED, help="the trained pipelines")
    parser.add_argument("--runs", type=Path, default=RUNS, help="where the probe was trained")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--list", action="store_true", help="only say which sides there are")
    parser.add_argument("--out", type=Path, default=harness.ROOT / "bench" / "results")
    options = parser.parse_args(arguments)
    sides = chosen(sides_of(options.steps), options.sides)
    if options.list:
        print("\n".join(f"{side.family}: {side.name}" for side in sides))
        return 0
    torch.set_num_threads(options.threads)
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    origin = reference(options.model, folder=options.pipelines)
    folder = Folder(options.folder, settings_of(options, origin))
    folder.begin(harness.header("bench.quality", arguments))
    bed = Bed(options.model, origin, options.steps)
    ours = Ours(bed, **dict.fromkeys(options.compiled_as, True))
    go_on(Contest(bed, ours, Judge(options.runs), folder), sides, options.edits)
    assert sides[0].name == DENSE, "the reference comes first"
    report(folder, sides, options.edits, options.out, options.model)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
