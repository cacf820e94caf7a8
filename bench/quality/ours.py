"""maskfx's sides: compiled copies of the pipeline, a template per edit, and `quality=` settings."""

from __future__ import annotations

import copy
import ctypes
import functools
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

import maskfx
from bench.quality.bed import Bed, Case, Made
from maskfx.pipelines.compile import pipeline_state_of
from maskfx.pipelines.quality import Quality
from maskfx.pipelines.templates.template_library import TemplateLibrary
from maskfx.runtime.cache.tiers import Tiers
from maskfx.runtime.templates.footprint import ENCODINGS

HOST_BYTES = 8 << 30


@dataclass(frozen=True)
class Kept:
    """How a template is recorded and kept; edits of one template share it."""

    encoding: str = "lossless"
    share: int = 1
    stretches: bool = False
    steps: int | None = None  # as many as dense unless set otherwise
    any_mask: bool = False  # recorded with nothing masked


@dataclass(frozen=True)
class Opened:
    """Recorded templates, one per edit. Seconds are the denoiser's while one was recorded."""

    templates: Sequence[Any]
    seconds: float
    nbytes: int


class Ours:
    """Compiled copies of a pipeline, one per kind of graph; edits meet in an engine's steps."""

    def __init__(self, bed: Bed, **compiled_as: Any) -> None:
        self.bed = bed
        self.compiled_as = compiled_as
        self._pipes: dict[bool, Any] = {}
        self._background: Any = None

    def pipe(self, stretches: bool) -> Any:
        if stretches not in self._pipes:
            # templates that hold all steps serve every side
            settings = {"quality": "all-steps", "stretches": stretches, **self.compiled_as}
            made = maskfx.compile(copy.deepcopy(self.bed.origin), **settings)
            shared = pipeline_state_of(made)
            shared.call = self._with_background(shared.call)
            self._pipes[stretches] = made
        return self._pipes[stretches]

    def _with_background(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """All recordings have one noise; here they get the noise that the dense run has there.

        Edits bring latents of their own, recordings none.
        """

        @functools.wraps(call)
        def told(pipe: Any, **arguments: Any) -> Any:
            return call(pipe, **{"latents": self._background, **arguments})

        return told

    @contextmanager
    def opened(self, cases: Sequence[Case], kept: Kept, records: bool) -> Iterator[Opened]:
        """With templates of these edits' pictures, or with none; afterwards they are gone."""
        pipe = self.pipe(kept.stretches)
        shared = pipeline_state_of(pipe)
        tiers = Tiers(host_bytes=HOST_BYTES, encoding=ENCODINGS[kept.encoding])
        shared.library = TemplateLibrary(tiers, kept.share, "both")
        shared.quality = replace(shared.quality, any_mask=kept.any_mask)
        try:
            if not records:
                yield Opened([None] * len(cases), 0.0, 0)
                return
            with maskfx.Engine(running=1) as engine:
                templates = [self._record(engine, pipe, case, kept) for case in cases]
                seconds = sum(step.seconds for step in engine.steps)
            size = sum(tiers.counters().nbytes.values())
            yield Opened(templates, seconds / len(cases), size // len(cases))
        finally:
            shared.library = TemplateLibrary(Tiers(host_bytes=0))
            tiers.close()
            give_memory_back()

    def _record(self, engine: maskfx.Engine, pipe: Any, case: Case, kept: Kept) -> Any:
        arguments = self._arguments(case, kept)
        del arguments["latents"]
        self._background = self.bed.given(case.background)
        return engine.record(pipe, **arguments).result()

    def edit(
        self, cases: Sequence[Case], kept: Kept, opened: Opened, quality: Quality
    ) -> list[Made]:
        """All edits at once; they fail rather than run densely without being asked to."""
        pipe, count = self.pipe(kept.stretches), len(cases)
        shared = pipeline_state_of(pipe)
        shared.notes.clear()
        waiting = maskfx.BatchPolicy(batch=count, patience=5.0)
        with maskfx.Engine(waiting, running=count) as engine:
            start = time.perf_counter()
            tickets = [
                engine.submit(
                    pipe, **self._arguments(case, kept), template=template, quality=quality
                )
                for case, template in zip(cases, opened.templates, strict=True)
            ]
            pictures = [np.asarray(ticket.result().images[0]) for ticket in tickets]
            whole = (time.perf_counter() - start) / count
            seconds = sum(step.seconds for step in engine.steps) / count
            calls = len(engine.steps)
        if shared.notes:
            raise RuntimeError(f"edit {cases[0].index}, {quality}: {dict(shared.notes)}")
        for case, pixels in zip(cases, pictures, strict=True):
            outside = ~case.edit.mask
            if not np.array_equal(pixels[outside], case.edit.pixels[outside]):
                raise RuntimeError(f"edit {case.index}, {quality}: pixels outside it changed")
        return [Made(pixels, seconds, whole, calls) for pixels in pictures]

    def _arguments(self, case: Case, kept: Kept) -> dict[str, Any]:
        steps = self.bed.steps if kept.steps is None else kept.steps
        latents = self.bed.given(case.latents())
        return self.bed.arguments(case) | {"num_inference_steps": steps, "latents": latents}


def give_memory_back() -> None:
    """Dropped recordings lie in glibc's heap otherwise, in pieces that the next ones rarely fit."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
