"""Templates on disk are read while the requests that edit them wait."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import maskfx
from maskfx.pipelines.compile import read_ahead
from maskfx.pipelines.templates.template_library import TemplateLibrary
from maskfx.runtime.cache.stores.store import Store
from maskfx.runtime.cache.tiers import Tiers
from tests.factories.pipelines import PIPES, anew, call_of, latents, picture, square

NAME = "FluxInpaintPipeline"


def edit(**more: Any) -> Any:
    return call_of(PIPES[NAME], 0, square(), **more)


def over(folder: Path) -> tuple[Any, Tiers]:
    """A pipeline whose templates are in a folder, with nothing in memory yet."""
    tiers = Tiers(Store(folder), host_bytes=1 << 30)
    return anew(NAME, library=TemplateLibrary(tiers)), tiers


def test_what_waits_in_the_queue_is_read_meanwhile(tmp_path: Path) -> None:
    pipe, _ = over(tmp_path)
    wanted = latents(pipe, **edit())
    pipe, tiers = over(tmp_path)
    held, arrived = threading.Event(), threading.Event()

    def stay(pipe: Any, step: int, at: Any, tensors: dict[str, Any]) -> dict[str, Any]:
        arrived.set()
        assert held.wait(60)
        return {}

    first = edit(image=picture(3), callback_on_step_end=stay)
    with maskfx.Engine(running=1) as engine:
        busy = engine.submit(over(tmp_path)[0], **first)
        assert arrived.wait(60)
        waiting = engine.submit(pipe, **edit(output_type="latent", return_dict=False))
        until = time.monotonic() + 30
        while not tiers.counters().loads:
            assert time.monotonic() < until, "not read while it waits"
            time.sleep(0.01)
        held.set()
        busy.result()
        assert (waiting.result()[0] - wanted).abs().max() < 1e-4


def test_nothing_is_read_for_what_is_not_recorded(tmp_path: Path) -> None:
    pipe, tiers = over(tmp_path)
    assert not read_ahead(pipe, (), edit())
    assert not read_ahead(pipe, (), {"no such": "argument"})
    assert not tiers.counters().loads
    latents(pipe, **edit())
    again, _ = over(tmp_path)
    assert read_ahead(again, (), edit())
    assert not read_ahead(again, (), edit(image=picture(4)))
