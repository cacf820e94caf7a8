"""Requests as they come: real mask ratios, sizes, templates, users, arrivals, deadlines.

Owns how a workload is drawn, or read from a recorded trace; knows nothing of how it is served.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from functools import cache
from math import inf
from pathlib import Path

import msgspec
import numpy as np
from numpy.typing import NDArray

from maskfx.errors import InputError
from maskfx.scheduling.cost_model import FittedCosts
from maskfx.scheduling.load import Demand, Work

Floats = NDArray[np.float64]

ROOT = Path(__file__).resolve().parents[2]
MASKS = ROOT.parent / "shared" / "data" / "mask_ratios.json"
# The lists of real ratios that a mix holds, and the log-normals that were fitted to them: what is
# drawn from where the lists aren't there. (weight, mean of the logarithm, its deviation)
MIXES = {
    "production": ("production",),
    "public": ("public", "controlnet_inpaint"),
}
FITTED = {
    "public": (1870, -3.841, 0.830),
    "production": (970, -2.345, 0.572),
    "controlnet_inpaint": (1918, -1.497, 1.180),
}


@dataclass(frozen=True)
class Workload:
    """What is asked, whatever the load."""

    masks: str = "public"
    sides: tuple[int, ...] = (64, 96, 128)  # of the latent; equally likely
    steps: tuple[int, ...] = (50,)  # equally likely
    branches: int = 1
    templates: int = 970
    zipf: float = 1.0
    users: int = 50
    bytes_per_site: float = 0.0  # of a template's rows, per step
    slo: float | None = None  # due after this many times what it takes alone
    slo_most: float | None = None  # drawn evenly from `slo` to this
    burst: float = 1.0  # coefficient of variation between arrivals; 1: Poisson

    def describe(self) -> dict[str, object]:
        return {**asdict(self), "mask_source": mask_source()}


def mask_source() -> str:
    """Where mask ratios are from on this machine."""
    return "real ratios" if MASKS.exists() else "log-normals fitted to the real ratios"


def ratios(mix: str, count: int, draw: np.random.Generator) -> Floats:
    if mix not in MIXES:
        raise InputError(f"masks {mix!r}: choose one of {', '.join(MIXES)}")
    if MASKS.exists():
        lists = json.loads(MASKS.read_text())
        real = np.concatenate([np.asarray(lists[name], np.float64) for name in MIXES[mix]])
        return draw.choice(real, count)
    weights = np.array([FITTED[name][0] for name in MIXES[mix]], np.float64)
    which = draw.choice(len(weights), count, p=weights / weights.sum())
    means = np.array([FITTED[name][1] for name in MIXES[mix]])[which]
    spreads = np.array([FITTED[name][2] for name in MIXES[mix]])[which]
    return np.clip(np.exp(draw.normal(means, spreads)), 0.002, 1.0)


def gaps(count: int, rate: float, burst: float, draw: np.random.Generator) -> Floats:
    """Between arrivals: exponential, or gamma with that coefficient of variation."""
    shape = 1.0 / burst**2
    return draw.gamma(shape, 1.0 / (rate * shape), count)


def popular(templates: int, zipf: float, count: int, draw: np.random.Generator) -> NDArray[np.intp]:
    weights = np.arange(1, templates + 1, dtype=np.float64) ** -zipf
    return draw.choice(templates, count, p=weights / weights.sum())


def shared(workload: Workload, count: int, seed: int) -> Iterator[Work]:
    draw = np.random.default_rng(seed)
    shares = ratios(workload.masks, count, draw)
    sides = draw.choice(workload.sides, count)
    steps = draw.choice(workload.steps, count)
    each = max(1, workload.templates // len(workload.sides))  # templates have one size
    names = popular(each, workload.zipf, count, draw)
    for share, side, step, name in zip(shares, sides, steps, names, strict=True):
        whole = int(side) ** 2
        sites = max(1, round(share * whole))
        yield Work(
            sites=sites,
            whole=whole,
            steps=int(step),
            branches=workload.branches,
            template=f"{side}-{name}",
            bytes=round((whole - sites) * workload.bytes_per_site),
        )


def demands(
    workload: Workload, costs: FittedCosts, count: int, rate: float, seed: int
) -> Iterator[Demand]:
    """In the order of their arrival."""
    draw = np.random.default_rng(seed + 1)
    times = np.cumsum(gaps(count, rate, workload.burst, draw)).tolist()
    users = popular(workload.users, 1.0, count, draw).tolist()
    most = workload.slo if workload.slo_most is None else workload.slo_most
    times_alone = draw.uniform(workload.slo or 0.0, most or 0.0, count).tolist()
    for number, work in enumerate(shared(workload, count, seed)):
        at = times[number]
        due = inf if workload.slo is None else at + times_alone[number] * costs.solo(work)
        yield Demand(str(number), work, at, due, f"user {users[number]}")


@cache
def capacity(workload: Workload, costs: FittedCosts, workers: int, slots: int) -> float:
    """Requests per second of workers whose slots are all taken, always: load 1."""
    seconds = []
    for work in shared(workload, 20_000, seed=0):
        part = costs.part(work)
        computing = part.compute + costs.base / slots
        seconds.append(work.steps * max(computing, part.load))
    return workers / float(np.mean(seconds))


# Recorded traces.


class Line(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A request of a trace; times in seconds from its beginning."""

    arrival: float
    sites: int
    whole: int
    steps: int
    branches: int = 1
    template: str | None = None
    deadline: float | None = None  # the moment, on the same clock as arrival
    bytes: int = 0
    latency: float | None = None  # what was measured, if it was


def read_trace(path: Path) -> list[tuple[Demand, float | None]]:
    """Demands in the order of their arrival, with what was measured of them."""
    read = []
    for number, text in enumerate(path.read_bytes().splitlines(), 1):
        if not text.strip():
            continue
        try:
            line = msgspec.json.decode(text, type=Line)
        except msgspec.DecodeError as error:
            raise InputError(f"{path.name}, line {number}: {error}") from error
        work = Work(line.sites, line.whole, line.steps, line.branches, line.template, line.bytes)
        due = inf if line.deadline is None else line.deadline
        read.append((Demand(str(number), work, line.arrival, due), line.latency))
    return sorted(read, key=lambda pair: pair[0].arrived)


def single_size(workload: Workload) -> Workload:
    """The same with pictures of the largest size alone."""
    return replace(workload, sides=workload.sides[-1:])
