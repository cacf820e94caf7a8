"""Decides whether encoders and VAE run in a helper process, by what is faster on this machine.

After the warm-up the same edits run on an engine of each kind. The times are kept beside the
compiled programs, for the next start of the same model on the same machine.
"""

from __future__ import annotations

import json
import logging
import os
import secrets
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

import maskfx
from maskfx.engine.engine import Engine
from maskfx.engine.processes.helper_processes import HelperProcesses
from maskfx.engine.processes.placement import InRequestThreads, Placement, parts_around
from maskfx.ir import progress
from maskfx.pipelines.compile import pipeline_state_of
from maskfx.pipelines.digests import digest
from maskfx.runtime.transport.sendable import on_cpu
from maskfx.serve.models.canvas import Canvas
from maskfx.serve.models.pipeline_set import PipelineSet
from maskfx.serve.models.warmup import STEPS, arguments_of, scene, square_on

FILE = "helpers.json"
FASTER = 0.95  # share of the time from which a helper process is worth its memory
TOGETHER = 3  # edits, of different numbers of steps, so that some decode while others step
ROUNDS = 3
SECONDS = 20.0  # after which no further round begins

log = logging.getLogger(__name__)

EngineWith = Callable[[Placement], Engine]


@dataclass(frozen=True)
class HelperTimes:
    """Seconds of the same edits, run together."""

    threads: float  # encoders and VAE in the requests' threads
    helper: float  # in a helper process

    @property
    def helps(self) -> bool:
        return self.helper < FASTER * self.threads


def helper_pays(
    family: PipelineSet, engine_with: EngineWith, running: int, programs: Path | None
) -> bool:
    """Return True if edits are faster with a helper process.

    Args:
        family: The pipelines, warmed up.
        engine_with: Creates an engine with a placement, and without an encoder cache.
        running: Maximum number of requests that run at once.
        programs: Directory of the compiled programs, which keeps the times; None keeps none.
    """
    if why := unsuited(family, running):
        log.info("encoders and VAE run in the requests' threads: %s", why)
        return False
    key = key_of(family)
    times = None if programs is None else kept(programs / FILE).get(key)
    if times is None:
        try:
            with progress.work("helpers", "edits with and without a helper process"):
                times = measured(family, engine_with)
        except Exception:  # a measurement must not keep the model from being served
            log.exception("encoders and VAE run in the requests' threads: the measurement failed")
            return False
        if programs is not None:
            keep(programs / FILE, key, times)
    where = "a helper process" if times.helps else "the requests' threads"
    log.info(
        "encoders and VAE run in %s: %d edits take %.2f s with a helper process, %.2f s without",
        where,
        TOGETHER,
        times.helper,
        times.threads,
    )
    return times.helps


def unsuited(family: PipelineSet, running: int) -> str | None:
    """Return why a helper process can't be faster; None if it may be."""
    if running == 1:
        return "one request runs at a time"
    if torch.get_num_threads() == 1:
        return "there is one core"
    pipe = family.main.pipe
    parts = parts_around(pipe, pipeline_state_of(pipe).denoisers).values()
    if not any(isinstance(part, nn.Module) and on_cpu(part) for part in parts):
        return "they are on a device, and helper processes compute on the CPU"
    return None


def measured(family: PipelineSet, engine_with: EngineWith) -> HelperTimes:
    """Run the same edits on an engine of each kind, in turn; return the shortest times."""
    began = time.monotonic()
    spent: dict[bool, list[float]] = {False: [], True: []}
    with engine_with(InRequestThreads()) as threads, engine_with(HelperProcesses()) as helper:
        engines = {False: threads, True: helper}
        for engine in engines.values():
            run_edits(family, engine, 1)  # sends the components, creates thread pools
        for round_ in range(ROUNDS):
            order = (False, True) if round_ % 2 == 0 else (True, False)
            for kind in order:
                spent[kind].append(run_edits(family, engines[kind], TOGETHER))
            if time.monotonic() - began > SECONDS:
                break
    return HelperTimes(min(spent[False]), min(spent[True]))


def run_edits(family: PipelineSet, engine: Engine, count: int) -> float:
    """Return the seconds of `count` edits together, or of generations if the model edits none."""
    member = family.main
    quality = replace(pipeline_state_of(member.pipe).quality, reuse="steps", refresh=1, every=1)
    began = time.perf_counter()
    tickets = []
    for index in range(count):
        given: dict[str, Any] = {}
        canvas = Canvas.blank(family.size(), family.multiple)
        if family.editor is not None:  # without a template, which would be recorded first
            canvas = square_on(scene(index, family.size()), family.multiple)
            given = {"image": canvas.image(), "mask_image": canvas.mask_image(), "quality": quality}
        given = arguments_of(member, canvas, STEPS + index) | given
        tickets.append(engine.submit(member.pipe, **given))
    for ticket in tickets:
        ticket.result()
    return time.perf_counter() - began


# Kept times.


def key_of(family: PipelineSet) -> str:
    """Return a digest of what the times depend on."""
    pipe = family.main.pipe
    versions = [maskfx.__version__, torch.__version__]
    cores = [torch.get_num_threads(), os.cpu_count(), os.uname().machine]
    return digest([pipeline_state_of(pipe).digest(pipe), list(family.size()), versions, cores])[:32]


def kept(path: Path) -> dict[str, HelperTimes]:
    """Read the kept times; none if the file is absent or damaged."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        return {
            key: HelperTimes(float(each["threads"]), float(each["helper"]))
            for key, each in found.items()
        }
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return {}


def keep(path: Path, key: str, times: HelperTimes) -> None:
    every = {one: asdict(each) for one, each in (kept(path) | {key: times}).items()}
    fresh = path.with_name(f"{path.name}.{secrets.token_hex(4)}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        fresh.write_text(json.dumps(every), encoding="utf-8")
        os.replace(fresh, path)
    except OSError as error:
        log.warning("the times with and without a helper process can't be kept: %s", error.strerror)
        with suppress(OSError):
            fresh.unlink()
