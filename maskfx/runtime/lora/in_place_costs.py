"""InPlaceCosts: whether a set of adapters is written into the weights, by measured costs.

Low-rank terms cost something in every step; writing updates into the weights, and taking them out,
costs once. Numbers only: no tensors, no clock.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from math import inf

TRIES = 2  # steps of each way before they are compared; the first may include a capture
LEAST = 4  # steps that must be left for a way to be tried
AGAIN = 32  # runs after which the way that isn't chosen is measured again
SMOOTH = 0.3  # weight of the latest measurement


class ChosenBy(enum.Enum):
    """What decides whether adapters are written into the weights."""

    COSTS = enum.auto()  # measured: a run's rounding depends on the runs before
    COUNTS = enum.auto()  # multiplications: equal runs alone get equal bits


def fewer_multiplications(work: int, terms: int, left: int) -> bool:
    """Return whether updates in the weights take fewer multiplications than low-rank terms.

    Args:
        work: Multiplications that make the updates; taking them out is counted as as many.
        terms: Multiplications of the low-rank terms of a step.
        left: Steps that are left.
    """
    return left >= LEAST and terms * left > 2 * work


@dataclass(frozen=True, order=True)
class SharedStep:
    """Steps whose costs are compared: of the same magnitude in all of this.

    Args:
        members: Number of members.
        sites: Binary digits of the number of sites.
        work: Binary digits of the multiplications that make the updates.
    """

    members: int
    sites: int
    work: int

    @classmethod
    def of(cls, members: int, sites: int, work: int) -> SharedStep:
        return cls(members, sites.bit_length(), work.bit_length())


@dataclass
class Measured:
    """Seconds per unit; the first measurement is replaced by the second."""

    seconds: float = inf
    seen: int = 0

    def add(self, seconds: float) -> None:
        self.seen += 1
        known = self.seen > TRIES
        self.seconds = (1 - SMOOTH) * self.seconds + SMOOTH * seconds if known else seconds

    @property
    def known(self) -> bool:
        return self.seen >= TRIES


@dataclass
class InPlaceCosts:
    """Chooses between low-rank terms and updates in the weights.

    Of each kind of step both ways are measured. Updates are written where the steps that are left
    save more than writing them and taking them out costs. How many of the expected steps came
    before another set of adapters did is measured too, and counted.
    """

    steps_in_place: int = 0
    steps_with_terms: int = 0
    written: int = 0
    fell_back: int = 0  # taken out before the expected steps were over
    lasted: float = 1.0  # share of the expected steps that came
    _terms: dict[SharedStep, Measured] = field(default_factory=dict)
    _in_place: dict[SharedStep, Measured] = field(default_factory=dict)
    _write: Measured = field(default_factory=Measured)  # per multiplication, taking out included
    _runs: dict[SharedStep, int] = field(default_factory=dict)  # that began since the last trial
    _expected: int = 0
    _came: int = 0

    def begin(self, kind: SharedStep, left: int) -> None:
        """Begin a run of steps with one set of adapters; `left` is how many are expected."""
        self.end()
        self._expected = left
        self._runs[kind] = self._runs.get(kind, 0) + 1

    @property
    def unfinished(self) -> bool:
        """Whether steps of the run are still expected."""
        return self._came < self._expected

    def end(self) -> None:
        """End the run: another set of adapters came, or none is left."""
        if self._expected:
            share = min(1.0, self._came / self._expected)
            self.lasted = (1 - SMOOTH) * self.lasted + SMOOTH * share
        self._expected = self._came = 0

    def wants(self, kind: SharedStep, work: int, sites: int, left: int, written: bool) -> bool:
        """Return whether updates are in the weights in the next step; see `pays`."""
        return self.stays(kind) if written else self.pays(kind, work, sites, left)

    def pays(self, kind: SharedStep, work: int, sites: int, left: int) -> bool:
        """Return whether updates that aren't in the weights are written there now.

        Args:
            kind: Of the steps.
            work: Multiplications that make the updates.
            sites: That a step computes.
            left: Steps that are left, this one included.
        """
        expected = left * self.lasted
        terms, in_place = self._of(kind)
        if not terms.known or expected < LEAST:
            return False
        if not in_place.known or self._runs.get(kind, 0) >= AGAIN:
            self._runs[kind] = 0
            return True
        saved = (terms.seconds - in_place.seconds) * sites * expected
        return saved > self.write_seconds(work)

    def stays(self, kind: SharedStep) -> bool:
        """Return whether updates that are in the weights stay there."""
        terms, in_place = self._of(kind)
        return not (terms.known and in_place.known) or in_place.seconds <= terms.seconds

    def add_step(self, kind: SharedStep, in_place: bool, sites: int, seconds: float) -> None:
        """Add a measured step."""
        self._came += 1
        self.steps_in_place += in_place
        self.steps_with_terms += not in_place
        self._of(kind)[in_place].add(seconds / max(1, sites))

    def add_write(self, work: int, seconds: float) -> None:
        """Add the measured seconds of writing updates and of taking them out."""
        self._write.add(seconds / max(1, work))

    def write_seconds(self, work: int) -> float:
        """Return the seconds that writing updates and taking them out costs; 0 if not measured."""
        return self._write.seconds * work if self._write.seen else 0.0

    def _of(self, kind: SharedStep) -> tuple[Measured, Measured]:
        return (
            self._terms.setdefault(kind, Measured()),
            self._in_place.setdefault(kind, Measured()),
        )

    def describe(self) -> str:
        """Return what was measured and chosen, in one line; "" if no step was measured."""
        total = self.steps_in_place + self.steps_with_terms
        if not total:
            return ""
        text = (
            f"Adapters that all members of a step share were in the weights in "
            f"{self.steps_in_place} of {total} steps, written {self.written} times"
        )
        if self.fell_back:
            text += f" and taken out early {self.fell_back} times, for other requests"
        pairs = [(self._terms[k], self._in_place[k]) for k in sorted(self._terms)]
        both = [(t, p) for t, p in pairs if t.known and p.known]
        if both:
            terms, in_place = both[-1]
            text += (
                f"; a step takes {terms.seconds / in_place.seconds:.2f} times as long with "
                "low-rank terms"
            )
        return f"{text}."


@dataclass
class Elsewhere:
    """What was chosen for the steps of a denoiser that other processes compute.

    Args:
        costs: Measured there.
        refused: Why nothing is written there; "" if it may be.
        written: Whether adapters were in the weights in the latest step.
    """

    costs: InPlaceCosts = field(default_factory=InPlaceCosts)
    refused: str = ""
    written: bool = False
