"""Steps that other processes compute name the recording that the request reads next."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from maskfx import CompiledDenoiser, EditStep
from maskfx.pipelines.compile import pipeline_state_of
from maskfx.pipelines.runs.execute import execute
from maskfx.pipelines.templates.template_library import TemplateLibrary
from maskfx.runtime.cache import stored_steps
from maskfx.runtime.cache.serialize import LENGTH
from maskfx.runtime.cache.stores.store import Store
from maskfx.runtime.cache.tiers import Tiers
from maskfx.runtime.step_executor import SharedAdapters
from maskfx.runtime.steps import AnyStep
from tests.factories.pipelines import PIPES, anew, call_of, latents, square

NAME = "FluxInpaintPipeline"


def edit() -> dict[str, Any]:
    return call_of(PIPES[NAME], 0, square())


class Noting:
    """Computes steps here and keeps the edits among them."""

    joint = False

    def __init__(self) -> None:
        self.edits: list[EditStep] = []

    def run(
        self,
        denoiser: CompiledDenoiser,
        steps: Sequence[AnyStep],
        shared: SharedAdapters | None = None,
    ) -> list[Any]:
        self.edits += [step for step in steps if isinstance(step, EditStep)]
        return list(denoiser.step(steps))


def test_rows_in_a_store_are_named_a_step_ahead(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stored_steps, "BEGINNING", LENGTH.size)  # no rows are read with the header
    tiers = Tiers(Store(tmp_path), host_bytes=1 << 30)
    library = TemplateLibrary(tiers)
    wanted = latents(anew(NAME, library=library), **edit())
    (template,) = library.stored_templates()
    tiers.close()
    tiers = Tiers(Store(tmp_path), host_bytes=1 << 30)
    pipe, noting = anew(NAME, library=TemplateLibrary(tiers)), Noting()
    state = pipeline_state_of(pipe)
    for denoiser in state.denoisers.values():
        denoiser.reads_apart = True
    state.execute = lambda calls: execute(calls, executors=lambda _: noting)
    state.prepared_library().prefetch(template.name)
    before = 0
    while not before or tiers.counters().loads > before:  # then all but the rows is in memory
        before = tiers.counters().loads
        time.sleep(0.5)
    assert (latents(pipe, **edit()) - wanted).abs().max() < 1e-4
    caches = [step.cache for step in noting.edits]
    assert len(caches) > 2
    assert [id(step.then) for step in noting.edits] == [*map(id, caches[1:]), id(None)]
