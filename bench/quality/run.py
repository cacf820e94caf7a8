"""How near edits come to dense ones, and how much faster they are, beside what others do.

    OMP_NUM_THREADS=1 python -m bench.quality --model unet --edits 300 --folder /tmp/quality-unet

Each edit is of a held-out scene, under a mask of irregular shape whose share of the picture is a
production service's. The template is recorded with no prompt, so with another one than the edit's.
Reference is the dense run with the same noise: the edit's own inside the mask, outside of it the
template's. "dense, other background" changes the noise outside only, which gives the scale.

All sides of an edit are timed one after another, in another order for each edit, beside the dense
run that they are compared with. Every finished edit is kept in the folder: a stopped run goes on
with the same command, and another --sides adds sides to the same edits. Several processes may share
the edits, with --part 1/2 and --part 2/2, each on a core of its own then. With --together N
edits share a step: ours as a ragged batch, the others as one call of diffusers, where they can.

Writes quality-<model>.json, -frontier.png and -pictures.png to --out.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from torch import nn

from bench import harness
from bench.masks import production_ratios
from bench.quality.bed import WARM_UP, Bed, Case, Made, Pixels
from bench.quality.figures import draw_frontiers, draw_pictures
from bench.quality.folder import Folder
from bench.quality.metrics import psnr, ssim
from bench.quality.ours import Opened, Ours
from bench.quality.report import summary, table
from bench.quality.sides import DENSE, Side, chosen, sides_of
from maskfx.pipelines.call_defaults import call_of
from maskfx.shipped import FOLDER as SHIPPED
from maskfx.shipped import reference
from training.edits import load_probe
from training.probe import crop_around, scores
from training.scenes import COLOURS, SHAPES, Thing
from training.train import RUNS
from training.vae import as_pictures

PICTURED = 12  # of this many edits all pictures are kept
Row = dict[str, Any]


class Judge:
    """A side's picture: numbers against the dense one, and what the probe sees."""

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

    def run(self, indices: Sequence[int], sides: Sequence[Side]) -> None:
        """What some edits lack yet, made together; it is kept when all of that is done."""
        found = [self.folder.edit(index) for index in indices]
        lacking = {s.name for s in sides if any(s.name not in one["sides"] for one in found)}
        todo = [s for s in sides if s.name in lacking - self.folder.absent.keys()]
        if not todo:
            return
        cases = [self.bed.case(index) for index in indices]
        for name, rows in self.rows(cases, todo):
            for one, row in zip(found, rows, strict=True):
                one["sides"].setdefault(name, row)
        for case, one in zip(cases, found, strict=True):
            self.folder.keep(case.index, one | self.about(case))

    def about(self, case: Case) -> Row:
        edit = case.edit
        return {
            "prompt": edit.prompt,
            "masked": float(edit.mask.mean()),
            "masked_sites": float(case.sites.float().mean()),
            "painted": self.judge.seen(edit.wanted, edit.thing),
        }

    def rows(self, cases: Sequence[Case], todo: Sequence[Side]) -> Iterator[tuple[str, list[Row]]]:
        """Dense, then group after group in another order each time, their sides too."""
        dense = self.bed.dense(cases)
        for case in cases:
            if case.index < PICTURED:
                self.folder.keep_pictures(case)
        turn = cases[0].index // len(cases)
        ordered = sorted(todo, key=lambda side: side.group)
        groups = [list(members) for _, members in groupby(ordered, key=lambda side: side.group)]
        shift = turn % len(groups)
        for members in groups[shift:] + groups[:shift]:
            if turn % 2:
                members.reverse()
            with self.opened(cases, members[0]) as opened:
                made = {
                    side: some
                    for side in members
                    if (some := self.made(side, cases, opened, dense)) is not None
                }
            for side, some in made.items():
                own = zip(cases, some, dense, strict=True)
                yield side.name, [self.row(side, *each, opened) for each in own]

    def row(self, side: Side, case: Case, made: Made, dense: Made, opened: Opened | None) -> Row:
        row = self.judge.row(case, made, dense.pixels)
        row["dense_seconds"] = dense.seconds
        row["dense_whole_seconds"] = dense.whole_seconds
        if side.ours and opened is not None:
            row |= {"record_seconds": opened.seconds, "template_bytes": opened.nbytes}
        if case.index < PICTURED:
            self.folder.keep_picture(case.index, side.name, made.pixels)
        return row

    @contextmanager
    def opened(self, cases: Sequence[Case], first: Side) -> Iterator[Opened | None]:
        if first.kept is None:
            yield None
            return
        with self.ours.opened(cases, first.kept, records=not first.cold) as opened:
            yield opened

    def made(
        self, side: Side, cases: Sequence[Case], opened: Opened | None, dense: list[Made]
    ) -> list[Made] | None:
        """A baseline that a model doesn't take, or that isn't installed, is left out; a line has
        why. Ours must work.
        """
        if side.name == DENSE:
            return dense
        try:
            return side.make(self.bed, self.ours, cases, opened)
        except Exception as error:
            if side.ours or side.family in ("dense", "fewer steps", "crop"):
                raise
            self.folder.leave_out(side.name, harness.describe(error))
            return None


def go_on(contest: Contest, sides: Sequence[Side], groups: Sequence[range]) -> None:
    """Warm up, then every edit; those of a group are made together."""
    names = [side.name for side in sides]
    left = [g for g in groups if any(contest.folder.lacks(i, names) for i in g)]
    if left:
        warm_up(contest, sides, len(left[0]))
    begun = time.monotonic()
    for done, group in enumerate(left, 1):
        contest.run(group, sides)
        spent = (time.monotonic() - begun) / done
        print(f"edits to {group[-1]}: {spent:.0f} s each time, {len(left) - done} left", flush=True)


def warm_up(contest: Contest, sides: Sequence[Side], together: int) -> None:
    """Captures and first calls are no part of any time."""
    bed, ours = contest.bed, contest.ours
    cases = [bed.case(WARM_UP + i) for i in range(together)]
    bed.dense(cases)
    for stretches in {side.kept.stretches for side in sides if side.kept is not None}:
        first = next(s for s in sides if s.kept is not None and s.kept.stretches == stretches)
        with contest.opened(cases, first) as opened:
            first.make(bed, ours, cases, opened)


def report(folder: Folder, sides: Sequence[Side], edits: int, out: Path, name: str) -> None:
    families = {side.name: side.family for side in sides}
    result = {**folder.about(), **summary(folder.edits(edits), families)}
    harness.write_json(out / f"quality-{name}.json", result)
    print(table(result))
    draw_frontiers(result, out / f"quality-{name}-frontier.png")
    draw_pictures(folder, result, out / f"quality-{name}-pictures.png")


def part(text: str) -> tuple[int, int]:
    """I/N: the I-th of N processes, from 1."""
    number, _, count = text.partition("/")
    if not (number.isdigit() and count.isdigit() and 1 <= int(number) <= int(count)):
        raise argparse.ArgumentTypeError(f"{text!r}: give I/N, such as 1/2 and 2/2")
    return int(number), int(count)


def settings_of(options: argparse.Namespace, origin: Any) -> dict[str, Any]:
    """What all edits of a folder must have in common."""
    weights = torch.cat([p.detach().flatten().double() for p in denoiser_weights(origin)])
    measured = production_ratios() is not None
    return {
        "model": options.model,
        "steps": options.steps,
        "threads": options.threads,
        "processes": options.part[1],
        "together": options.together,
        "compiled_as": options.compiled_as,
        "weights": f"{weights.numel()} numbers, {weights.sum():.9g}, {weights.abs().sum():.9g}",
        "mask_ratios": "those of the service" if measured else "the distribution fitted to them",
    }


def denoiser_weights(pipe: Any) -> list[nn.Parameter]:
    found: nn.Module = pipe.unet if hasattr(pipe, "unet") else pipe.transformer
    return list(found.parameters())


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="bench.quality",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
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
    parser.add_argument("--together", type=int, default=1, help="so many edits share a step")
    parser.add_argument("--part", type=part, default=(1, 1), help="of the edits: 1/2, 2/2")
    parser.add_argument("--report", action="store_true", help="only of what the folder has")
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
    if not options.report:
        folder.begin(harness.header("bench.quality", arguments))
    told = call_of(options.pipelines / options.model)
    bed = Bed(options.model, origin, options.steps, told)
    ours = Ours(bed, **dict.fromkeys(options.compiled_as, True))
    number, count = options.part
    contest = Contest(bed, ours, Judge(options.runs), folder)
    starts = range(0, options.edits, options.together)
    groups = [range(i, min(i + options.together, options.edits)) for i in starts]
    if not options.report:
        go_on(contest, sides, groups[number - 1 :: count])
    assert sides[0].name == DENSE, "the reference comes first"
    report(folder, sides, options.edits, options.out, options.model)
    return 0
