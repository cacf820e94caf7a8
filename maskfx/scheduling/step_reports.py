"""What is reported of a step that was made: its members and its seconds. Costs are fitted to these.

Also messages of a worker (`serve/messages.py`).
"""

from __future__ import annotations

import msgspec

from maskfx.runtime.step_kinds import StepKind


class StepMember(msgspec.Struct, frozen=True, array_like=True):
    """What a request computed in a step."""

    kind: StepKind
    sites: int  # computed, over its guidance branches
    whole: int  # of its picture
    samples: int = 1  # guidance branches
    first: bool = False  # of its run
    work: float | None = None  # `sites` weighted by the FLOPs of their levels; None: alike
    pairs: float | None = None  # the same of sites and those that they attend to

    @property
    def weighted(self) -> float:
        return self.sites if self.work is None else self.work

    @property
    def attended(self) -> float:
        return self.sites * self.whole if self.pairs is None else self.pairs


class Stepped(msgspec.Struct, frozen=True, tag="stepped"):
    """A finished step of a batch; the cost model is fitted to these."""

    seconds: float
    members: list[StepMember]
    bubble: float = 0.0  # seconds in which computing waited for loading
    degree: int = 1  # ranks that computed it
    ranks: int = 1  # of the worker; the others may have computed other steps

    @property
    def occupied(self) -> float:
        """Seconds for which it occupied the whole worker: its share of the ranks' time."""
        return self.seconds * self.degree / self.ranks

    @property
    def sites(self) -> int:
        return sum(member.sites for member in self.members)


class LoadFacts(msgspec.Struct, frozen=True, array_like=True):
    """How a worker's cached rows reach its device, as measured; see `FittedCosts`."""

    bandwidth: float
    loaded: float
    avoidable: float
    per_avoided_byte: float
