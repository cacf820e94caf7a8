"""From what a server noted to the costs that the simulator takes. Knows nothing of how it ran.

A step lasts, here, from the end of the one before it to its own: what the engine waits and what
each request's scheduler does in between makes everybody wait. Plain least squares: a mean is
wanted, and a robust fit would leave the pauses out. Steps and what is around those of other
requests use the same cores, so that each makes the other slower; both factors are fitted.
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
SLOWER = np.linspace(0, 3, 61)  # times longer that a step may take for a request beside it


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


@dataclass(frozen=True)
class StepRow:
    """A step that followed another at once."""

    composition: tuple[float, ...]
    beside: float  # requests that were prepared or decoded meanwhile, on average
    seconds: float


def step_rows(notes: Sequence[Note], around: Sequence[Around]) -> list[StepRow]:
    moves = defaultdict[str, list[Moved]](list)
    for note in notes:
        if isinstance(note, Moved):
            moves[note.worker].append(note)
    rows: list[StepRow] = []
    for worker, steps in by_worker(notes).items():
        members = members_of(steps, moves[worker])
        phases = [s for a in around if a.worker == worker for s in (a.encoding, a.decoding)]
        for before, now, step, last in zip(members, members[1:], steps[1:], steps, strict=False):
            # the worker that made both went from one to the other; those of unknown steps record
            if len(now) == len(step.stepped.members) and before & now:
                seconds = step.at - last.at
                beside = sum(common(phase, (last.at, step.at)) for phase in phases) / seconds
                rows.append(StepRow(Composition.of(step.stepped.members), beside, seconds))
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


def slowed_steps(rows: Sequence[StepRow]) -> tuple[list[float], float, float | None]:
    """Coefficients, what each request beside a step adds to it as a share, and R2."""

    def scaled(slower: float) -> list[Row]:
        times = [1 + slower * row.beside for row in rows]
        return [
            (tuple(k * one for one in row.composition), row.seconds)
            for k, row in zip(times, rows, strict=True)
        ]

    fits = [(slower, *least_squares(scaled(slower))) for slower in SLOWER.tolist()]
    slower, found, r2 = max(fits, key=lambda fit: -np.inf if fit[2] is None else fit[2])
    return found, slower, r2


def fitted(crowded: Sequence[Note], single: Sequence[Course], origin: str) -> FittedCosts:
    """crowded: of a run whose batches vary; single: requests that were alone on the server."""
    phases = around_steps(crowded)
    steps, slower, r2 = slowed_steps(step_rows(crowded, phases))
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
        around_beside=beside(crowded, phases, alone, share),
        steps_beside=slower,
        decode_share=share,
        r2=r2,
        origin=origin,
    )


@dataclass(frozen=True)
class Around:
    """When a request was prepared and when it was decoded."""

    worker: str
    work: Work
    encoding: Span
    decoding: Span


def around_steps(notes: Sequence[Note]) -> list[Around]:
    """A request that is prepared waits for the step under way: half of it, on average."""
    steps = by_worker(notes)
    found = []
    for course in courses(notes).values():
        worker, start, first = course.started.worker, course.started.at, course.moved[0]
        before = [step for step in steps[worker] if step.at < first - course.pace / 2]
        follows = bool(before) and first - before[-1].at < 1.5 * course.pace
        waited = before[-1].stepped.seconds / 2 if follows else 0.0
        encoding = start, start + max(0.0, course.before - waited)
        decoding = course.ended - course.after, course.ended
        found.append(Around(worker, course.work, encoding, decoding))
    return found


def by_worker(notes: Sequence[Note]) -> dict[str, list[Batched]]:
    """The steps of each worker."""
    found = defaultdict[str, list[Batched]](list)
    for note in notes:
        if isinstance(note, Batched):
            found[note.worker].append(note)
    return found


def beside(
    crowded: Sequence[Note], phases: Sequence[Around], alone: FittedCosts, decode_share: float
) -> float:
    """How many times longer what is around a request's steps takes while others step."""
    steps = {
        worker: [(step.at - step.stepped.seconds, step.at) for step in made]
        for worker, made in by_worker(crowded).items()
    }
    took, expected = 0.0, 0.0
    for phase in phases:
        seconds = alone.around(phase.work)
        spans = (phase.encoding, 1 - decode_share), (phase.decoding, decode_share)
        for span, share in spans:
            length = span[1] - span[0]
            if sum(common(span, one) for one in steps[phase.worker]) > length / 2:
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
