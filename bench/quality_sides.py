"""The sides of bench.quality: what each is called, what family it is of, and how it makes an edit.

Sides of one group are timed next to one dense run of their own; ours of one group share a template.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase

import numpy as np
from PIL import Image

from bench.quality_bed import Bed, Case, Made
from bench.quality_caches import CACHES
from bench.quality_ours import Kept, Opened, Ours
from bench.reference.scenes import SIDE
from maskfx.pipelines.quality import NAMED, Quality

DENSE, BACKGROUND = "dense", "dense, other background"
# what a cut-out's edges must be divisible by: the autoencoder's factor times the denoiser's own
CUT_EDGES = {"unet": 32, "dit": 16}


@dataclass(frozen=True)
class Side:
    """`kept` and `quality` are ours alone."""

    name: str
    family: str
    run: Callable[[Bed, Case], Made] | None = None
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

    def make(self, bed: Bed, ours: Ours, case: Case, opened: Opened | None) -> Made:
        if self.kept is not None and self.quality is not None:
            assert opened is not None, "our sides need an opened shelf"
            return ours.edit(case, self.kept, opened, self.quality)
        assert self.run is not None, "a side that isn't ours says how it runs"
        made = self.run(bed, case)
        return replace(made, pixels=case.laid_over(made.pixels))


def sides_of(steps: int) -> list[Side]:
    """Every side that there is, the reference first."""
    return [
        Side(DENSE, "dense", lambda bed, case: bed.run(case)),
        Side(BACKGROUND, "dense", other_background),
        *ours_of(steps),
        *(Side(f"{n} steps", "fewer steps", fewer(n)) for n in fewer_of(steps)),
        *(Side(f"crop, {n} pixels around", "crop", cropped(n)) for n in (0, 32, 64)),
        *(Side(name, cache.family, with_cache(name)) for name, cache in CACHES.items()),
    ]


def ours_of(steps: int) -> list[Side]:
    """Settings one by one, those of a name, and some together."""
    plain, wide = Kept(), Kept(stretches=True)

    def of(name: str, kept: Kept = plain, **quality: int | str) -> Side:
        return Side(f"ours, {name}", "ours", None, kept, Quality(**quality))  # type: ignore[arg-type]

    return [
        of("balanced"),
        Side("ours, faithful", "ours", None, plain, NAMED["faithful"]),
        *(of(f"first={n}", first=n) for n in (1, 2, 4)),
        *(of(f"margin={n}", margin=n) for n in (1, 2)),
        of("last=2", last=2),
        of("first=1 margin=1", first=1, margin=1),
        of("first=4 margin=2", first=4, margin=2),
        *(of(f"wide={n}", wide, wide=n) for n in (1, 2)),
        *(of(f"any mask, first={n}", Kept(any_mask=True), first=n) for n in (0, 1, 2)),
        of("any mask, margin=1", Kept(any_mask=True), margin=1),
        of("any mask, first=1 margin=1", Kept(any_mask=True), first=1, margin=1),
        of("16bit", Kept("16bit")),
        of("8bit", Kept("8bit")),
        of("8bit first=2 margin=1", Kept("8bit"), first=2, margin=1),
        of("share=2", Kept(share=2)),
        of("8bit share=4", Kept("8bit", share=4)),
        *(of(f"cold, refresh={n}", reuse="steps", refresh=n) for n in (2, 4, 8)),
        *(of(f"{n} steps", Kept(steps=n)) for n in fewer_of(steps)[::2]),
        *(of(f"{n} steps margin=1", Kept(steps=n), margin=1) for n in fewer_of(steps)[::2]),
    ]


def fewer_of(steps: int) -> list[int]:
    """Counts from most of the steps down to few."""
    found = (round(steps * part) for part in (0.8, 0.64, 0.48, 0.36, 0.28, 0.2, 0.12))
    return sorted({max(2, n) for n in found if n < steps}, reverse=True)


def fewer(steps: int) -> Callable[[Bed, Case], Made]:
    return lambda bed, case: bed.run(case, num_inference_steps=steps)


def other_background(bed: Bed, case: Case) -> Made:
    """The same noise inside the mask, another one outside: what doesn't concern the edit."""
    return bed.run(case, latents=case.latents(case.other_background()))


def with_cache(name: str) -> Callable[[Bed, Case], Made]:
    def run(bed: Bed, case: Case) -> Made:
        with CACHES[name].put_on(bed):
            return bed.run(case)

    return run


# Cutting out the masked region and ignoring the rest.


def cropped(around: int) -> Callable[[Bed, Case], Made]:
    def run(bed: Bed, case: Case) -> Made:
        left, top, right, bottom = cut_box(case.edit.mask, around, CUT_EDGES[bed.name])
        box, rows, columns = (left, top, right, bottom), slice(top, bottom), slice(left, right)
        made = bed.run(
            case,
            image=case.image.crop(box),
            mask_image=Image.fromarray(case.edit.mask[rows, columns]),
            latents=case.latents()[..., top // 8 : bottom // 8, left // 8 : right // 8],
            height=bottom - top,
            width=right - left,
        )
        pixels = case.edit.pixels.copy()
        pixels[rows, columns] = made.pixels
        return replace(made, pixels=pixels)

    return run


def cut_box(mask: np.ndarray, around: int, edge: int) -> tuple[int, int, int, int]:
    """Left, top, right, bottom of what holds the mask and so many pixels around it."""

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
