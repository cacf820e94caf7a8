"""The sides of bench.quality: what each is called, what family it is of, and how it makes an edit.

Sides of one group are timed one after another; ours of one group share a template.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any

import numpy as np
from PIL import Image

from bench.quality.bed import Bed, Case, Made
from bench.quality.caches import CACHES
from bench.quality.ours import Kept, Opened, Ours
from maskfx.pipelines.quality import NAMED, Quality
from training.scenes import SIDE

DENSE, BACKGROUND = "dense", "dense, other background"
# what a cut-out's edges must be divisible by: the autoencoder's factor times the denoiser's own
CUT_EDGES = {"unet": 32, "dit": 16}

EVERY, MARGINS = (2, 3, 4, 5), (0, 1, 2, 4)

Run = Callable[[Bed, Sequence[Case]], list[Made]]


@dataclass(frozen=True)
class Side:
    """`kept` and `quality` are ours alone."""

    name: str
    family: str
    run: Run | None = None
    kept: Kept | None = None
    quality: Quality | None = None

    @property
    def ours(self) -> bool:
        return self.kept is not None

    @property
    def group(self) -> str:
        if self.kept is not None:
            return f"{self.kept} {self.cold}"
        return "caches" if self.name in CACHES else self.family

    @property
    def cold(self) -> bool:
        return self.quality is not None and self.quality.reuse == "steps"

    def make(
        self, bed: Bed, ours: Ours, cases: Sequence[Case], opened: Opened | None
    ) -> list[Made]:
        if self.kept is not None and self.quality is not None:
            assert opened is not None, "our sides need an opened shelf"
            return ours.edit(cases, self.kept, opened, self.quality)
        assert self.run is not None, "a side that isn't ours says how it runs"
        made = self.run(bed, cases)
        return [case.laid(one) for case, one in zip(cases, made, strict=True)]


def sides_of(steps: int) -> list[Side]:
    """Every side that there is, the reference first."""
    return [
        Side(DENSE, "dense"),  # what the others are compared with
        Side(BACKGROUND, "dense", other_background),
        *ours_of(steps),
        *(Side(f"{n} steps", "fewer steps", fewer(n)) for n in fewer_of(steps)),
        *(Side(f"crop, {n} pixels around", "crop", cropped(n)) for n in (0, 32, 64)),
        *(Side(name, cache.family, with_cache(name)) for name, cache in CACHES.items()),
    ]


def ours_of(steps: int) -> list[Side]:
    """Those of a name; the usual ones with one thing changed; none of the others' savings."""
    usual, plain, wide = NAMED["balanced"], Kept(), Kept(stretches=True)

    def side(name: str, kept: Kept, quality: Quality) -> Side:
        kept = replace(kept, any_mask=quality.any_mask)
        return Side(f"ours, {name}", "ours", None, kept, quality)

    def but(name: str, kept: Kept = plain, **changed: Any) -> Side:
        return side(name, kept, replace(usual, **changed))

    return [
        *(side(name, plain, quality) for name, quality in NAMED.items()),
        *(but(f"every={n}, margin={m}", every=n, margin=m) for n in EVERY for m in MARGINS),
        *(but(f"every step, margin={m}", every=1, margin=m) for m in MARGINS),
        but("extrapolated", forecast="output"),
        but("first=2", first=2),
        but("last=2", last=2),
        but("own mask", any_mask=False),
        *(but(f"wide={n}", wide, wide=n) for n in (1, 2)),
        but("16bit", Kept("16bit")),
        but("8bit", Kept("8bit")),
        but("share=3", Kept(share=3)),
        but("8bit share=3", Kept("8bit", share=3)),
        *(but(f"cold, refresh={n}", reuse="steps", refresh=n) for n in (4, 8)),
        but("cold, every step, refresh=4", reuse="steps", refresh=4, every=1),
        *(side(f"all sites, every={n}", plain, every_site(n)) for n in (2, 3, 4)),
        *(but(f"{n} steps, every step", Kept(steps=n), every=1) for n in fewer_of(steps)[::2]),
    ]


def every_site(every: int) -> Quality:
    """No template, no site left out: steps are all that is saved."""
    return Quality(reuse="steps", refresh=1, every=every)


def fewer_of(steps: int) -> list[int]:
    """Counts from most of the steps down to few."""
    found = (round(steps * part) for part in (0.8, 0.64, 0.48, 0.36, 0.28, 0.2, 0.12))
    return sorted({max(2, n) for n in found if n < steps}, reverse=True)


def fewer(steps: int) -> Run:
    return lambda bed, cases: bed.run(cases, lambda case: {"num_inference_steps": steps})


def other_background(bed: Bed, cases: Sequence[Case]) -> list[Made]:
    """The same noise inside the mask, another one outside: what doesn't concern the edit."""
    return bed.run(cases, lambda case: {"latents": case.latents(case.other_background())})


def with_cache(name: str) -> Run:
    def run(bed: Bed, cases: Sequence[Case]) -> list[Made]:
        with CACHES[name].put_on(bed):
            return bed.run(cases)

    return run


# Cutting out the masked region and ignoring the rest.


def cropped(around: int) -> Run:
    """One after another: cut-outs have sizes of their own."""

    def one(bed: Bed, case: Case) -> Made:
        left, top, right, bottom = cut_box(case.edit.mask, around, CUT_EDGES[bed.name])
        box, rows, columns = (left, top, right, bottom), slice(top, bottom), slice(left, right)
        change = {
            "image": case.image.crop(box),
            "mask_image": Image.fromarray(case.edit.mask[rows, columns]),
            "latents": case.latents()[..., top // 8 : bottom // 8, left // 8 : right // 8],
            "height": bottom - top,
            "width": right - left,
        }
        [made] = bed.run([case], lambda _: change)
        pixels = case.edit.pixels.copy()
        pixels[rows, columns] = made.pixels
        return replace(made, pixels=pixels)

    return lambda bed, cases: [one(bed, case) for case in cases]


def cut_box(mask: np.ndarray, around: int, edge: int) -> tuple[int, int, int, int]:
    """Left, top, right, bottom of what holds the mask and a number of pixels around it."""

    def span(line: np.ndarray) -> tuple[int, int]:
        found = np.flatnonzero(line)
        low, high = max(0, int(found[0]) - around), min(SIDE, int(found[-1]) + 1 + around)
        low = low // 8 * 8  # a corner lies on the latent's grid
        size = -(-(high - low) // edge) * edge
        start = low - (low + size - high) // 16 * 8
        start = max(0, min(start, SIDE - size))
        return start, start + size

    rows, columns = np.any(mask, axis=1), np.any(mask, axis=0)
    (top, bottom), (left, right) = span(np.asarray(rows)), span(np.asarray(columns))
    return left, top, right, bottom


def chosen(sides: Iterable[Side], patterns: Iterable[str]) -> list[Side]:
    """Those whose name or family fits a pattern; the reference comes in any case."""
    known, wanted = list(sides), list(patterns)
    for pattern in wanted:
        if not any(fits(side, pattern) for side in known):
            names = ", ".join(sorted({side.family for side in known}))
            raise ValueError(
                f"--sides {pattern!r}: no side has such a name; families are {names}; * and ? work"
            )
    return [s for s in known if s.name == DENSE or any(fits(s, pattern) for pattern in wanted)]


def fits(side: Side, pattern: str) -> bool:
    return fnmatchcase(side.name, pattern) or fnmatchcase(side.family, pattern)
