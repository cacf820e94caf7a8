"""From what a server noted to the costs that the simulator takes. Knows nothing of how it ran.

A step lasts, here, from the end of the one before it to its own: what the engine waits and what
each request's scheduler does in between makes everybody wait. Plain least squares: a mean is
wanted, and a robust fit would leave the pauses out.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from bench.agree.server import Batched, Ended, Moved, Note, Started
from maskfx.runtime.planner.least_squares import Floats, non_negative
from maskfx.scheduling.composition import Composition
from maskfx.scheduling.cost_model import COEFFICIENTS, FittedCosts
from maskfx.scheduling.load import Work
from maskfx.scheduling.regression import explained

Row = tuple[tuple[float, ...], float]
Span = tuple[float, float]


@dataclass
class Course:
    """One request as the front saw it."""

    started: Started
    moved: list[float] = field(default_factory=list)  # the ends of its steps
    ended: float = 0.0

    @property
    def work(self) -> Work:
        return self.started.work

    @property
    def queued(self) -> float:
        return self.started.at - self.started.entered

    @property
    def pace(self) -> float:
        """Of its own steps."""
        return (self.moved[-1] - self.moved[0]) / max(1, len(self.moved) - 1)

    @property
    def before(self) -> float:
        """From its start to its first step."""
        return max(0.0, self.moved[0] - self.pace - self.started.at)

    @property
    def after(self) -> float:
        """From its last step to its end."""
        return max(0.0, self.ended - self.moved[-1])


def courses(notes: Sequence[Note]) -> dict[int, Course]:
    """The requests that ended, by their seeds."""
    found: dict[str, Course] = {}
    for note in notes:
        match note:
            case Started():
                found[note.id] = Course(note)
            case Moved() if note.id in found:
                found[note.id].moved.append(note.at)
            case Ended() if note.id in found:
                found[note.id].ended = note.at
    return {c.started.seed: c for c in found.values() if c.ended and c.moved}


def step_rows(notes: Sequence[Note]) -> list[Row]:
    """The composition and the seconds of each step that followed another at once."""
    ends, moves = defaultdict[str, list[Batched]](list), defaultdict[str, list[Moved]](list)
    for note in notes:
        if isinstance(note, Batched):
            ends[note.worker].append(note)
        elif isinstance(note, Moved):
            moves[note.worker].append(note)
    rows: list[Row] = []
    for worker, steps in ends.items():
        members = members_of(steps, moves[worker])
        for before, now, step, last in zip(members, members[1:], steps[1:], steps, strict=False):
            # the worker that made both went from one to the other; those of unknown steps record
            if len(now) == len(step.stepped.members) and before & now:
                rows.append((Composition.of(step.stepped.members), step.at - last.at))
    return rows


def members_of(steps: Sequence[Batched], moves: Sequence[Moved]) -> list[set[str]]:
    """The worker of each step: a request's line of a step arrives with its worker's line of it."""
    ends = np.array([step.at for step in steps])
    found: list[set[str]] = [set() for _ in steps]
    for move in moves:
        found[int(np.argmin(np.abs(ends - move.at)))].add(move.id)
    return found


def least_squares(rows: Sequence[Row]) -> tuple[list[float], float | None]:
    """Coefficients, none negative, and R2."""
    left: Floats = np.array([row for row, _ in rows])
    seen: Floats = np.array([seconds for _, seconds in rows])
    found = non_negative(left, seen)
    return found.tolist(), explained(seen, left @ found, np.ones(len(left), np.bool_))


def fitted(crowded: Sequence[Note], single: Sequence[Course], origin: str) -> FittedCosts:
    """crowded: of a run whose batches vary; single: requests that were alone on the server."""
    steps, r2 = least_squares(step_rows(crowded))
    around = [((1.0, float(c.work.whole)), c.before + c.after) for c in single]
    (around_base, around_per_site), _ = least_squares(around)
    share = sum(c.after for c in single) / max(1e-12, sum(seconds for _, seconds in around))
    alone = FittedCosts(
        base=0, per_request=0, per_site=0, around_base=around_base, around_per_site=around_per_site
    )
    # what first steps take longer is in `around`, which is fitted to when they end
    return FittedCosts(
        **(dict(zip(COEFFICIENTS, steps, strict=True)) | {"per_first": 0.0}),
        around_base=around_base,
        around_per_site=around_per_site,
        around_beside=beside(crowded, alone, share),
        decode_share=share,
        r2=r2,
        origin=origin,
    )


def beside(crowded: Sequence[Note], alone: FittedCosts, decode_share: float) -> float:
    """How many times longer what is around a request's steps takes while others step."""
    steps = defaultdict[str, list[Span]](list)
    for note in crowded:
        if isinstance(note, Batched):
            steps[note.worker].append((note.at - note.stepped.seconds, note.at))
    took, expected = 0.0, 0.0
    for policy in courses(crowded).values():
        seconds = alone.around(policy.work)
        start, end = policy.started.at, policy.ended
        spans = (
            ((start, start + policy.before), 1 - decode_share),
            ((end - policy.after, end), decode_share),
        )
        for span, share in spans:
            length = span[1] - span[0]
            if sum(common(span, one) for one in steps[policy.started.worker]) > length / 2:
                took += length
                expected += share * seconds
    return max(1.0, took / expected) if expected else 1.0


def common(one: Span, other: Span) -> float:
    return max(0.0, min(one[1], other[1]) - max(one[0], other[0]))


def parts(done: Sequence[Course]) -> dict[str, float]:
    """Where the time went, on average."""
    return {
        "queued": statistics.mean(c.queued for c in done),
        "before_steps": statistics.mean(c.before for c in done),
        "steps": statistics.mean(c.pace * len(c.moved) for c in done),
        "after_steps": statistics.mean(c.after for c in done),
    }
