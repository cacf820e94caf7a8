"""What the engine asks a policy of admission, and what it obeys: plain data, and a Protocol.

A request is prepared first: its pipeline's code runs up to its first step. Then the policy decides
when its steps begin. `maskfx.scheduling.slack_admission` has the policy that fits the costs
of steps and meets deadlines.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from maskfx.scheduling.rounds.round_policy import RoundCall, StepLoad


@dataclass(frozen=True)
class AdmissionDecision:
    """What becomes of the requests that wait; those that aren't named wait on.

    Args:
        starts: Requests whose steps begin now.
        drops: Requests that can't meet their deadline any more, which end now, and the seconds
            until their result that are predicted if they began now.
    """

    starts: tuple[int, ...] = ()
    drops: Mapping[int, float] = field(default_factory=dict)


class AdmissionPolicy(Protocol):
    """Decides which prepared requests begin their steps; called by one thread at a time."""

    def acts(self, dues: Sequence[float]) -> bool:
        """Return whether it decides now; if not, the requests that wait begin at once.

        Args:
            dues: The deadlines of all requests that wait or step; infinite where there is none.
        """
        ...

    def decide(
        self, now: float, waiting: Sequence[RoundCall], active: Sequence[RoundCall], slots: int
    ) -> AdmissionDecision:
        """Return what becomes of the requests that wait.

        Args:
            now: The time, on the clock of the requests' deadlines.
            waiting: Prepared requests without a step so far; at least one.
            active: The requests that step, with the steps that they have left.
            slots: The number of requests that may step together.
        """
        ...

    def learn(self, batch: Sequence[StepLoad], seconds: float) -> None:
        """Note what a step took, with the time until the next one could begin."""
        ...


def check(
    decision: AdmissionDecision,
    waiting: Sequence[RoundCall],
    active: Sequence[RoundCall],
    slots: int,
) -> None:
    """Raise ValueError if a decision names unknown requests, one twice, or more than fit."""
    named, known = [*decision.starts, *decision.drops], {call.id for call in waiting}
    if len(named) != len(set(named)) or not set(named) <= known:
        raise ValueError(f"an admission of {named}; those that wait are {sorted(known)}, each once")
    if len(decision.starts) + len(active) > slots:
        raise ValueError(
            f"an admission of {len(decision.starts)} beside {len(active)} in {slots} slots"
        )
