"""Runs batches of random composition on a shipped model, and reports what each step took.

Owns the requests and the engine; knows nothing of predictions. CPU seconds are those of the
thread that computes the step, from its start to its end: with one thread for operators
(OMP_NUM_THREADS=1) they don't contain the time that other programs of the machine get. These slow
it down all the same, by shared caches and memory, so a fixed piece of work is timed after each
step, in the same thread: `reference`.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from PIL import Image

import maskfx
from bench.engine.bed import smooth_picture
from bench.masks import strokes
from maskfx.engine.engine import Engine
from maskfx.engine.step_runner import Step
from maskfx.engine.ticket import Ticket
from maskfx.pipelines.compile import pipeline_state_of
from maskfx.pipelines.quality import Quality
from maskfx.runtime.cache.tiers import Tiers
from maskfx.runtime.step_kinds import StepKind
from maskfx.scheduling.step_reports import StepMember
from maskfx.serve.models.model_counters import shares_of
from maskfx.serve.models.pipeline_model import members_of
from maskfx.shipped import reference

SITE = 8  # pixels
STEPS = 5
SIZES = (192, 256, 320)
KINDS = {StepKind.EDIT: 0.6, StepKind.DENSE: 0.15, StepKind.REUSE: 0.15, StepKind.RECORD: 0.1}
HOST_BYTES = 2 << 30
LOG_MEAN, LOG_SD = -2.345, 0.572  # of production mask ratios, fitted
TOGETHER = 30.0  # seconds that a step waits for requests that are about to submit a call


class StepSeen(msgspec.Struct, frozen=True):
    """A step: which composition it belongs to, what its members computed, and what it took."""

    run: int  # number of the composition
    members: list[StepMember]
    seconds: float
    cpu: float
    turn: int = 0  # how often the composition had run before
    step: int = 0  # number of the step in this run
    reference: float = 0.0  # CPU seconds of the reference work after it


@dataclass(frozen=True)
class Asked:
    """A request of a composition."""

    kind: StepKind
    pixels: int
    share: float  # of the picture that is masked


def drawn(draw: np.random.Generator, most: int) -> list[Asked]:
    """Return the requests of one composition; one in three has a single size."""
    count = int(draw.integers(1, most + 1))
    sizes = draw.choice(SIZES, count)
    if draw.random() < 1 / 3:
        sizes[:] = sizes[0]
    kinds = draw.choice(list(KINDS), count, p=list(KINDS.values()))
    shares = np.clip(np.exp(draw.normal(LOG_MEAN, LOG_SD, count)), 0.01, 0.6)
    return [
        Asked(StepKind(kind), int(size), float(share))
        for kind, size, share in zip(kinds, sizes, shares, strict=True)
    ]


class Reference:
    """Fixed work of the kinds that a step has: a convolution, products, attention."""

    def __init__(self) -> None:
        draw = torch.Generator().manual_seed(0)
        self._picture = torch.randn(2, 128, 32, 32, generator=draw)
        self._kernel = torch.randn(128, 128, 3, 3, generator=draw)
        self._rows = torch.randn(1024, 512, generator=draw)
        self._weight = torch.randn(512, 2048, generator=draw)
        self._heads = torch.randn(2, 4, 1024, 64, generator=draw)

    @torch.no_grad()
    def seconds(self) -> float:
        """Return the CPU seconds that it takes now; the median of three."""
        return statistics.median(self._once() for _ in range(3))

    def _once(self) -> float:
        began = time.thread_time()
        torch.conv2d(self._picture, self._kernel, padding=1)
        torch.nn.functional.silu(self._rows @ self._weight)
        torch.nn.functional.scaled_dot_product_attention(self._heads, self._heads, self._heads)
        return time.thread_time() - began


class Bed:
    """A shipped pipeline behind an engine."""

    def __init__(self, name: str, most: int) -> None:
        self.name, self._calls = name, 0
        self.pipe = reference(name)
        self.pipe.set_progress_bar_config(disable=True)
        quality = replace(Quality.of("all-steps"), patches=0.1)
        maskfx.compile(self.pipe, tiers=Tiers(host_bytes=HOST_BYTES), quality=quality)
        self.seen: list[StepSeen] = []
        self._run, self._turn = -1, 0
        self._reference = Reference()
        policy = maskfx.BatchPolicy(patience=TOGETHER, batch=most)
        self.engine = Engine(policy, running=most, told=self._told)
        self._ready()

    def _ready(self) -> None:
        """Compile, and make one request of each kind and size, so that no step captures."""
        for pixels in SIZES:
            for kind in (StepKind.RECORD, StepKind.EDIT, StepKind.DENSE, StepKind.REUSE):
                self._submit(Asked(kind, pixels, 0.1), number=0).result()
        self.seen.clear()
        for denoiser in pipeline_state_of(self.pipe).denoisers.values():
            denoiser.level_shares = shares_of(denoiser, across := max(SIZES) // SITE, across)
        self._kept = {stored.name for stored in self.pipe.templates()}

    def run(self, number: int, composition: Sequence[Asked], turn: int = 0) -> None:
        """Make the requests of a composition together; the same ones in each turn."""
        self._run, self._turn = number, turn
        tickets = [
            self._submit(asked, 100 * (number + 1) + i) for i, asked in enumerate(composition)
        ]
        for ticket in tickets:
            ticket.result()
        for stored in self.pipe.templates():  # those of recordings are pinned
            if stored.pinned and stored.name not in self._kept:
                self.pipe.forget(stored.name)

    def close(self) -> None:
        self.engine.close()

    def _told(self, step: Step) -> None:
        at = len(self.seen)
        members, took = members_of(step), self._reference.seconds()
        self.seen.append(StepSeen(self._run, members, step.seconds, step.cpu, self._turn, at, took))

    def _submit(self, asked: Asked, number: int) -> Ticket:
        self._calls += 1
        whole = asked.kind in (StepKind.DENSE, StepKind.REUSE)
        picture = self._calls if asked.kind is StepKind.RECORD else 0
        given: dict[str, Any] = {
            "prompt": "a red circle",
            "image": smooth_picture(asked.pixels, 1000 * picture + asked.pixels),
            "height": asked.pixels,
            "width": asked.pixels,
            "num_inference_steps": STEPS,
            "strength": 1.0,
            "generator": torch.Generator().manual_seed(number),
        }
        if asked.kind is StepKind.RECORD:
            return self.engine.record(self.pipe, **given)
        across = asked.pixels // SITE
        mask = np.ones((across, across), np.bool_)
        quality = Quality.of("all-steps")
        if whole:
            quality = replace(quality, reuse="steps", refresh=1)
            if asked.kind is StepKind.REUSE:
                quality = replace(quality, patches=maskfx.PatchReuse(0.1, first=2))
        else:
            mask = strokes(across, across, asked.share, seed=number).numpy()
        pixels = mask.repeat(SITE, 0).repeat(SITE, 1).astype(np.uint8) * 255
        given |= {"mask_image": Image.fromarray(pixels), "quality": quality}
        return self.engine.submit(self.pipe, **given)


def measure(name: str, compositions: int, most: int, seed: int, path: Path, turns: int = 1) -> None:
    """Run random compositions on a shipped model, and write their steps to a file of lines.

    All run once, then all again, `turns` times: equal steps are minutes apart.
    """
    draw = np.random.default_rng(seed)
    asked = [drawn(draw, most) for _ in range(compositions)]
    bed = Bed(name, most)
    try:
        with path.open("wb", buffering=0) as file:
            for turn in range(turns):
                for number, composition in enumerate(asked):
                    bed.run(number, composition, turn)
                    file.write(b"".join(msgspec.json.encode(one) + b"\n" for one in bed.seen))
                    bed.seen.clear()
                    print(f"{name}: {number + 1} of {compositions}, turn {turn + 1}", flush=True)
    finally:
        bed.close()
