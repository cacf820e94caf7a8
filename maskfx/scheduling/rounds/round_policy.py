"""What the engine asks a policy of rounds, and what it obeys: plain data, and a Protocol.

A round is the time between two decisions about the engine's ranks: each group of requests makes a
number of steps on some ranks. `maskfx.scheduling.rounds.elastic` has the policy that fits the costs
of steps and meets deadlines.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf
from typing import Protocol

from maskfx.runtime.step_kinds import StepKind


@dataclass(frozen=True)
class StepLoad:
    """What a request's step computes.

    Args:
        sites: Sites that are computed, of one picture.
        whole: All sites of that picture.
        pictures: The number of pictures: guidance branches, times those of the batch.
        kind: What it computes of them.
        first: Whether it is the first step of its run.
    """

    sites: int
    whole: int
    pictures: int = 1
    kind: StepKind = StepKind.EDIT
    first: bool = False


@dataclass(frozen=True)
class RoundCall:
    """A request whose call waits; times are seconds of the engine's clock.

    Args:
        id: Number of the request.
        load: What its step computes.
        left: Steps that remain to be computed, with this one.
        steps: Computed steps of the whole run.
        arrived: When the request was submitted.
        due: Deadline of its result.
        after: Seconds from its last step to the result, as measured of others.
        user: Whose request it is.
    """

    id: int
    load: StepLoad
    left: int
    steps: int
    arrived: float
    due: float = inf
    after: float = 0.0
    user: str = ""


@dataclass(frozen=True)
class RankedGroup:
    """Requests that step together.

    Args:
        ranks: The ranks that compute their steps.
        steps: The number of steps of each, by the number of the request.
    """

    ranks: tuple[int, ...]
    steps: Mapping[int, int]


@dataclass(frozen=True)
class RoundDecision:
    """What the ranks do until the next decision. Requests that aren't named stay parked.

    Args:
        groups: Groups of disjoint ranks.
        late: Requests that are predicted to miss their deadline.
        drops: Those of them that end now.
    """

    groups: tuple[RankedGroup, ...] = ()
    late: tuple[int, ...] = ()
    drops: tuple[int, ...] = ()


class RoundPolicy(Protocol):
    """Decides which requests step, on which ranks; called by one thread at a time."""

    @property
    def at_borders(self) -> bool:
        """Whether it decides when no rank computes; else whenever a rank is free."""
        ...

    def decide(
        self, now: float, calls: Sequence[RoundCall], ranks: Sequence[int], count: int
    ) -> RoundDecision:
        """Return what the free ranks do.

        At least one group if all ranks are free, and a call waits that isn't dropped.

        Args:
            now: The time.
            calls: The requests whose calls wait.
            ranks: The numbers of the free ranks.
            count: The number of all ranks.
        """
        ...

    def learn(self, degree: int, batch: Sequence[StepLoad], seconds: float) -> None:
        """Note what a step on a number of ranks took."""
        ...


def check(decision: RoundDecision, calls: Sequence[RoundCall], ranks: Sequence[int]) -> None:
    """Raise ValueError if a decision names unknown requests, or ranks twice or that aren't free."""
    used = [rank for group in decision.groups for rank in group.ranks]
    named = [id for group in decision.groups for id in group.steps]
    known = {call.id for call in calls}
    if len(used) != len(set(used)) or not set(used) <= set(ranks):
        raise ValueError(f"a round on ranks {used}; free are {list(ranks)}, each for one group")
    if len(named) != len(set(named)) or not {*named, *decision.drops} <= known:
        raise ValueError(f"a round of requests {named}; those that wait are {sorted(known)}")
    if any(not g.ranks or not g.steps or min(g.steps.values()) < 1 for g in decision.groups):
        raise ValueError("a round with a group without ranks, requests or steps")
