"""Requests and workers as numbers, for the scheduler, the router and the simulator.

No torch, no clock, no sockets.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from math import ceil, inf
from typing import Protocol

from maskfx.runtime.step_kinds import StepKind


class TemplateTier(IntEnum):
    """The tier in which a worker has a template, from cheapest to most expensive to reach."""

    DEVICE = 0
    HOST = 1
    DISK = 2
    NONE = 3


@dataclass(frozen=True)
class Work:
    """The amount of work of a request."""

    sites: int  # sites that a step computes
    whole: int  # sites of the whole image
    steps: int  # steps that are computed
    branches: int = 1  # 2 with guidance
    template: str | None = None
    bytes: int = 0  # bytes of template rows that a step loads
    total: int = 0  # steps of the run, computed or not; 0: the same as `steps`
    kind: StepKind = StepKind.EDIT  # of its steps
    weighted: float | None = None  # `sites` weighted by the FLOPs of their levels; None: alike
    pairs: float | None = None  # the same of sites and those that they attend to

    def computed(self, steps: int) -> int:
        """Return about how many of a number of the run's steps are computed, rounded up."""
        return ceil(steps * self.steps / self.total) if self.total else steps


@dataclass(frozen=True)
class Demand:
    """A waiting request."""

    id: str
    work: Work
    arrived: float
    due: float = inf
    user: str = ""


@dataclass
class Running:
    """A request in flight on a worker."""

    demand: Demand
    left: int  # remaining steps


@dataclass
class Worker:
    """A worker: its slots, its requests in flight and its warm templates."""

    name: str
    slots: int
    running: list[Running] = field(default_factory=list)
    warm: dict[str, TemplateTier] = field(default_factory=dict)  # templates in a tier but NONE

    @property
    def free(self) -> int:
        return self.slots - len(self.running)

    def tier(self, template: str | None) -> TemplateTier:
        return TemplateTier.NONE if template is None else self.warm.get(template, TemplateTier.NONE)


class StepCosts(Protocol):
    """Predicted seconds, fitted to measurements."""

    def step(self, batch: Sequence[Work]) -> float:
        """Return the seconds of one step of a ragged batch (members with different site counts)."""
        ...

    def around(self, work: Work) -> float:
        """Return the seconds of a request outside its steps: encoders, VAE."""
        ...

    def recording(self, work: Work, tier: TemplateTier) -> float:
        """Return the one-time seconds to load or record a request's template."""
        ...


@dataclass(frozen=True)
class Decision:
    """Which requests start on which worker, and which are dropped as late."""

    starts: tuple[tuple[Demand, str], ...] = ()  # with the worker's name
    drops: tuple[Demand, ...] = ()


class Scheduler(Protocol):
    """Decides about the waiting requests whenever requests or workers changed."""

    def decide(
        self, now: float, waiting: Sequence[Demand], workers: Sequence[Worker]
    ) -> Decision: ...
