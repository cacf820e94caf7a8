"""Cost model: predicted seconds from coefficients, fitted offline (JSON) or while serving.

A step of a ragged batch (members with different site counts) takes

    base + per_size sizes + per_request n + per_reuse m + sum(per_site sites + per_pair pairs)

while its templates' rows load. m of the n members reuse patches, `sizes` is the number of distinct
picture sizes, `per_site` depends on what a member computes (`StepKind`), and sites are counted over
guidance branches, and weighted by level where the levels are known. The first step of an edit or a
recording takes `per_first` longer. All but the sizes are sums over the batch's members, so `part`
returns a member's share of each, which routers and schedulers add up. `joint` makes the seconds of
a step of the sums:
loading overlaps with computing, and where loading takes longer, the batch's plan computes part of
what it would load. Knows nothing of clocks, files or queues.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, NamedTuple, Protocol

import msgspec
import numpy as np

from maskfx.errors import InputError
from maskfx.runtime.planner.least_squares import Floats
from maskfx.runtime.step_kinds import StepKind
from maskfx.scheduling.composition import Composition, prepares
from maskfx.scheduling.load import StepCosts, TemplateTier, Work
from maskfx.scheduling.regression import ObservationWindow
from maskfx.scheduling.step_fit import StepFit
from maskfx.scheduling.step_reports import LoadFacts, Stepped

# Fields of FittedCosts in the order of a Composition.
COEFFICIENTS = (
    "base", "per_request", "per_first", "per_reuse", "per_size", "per_site", "per_dense_site",
    "per_record_site", "per_reuse_site", "per_pair",
)  # fmt: skip
EVERY = 8  # observations between two fits; a fit takes about a millisecond
DRIFT = 0.02  # change of the machine's speed from which it counts between two fits

Seconds = Annotated[float, msgspec.Meta(ge=0)]
Times = Annotated[float, msgspec.Meta(ge=1)]
Share = Annotated[float, msgspec.Meta(ge=0, le=1)]
Bandwidth = Annotated[float, msgspec.Meta(gt=0)] | None  # bytes per second; None: loads are free


class CostPart(NamedTuple):
    """The seconds of computing and of overlapping loading that a member adds to a batch's step."""

    compute: float
    load: float


class PartCosts(StepCosts, Protocol):
    """Costs that are made of sums over a batch's members."""

    @property
    def base(self) -> float: ...

    @property
    def per_size(self) -> float:
        """Seconds that each distinct size of a batch's pictures adds to a step."""
        ...

    @property
    def version(self) -> int:
        """A number that changes whenever the predictions change."""
        ...

    def part(self, work: Work) -> CostPart: ...

    def joint(self, compute: Floats, load: Floats) -> Floats:
        """Return the seconds of steps from their sums of compute, base included, and of loads."""
        ...


class FittedCosts(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Cost coefficients and their origin."""

    base: Seconds
    per_request: Seconds
    per_site: Seconds  # of an edit
    per_first: Seconds = 0.0  # of the first step of an edit or a recording, besides the others
    per_reuse: Seconds = 0.0  # of requests that reuse patches, besides `per_request`
    per_size: Seconds = 0.0  # of distinct picture sizes
    per_dense_site: Seconds | None = None  # None, here and below: as of an edit
    per_record_site: Seconds | None = None
    per_reuse_site: Seconds | None = None
    per_pair: Seconds = 0.0
    load_bandwidth: Bandwidth = None
    loaded: Share = 1.0  # share of a template's bytes that a step loads if it computes least
    avoidable: Share = 0.0  # share of these bytes that a plan may compute from others instead
    per_avoided_byte: Seconds = 0.0  # of computing
    around_base: Seconds = 0.0  # of encoders and VAE
    around_per_site: Seconds = 0.0  # of encoders and VAE, per site of the whole image
    around_beside: Times = 1.0  # slowdown of encoders and VAE beside others' steps; simulator only
    steps_beside: Seconds = 0.0  # what each of those adds to a step, as a share; simulator only
    decode_share: Share = 0.0  # share of encoder and VAE time that comes after the steps
    record: Seconds = 1.0  # a recorded step, in multiples of a dense step alone
    disk_bandwidth: Bandwidth = None
    r2: float | None = None  # of the fit of the step coefficients
    origin: str = ""  # the data that the coefficients were fitted to

    @property
    def version(self) -> int:
        return 0

    @property
    def coefficients(self) -> Composition:
        """The seconds of each figure of a batch's composition."""
        others = (self.per_dense_site, self.per_record_site, self.per_reuse_site)
        dense, record, reuse = (self.per_site if one is None else one for one in others)
        return Composition(
            self.base, self.per_request, self.per_first, self.per_reuse, self.per_size,
            self.per_site, dense, record, reuse, self.per_pair,
        )  # fmt: skip

    def of_site(self, kind: StepKind) -> float:
        """Return the seconds of a computed site."""
        other = {
            StepKind.DENSE: self.per_dense_site,
            StepKind.RECORD: self.per_record_site,
            StepKind.REUSE: self.per_reuse_site,
        }.get(kind)
        return self.per_site if other is None else other

    def part(self, work: Work) -> CostPart:
        sites = work.sites if work.weighted is None else work.weighted
        pairs = work.sites * work.whole if work.pairs is None else work.pairs
        each = self.of_site(work.kind) * sites + self.per_pair * pairs
        fixed = self.per_request + self.per_reuse * (work.kind is StepKind.REUSE)
        compute = fixed + work.branches * each
        read = work.bytes * self.loaded
        return CostPart(compute, read / self.load_bandwidth if self.load_bandwidth else 0.0)

    def joint(self, compute: Floats, load: Floats) -> Floats:
        """Return the seconds of steps under the best plan, in which loads overlap with computing.

        A plan that avoids a share f of the avoidable loads ends no earlier than either stream,
        `compute + f avoidable again load` or `(1 - f avoidable) load`, with `again` the compute per
        second of loads avoided. The best f makes them equal, or avoids none or all.
        """
        again = self.per_avoided_byte * (self.load_bandwidth or 0.0)
        balanced = (compute + again * load) / (1 + again) if self.avoidable else compute
        found: Floats = np.maximum(np.maximum(compute, balanced), (1 - self.avoidable) * load)
        return found

    def joint_seconds(self, compute: float, load: float) -> float:
        """Return what `joint` does, of one step, without arrays."""
        again = self.per_avoided_byte * (self.load_bandwidth or 0.0)
        balanced = (compute + again * load) / (1 + again) if self.avoidable else compute
        return max(compute, balanced, (1 - self.avoidable) * load)

    def step(self, batch: Sequence[Work]) -> float:
        parts = [self.part(work) for work in batch]
        sizes = len({work.whole for work in batch})
        compute = self.base + self.per_size * sizes + sum(p.compute for p in parts)
        return self.joint_seconds(compute, sum(p.load for p in parts))

    def around(self, work: Work) -> float:
        """Return the seconds outside of the steps, and what the first step takes longer."""
        first = self.per_first * prepares(work.kind)
        return self.around_base + self.around_per_site * work.whole + first

    def recording(self, work: Work, tier: TemplateTier) -> float:
        """Return the seconds to load or record a template before the first step.

        Rows on the host load while steps compute, so they cost nothing here. Of those on disk, the
        first step's are read before it, and the others' while the step before them computes. A
        recording computes the steps that the edit computes.
        """
        if work.template is None or tier in (TemplateTier.DEVICE, TemplateTier.HOST):
            return 0.0
        if tier is TemplateTier.DISK:
            read = work.bytes / self.disk_bandwidth if self.disk_bandwidth else 0.0
            return read + max(0, work.steps - 1) * max(0.0, read - self.step([work]))
        dense = replace(
            work, sites=work.whole, bytes=0, kind=StepKind.RECORD, weighted=None, pairs=None
        )
        return self.record * work.steps * self.step([dense])

    def solo(self, work: Work) -> float:
        """Return the seconds of a request alone on a worker that has its template at hand."""
        return self.around(work) + work.steps * self.step([work])

    def to_json(self) -> bytes:
        return msgspec.json.format(msgspec.json.encode(self), indent=1) + b"\n"

    @classmethod
    def from_json(cls, text: bytes | str) -> FittedCosts:
        """Parse coefficients; InputError if a field is unknown, missing or out of range."""
        try:
            return msgspec.json.decode(text, type=cls)
        except (msgspec.DecodeError, msgspec.ValidationError) as error:
            raise InputError(
                f"fitted costs: {error}; wanted a JSON object of {', '.join(cls.__struct_fields__)}"
            ) from error


def coefficients_of(found: Composition) -> dict[str, float]:
    """Return the fields of `FittedCosts` that have the seconds of a composition's figures."""
    return dict(zip(COEFFICIENTS, found, strict=True))


# Initial guess without measurements. Most of a step is assumed to be shared, so that batches are
# tried and their gain is observed: requests that only run alone give no data on it. All costs are
# assumed to be low, because requests dropped as late yield no observations.
START = FittedCosts(base=1e-3, per_request=1e-4, per_site=1e-7, origin="a guess, to learn from")


class LearnedCosts:
    """Costs that are refitted while serving: robustly, to the latest steps, from given costs.

    The cost of recording a template before its first edit isn't learnt and keeps its initial value.
    """

    def __init__(self, start: FittedCosts, window: int = 256) -> None:
        self.now, self.version = start, 0
        self._observed = 0
        self._steps = StepFit(start.coefficients, window)
        self._around = ObservationWindow((start.around_base, start.around_per_site), window // 4)
        per_byte = 1 / start.load_bandwidth if start.load_bandwidth else 0.0
        self._load = ObservationWindow((per_byte,), window // 4)
        read = 1 / start.disk_bandwidth if start.disk_bandwidth else 0.0
        self._reads = ObservationWindow((read,), window // 4)

    # Observations.

    def observe(self, stepped: Stepped, loaded: int = 0) -> None:
        """Add a step; `loaded` is the bytes of template rows that it read, if known."""
        # a step that mostly waited measures loading; a short wait is counted as computing
        waited = stepped.bubble > stepped.seconds / 2
        computing = stepped.seconds - stepped.bubble * waited
        self._steps.add(Composition.of(stepped.members), computing)
        if waited and (nbytes := self.now.loaded * loaded):
            self._load.add((nbytes,), stepped.seconds)
        self._learn()

    def learn_loads(self, facts: LoadFacts) -> None:
        """Use what a worker measured of its loads, until steps that waited for loads are seen."""
        now = msgspec.structs.replace(
            self.now,
            loaded=facts.loaded,
            avoidable=facts.avoidable,
            per_avoided_byte=facts.per_avoided_byte,
        )
        if self.now.load_bandwidth is None:
            self._load.start = np.array([1 / facts.bandwidth])
            now = msgspec.structs.replace(now, load_bandwidth=facts.bandwidth)
        self.now = now
        self.version += 1

    def observe_reads(self, nbytes: int, seconds: float) -> None:
        """Add templates that were read from disk: their bytes, and the seconds for all of them."""
        if not self._reads.start.any():
            self._reads.start = np.array([seconds / nbytes])
        self._reads.add((nbytes,), seconds)
        self._learn()

    def observe_around(self, work: Work, seconds: float) -> None:
        """Add the seconds that a request spent outside its steps and its template's loading."""
        self._around.add((1.0, work.whole), seconds)
        self._learn()

    def _learn(self) -> None:
        self._observed += 1
        if self._observed % EVERY:
            self._follow()
            return
        found = coefficients_of(self._steps.fit())
        around, _ = self._around.fit()
        (per_byte,), _ = self._load.fit()
        (read,), _ = self._reads.fit()
        self.now = msgspec.structs.replace(
            self.now,
            **found,
            around_base=float(around[0]),
            around_per_site=float(around[1]),
            load_bandwidth=1 / float(per_byte) if per_byte > 0 else None,
            disk_bandwidth=1 / float(read) if read > 0 else None,
            r2=self.now.r2 if self._steps.r2 is None else self._steps.r2,
            origin="learnt while serving",
        )
        self.version += 1

    def _follow(self) -> None:
        """Use the speed of the latest steps, between two fits."""
        if self._observed < EVERY:
            return
        latest, used = self._steps.now(), self.now.coefficients
        if abs(sum(latest) - sum(used)) > DRIFT * sum(used):
            self.now = msgspec.structs.replace(self.now, **coefficients_of(latest))
            self.version += 1

    # Predictions.

    @property
    def base(self) -> float:
        return self.now.base

    @property
    def per_size(self) -> float:
        return self.now.per_size

    def part(self, work: Work) -> CostPart:
        return self.now.part(work)

    def joint(self, compute: Floats, load: Floats) -> Floats:
        return self.now.joint(compute, load)

    def step(self, batch: Sequence[Work]) -> float:
        return self.now.step(batch)

    def around(self, work: Work) -> float:
        return self.now.around(work)

    def recording(self, work: Work, tier: TemplateTier) -> float:
        return self.now.recording(work, tier)
