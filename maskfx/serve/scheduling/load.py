"""What scheduler, router and simulator know of requests and workers: numbers only.

No torch, no clock, no sockets.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from math import ceil, inf
from typing import Protocol


class TemplateTier(IntEnum):
    """Where a worker has a template, dearest to reach last."""

    DEVICE = 0
    HOST = 1
    DISK = 2
    NONE = 3


@dataclass(frozen=True)
class Work:
    """What a request asks of whoever runs it."""

    sites: int  # that a step computes
    whole: int  # that the picture has
    steps: int  # that are computed
    branches: int = 1  # 2 with guidance
    template: str | None = None
    bytes: int = 0  # of the template's rows that a step loads
    recorded: int = 0  # steps that recording its template takes; 0: as many

    def computed(self, steps: int) -> int:
        """So many of the run's steps are about so many that are computed."""
        return ceil(steps * self.steps / self.recorded) if self.recorded else steps


@dataclass(frozen=True)
class Demand:
    """A request that waits."""

    id: str
    work: Work
    arrived: float
    due: float = inf
    user: str = ""


@dataclass
class Running:
    """A request that a worker has."""

    demand: Demand
    left: int  # steps


@dataclass
class Worker:
    """A worker as the scheduler sees it."""

    name: str
    slots: int
    running: list[Running] = field(default_factory=list)
    warm: dict[str, TemplateTier] = field(default_factory=dict)  # templates that aren't at NONE

    @property
    def free(self) -> int:
        return self.slots - len(self.running)

    def tier(self, template: str | None) -> TemplateTier:
        return TemplateTier.NONE if template is None else self.warm.get(template, TemplateTier.NONE)


class StepCosts(Protocol):
    """Predicted seconds, fitted to what was measured."""

    def step(self, batch: Sequence[Work]) -> float:
        """One step of a ragged batch."""
        ...

    def around(self, work: Work) -> float:
        """What a request takes besides its steps: encoders, VAE."""
        ...

    def recording(self, work: Work, tier: TemplateTier) -> float:
        """What it takes, once, until the template of a request is there."""
        ...


@dataclass(frozen=True)
class Decision:
    """Who starts where, and who can't be in time any more."""

    starts: tuple[tuple[Demand, str], ...] = ()  # the worker's name
    drops: tuple[Demand, ...] = ()


class Scheduler(Protocol):
    """Decides about those that wait, whenever something changed."""

    def decide(
        self, now: float, waiting: Sequence[Demand], workers: Sequence[Worker]
    ) -> Decision: ...
