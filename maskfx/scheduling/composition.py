"""A batch as numbers for the cost model: requests, first steps, sizes, sites by kind, pairs.

The seconds of a step are a linear function of these figures. All but the number of sizes are sums
over the batch's members. Pure: no clock, no requests.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from maskfx.runtime.step_kinds import StepKind
from maskfx.scheduling.load import Work
from maskfx.scheduling.step_reports import StepMember


class Composition(NamedTuple):
    """The figures of a batch, in the order of the coefficients of `FittedCosts`.

    Sites are counted over guidance branches, and weighted by the FLOPs of their levels where these
    are known. A pair is a computed site and one that it attends to.
    """

    steps: float = 1.0  # the same in each step: its coefficient is the cost of any step
    requests: float = 0.0
    firsts: float = 0.0  # edits and recordings among them that make their first step
    reuses: float = 0.0  # requests among them that reuse patches, and compute some
    sizes: float = 0.0  # distinct sizes of pictures
    edit_sites: float = 0.0
    dense_sites: float = 0.0
    record_sites: float = 0.0
    reuse_sites: float = 0.0
    pairs: float = 0.0

    @staticmethod
    def of(members: Sequence[StepMember]) -> Composition:
        """Return the figures of a step. A member that keeps all of its patches computes nothing."""
        members = [member for member in members if member.sites]
        sites = dict.fromkeys(StepKind, 0.0)
        for member in members:
            sites[member.kind] += member.weighted
        return Composition(
            requests=float(len(members)),
            firsts=float(sum(m.first and prepares(m.kind) for m in members)),
            reuses=float(sum(member.kind is StepKind.REUSE for member in members)),
            sizes=float(len({member.whole for member in members})),
            edit_sites=sites[StepKind.EDIT],
            dense_sites=sites[StepKind.DENSE],
            record_sites=sites[StepKind.RECORD],
            reuse_sites=sites[StepKind.REUSE],
            pairs=float(sum(member.attended for member in members)),
        )


def prepares(kind: StepKind) -> bool:
    """Whether the first step of a run builds what later ones read; one by the module doesn't.

    A run that reuses patches begins with such steps.
    """
    return kind in (StepKind.EDIT, StepKind.RECORD)


def expected(batch: Sequence[Work]) -> Composition:
    """Return the figures of a step of these requests that is the first one of none."""
    return Composition.of(members_of(batch))


def members_of(batch: Sequence[Work]) -> list[StepMember]:
    """Return what a worker would report of a step of these requests."""
    return [
        StepMember(
            w.kind,
            w.sites * w.branches,
            w.whole,
            w.branches,
            work=None if w.weighted is None else w.weighted * w.branches,
            pairs=None if w.pairs is None else w.pairs * w.branches,
        )
        for w in batch
    ]
