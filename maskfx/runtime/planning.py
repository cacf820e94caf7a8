"""Planning: what a denoiser asks of its planner, and what a plan may trade for what."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from maskfx.runtime.cache.step_cache import StepCache
from maskfx.runtime.steps import AnyStep, EditStep


@dataclass(frozen=True)
class LoadTrade:
    """What an edit's step may load or compute again, and at which price.

    Args:
        nbytes: bytes that a step loads if all keys and values are loaded.
        bandwidth: bytes per second.
        loaded: `nbytes` as a share of the bytes of the recorded step.
        avoidable: share of `nbytes` that is avoided if all keys and values are projected again.
        per_byte: seconds of compute per byte avoided.
    """

    nbytes: float
    bandwidth: float
    loaded: float
    avoidable: float
    per_byte: float


class Planner(Protocol):
    """Chooses what each edit of a batch loads and what it projects again (`StepPlanner`)."""

    def plan_step(self, steps: Sequence[AnyStep]) -> list[AnyStep]:
        """Return the members of the step that runs next; edits have plans."""
        ...

    def plan_ahead(self, steps: Sequence[EditStep]) -> list[EditStep]:
        """Return edits of the step after that one with plans, so that their loads can begin."""
        ...

    def wanted(self, cache: StepCache) -> Sequence[str]:
        """Return the taps that plans read of a recording, in the order of the graph."""
        ...

    def trade(self) -> LoadTrade | None:
        """Return what an edit may load or compute, as measured; None before its first plan."""
        ...

    def describe(self) -> str:
        """Return a line about the costs that plans are based on, and the latest plan."""
        ...
