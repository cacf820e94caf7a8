"""What the scheduler of rounds is given and what it decides, as plain data.

An executor needs this file alone: it carries out a `Round` and returns the remaining steps of its
requests as `RoundRequest`. Knows nothing of how rounds are decided.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from math import inf

from maskfx.errors import InputError
from maskfx.scheduling.degree_costs import DEGREES
from maskfx.scheduling.load import Work
from maskfx.scheduling.rounds.placement import Devices


class LatePolicy(StrEnum):
    """What happens to requests that can't meet their deadline any more."""

    DROP = "drop"
    LAST = "last"  # they run on devices that others leave, and after `patience` on devices reserved


@dataclass(frozen=True)
class RoundSettings:
    """Settings of `RoundScheduler`.

    Args:
        degrees: Sizes that a group of devices may have; 3 only if it is listed.
        length: Seconds of a round; None: by `round_length`.
        granularity: Steps of the slowest kind of request in a round, if `length` is None.
        late: What happens to requests that can't meet their deadline.
        patience: Requests without a deadline and late ones get devices of their own after this
            multiple of their time alone.
        scale_up: Whether idle devices are added to groups that gain from them.
        batch: Requests in a group at most; 1: no batching.
        gain: Least speed-up of a joint step over separate ones for a request to join a group.
        margin: Share of the time until a deadline that is kept for what the profile doesn't
            predict: the start of rounds, and steps that take longer.
    """

    degrees: tuple[int, ...] = (1, 2, 4, 8)
    length: float | None = None
    granularity: int = 5
    late: LatePolicy = LatePolicy.DROP
    patience: float = 20.0
    scale_up: bool = True
    batch: int = 8
    gain: float = 1.05
    margin: float = 0.02

    def __post_init__(self) -> None:
        if not set(self.degrees) <= set(DEGREES) or 1 not in self.degrees:
            raise InputError(f"degrees {self.degrees}: wanted 1 and any others of {DEGREES}")
        if self.length is not None and self.length <= 0:
            raise InputError(f"length {self.length}: wanted a positive number of seconds, or None")
        if self.granularity < 1 or self.batch < 1 or self.patience <= 0:
            raise InputError(
                f"granularity {self.granularity}, batch {self.batch}, patience {self.patience}: "
                "wanted at least 1, at least 1, and above 0"
            )
        if not 0 <= self.margin < 1:
            raise InputError(f"margin {self.margin}: wanted a share from 0 to below 1")


@dataclass(frozen=True)
class RoundRequest:
    """A request between two rounds.

    Args:
        left: Remaining steps.
        due: Deadline of the result.
        after: Seconds from the last step to the result (decoding).
        home: Devices of the previous round, if it ran there.
    """

    id: str
    work: Work
    left: int
    arrived: float
    due: float = inf
    after: float = 0.0
    home: Devices | None = None


@dataclass(frozen=True)
class DeviceGroup:
    """Requests that run together on a range of devices, and the steps of each of them.

    Args:
        steps: By the id of the request; the group makes as many as the largest.
        seconds: Predicted, of all its steps.
        further: Predicted, of the steps that its requests then have left; 0 if none of them can
            meet a deadline, so that others may have its devices.
    """

    devices: Devices
    steps: dict[str, int]
    seconds: float
    further: float = 0.0


@dataclass(frozen=True)
class Round:
    """A decision: what the free devices do next.

    Args:
        late: Requests that can't meet their deadline any more, whether dropped or run last.
        drops: Those of them that are dropped.
    """

    start: float
    groups: tuple[DeviceGroup, ...]
    late: tuple[str, ...] = ()
    drops: tuple[str, ...] = ()

    @property
    def length(self) -> float:
        """Predicted seconds until the last of the groups ends."""
        return max((group.seconds for group in self.groups), default=0.0)
