"""maskfx's sides: compiled copies of the pipeline, a template per edit, and `quality=` settings."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

import maskfx
from bench.quality_bed import Bed, Case, Clock, Made, timed_call
from maskfx.footprint import ENCODINGS
from maskfx.pipelines.compiled import works_of
from maskfx.pipelines.quality import Quality
from maskfx.pipelines.shelf import Shelf
from maskfx.runtime.tiers import Tiers

HOST_BYTES = 8 << 30


@dataclass(frozen=True)
class Kept:
    """How a template is recorded and kept; edits of one template share it."""

    encoding: str = "lossless"
    share: int = 1
    stretches: bool = False
    steps: int | None = None  # as many as dense unless told otherwise
    any_mask: bool = False  # recorded with nothing masked


@dataclass(frozen=True)
class Opened:
    """A recorded template of one edit. Seconds are the denoiser's while it was recorded."""

    template: Any
    seconds: float
    nbytes: int


class Ours:
    """Compiled copies of a pipeline, one per kind of graph."""

    def __init__(self, bed: Bed, **compiled_as: Any) -> None:
        self.bed = bed
        self.compiled_as = compiled_as
        self._pipes: dict[bool, Any] = {}
        self._clocks: dict[bool, Clock] = {}
        self._background: Any = None

    def pipe(self, stretches: bool) -> Any:
        if stretches not in self._pipes:
            made = maskfx.compile(
                copy.deepcopy(self.bed.origin), stretches=stretches, **self.compiled_as
            )
            works = works_of(made)
            clock = self._clocks[stretches] = Clock()
            works.execute = clock.around(works.execute)
            works.call = self._with_background(works.call)
            self._pipes[stretches] = made
        return self._pipes[stretches]

    def _with_background(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """A recording draws its noise from its name; here it gets the noise that dense has there.

        Edits bring latents of their own, recordings none.
        """

        @functools.wraps(call)
        def told(pipe: Any, **arguments: Any) -> Any:
            return call(pipe, **{"latents": self._background, **arguments})

        return told

    @contextmanager
    def opened(self, case: Case, kept: Kept, records: bool) -> Iterator[Opened]:
        """With a template of this edit's picture, or with none; afterwards it is gone."""
        pipe = self.pipe(kept.stretches)
        works, clock = works_of(pipe), self._clocks[kept.stretches]
        tiers = Tiers(host_bytes=HOST_BYTES, encoding=ENCODINGS[kept.encoding])
        works.shelf = Shelf(tiers, kept.share, "both")
        works.quality = replace(works.quality, any_mask=kept.any_mask)
        self._background = case.background
        try:
            if not records:
                yield Opened(None, 0.0, 0)
                return
            arguments = self.bed.arguments(case, num_inference_steps=self._steps(kept))
            del arguments["latents"]
            clock.reset()
            template = maskfx.template(pipe, **arguments)
            size = sum(tiers.counters().nbytes.values())
            yield Opened(template, clock.seconds, size)
        finally:
            works.shelf = Shelf(Tiers(host_bytes=0))
            tiers.close()

    def edit(self, case: Case, kept: Kept, opened: Opened, quality: Quality) -> Made:
        """One edit; it fails rather than run densely without being asked to."""
        pipe = self.pipe(kept.stretches)
        works = works_of(pipe)
        works.notes.clear()
        arguments = self.bed.arguments(case, num_inference_steps=self._steps(kept))
        arguments |= {"template": opened.template, "quality": quality}
        made = timed_call(pipe, self._clocks[kept.stretches], arguments)
        if works.notes:
            raise RuntimeError(f"edit {case.index}, {quality}: {dict(works.notes)}")
        outside = ~case.edit.mask
        if not np.array_equal(made.pixels[outside], case.edit.pixels[outside]):
            raise RuntimeError(f"edit {case.index}, {quality}: pixels outside the mask changed")
        return made

    def _steps(self, kept: Kept) -> int:
        return self.bed.steps if kept.steps is None else kept.steps
