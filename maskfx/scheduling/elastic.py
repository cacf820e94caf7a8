"""ElasticRounds: the engine's policy of rounds, by deadlines and by costs fitted while serving.

Translates between the engine's requests and `rounds.py`. Until a degree has been measured it is
assumed to be efficient, so that it is tried where ranks are idle. Pure: no clock, no torch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import msgspec

from maskfx.ir.argument_checks import check_flag, check_type
from maskfx.scheduling.cost_model import START, FittedCosts
from maskfx.scheduling.degree_costs import (
    DEGREES,
    DegreeCosts,
    FitError,
    ProfileFit,
    from_efficiency,
)
from maskfx.scheduling.load import Work
from maskfx.scheduling.placement import Devices, FreeDevices
from maskfx.scheduling.round_plan import LatePolicy, RoundRequest, RoundSettings
from maskfx.scheduling.round_policy import RankedGroup, RoundCall, RoundDecision, StepLoad
from maskfx.scheduling.rounds import RoundScheduler

ASSUMED = {2: 0.9, 3: 0.87, 4: 0.85, 8: 0.8}  # efficiency of a degree before it is measured
TRUSTED = 4  # samples of a degree from which its own costs are used
EVERY = 8  # samples between two fits, once there are EARLY of them
EARLY = 32
WINDOW = 96  # samples per degree
SETTINGS = RoundSettings(late=LatePolicy.LAST)


class ElasticRounds:
    """Decides rounds; pass it to `maskfx.Engine` as `rounds`.

    Args:
        settings: How rounds are decided; by default late requests run last.
        start: Costs of a step on one rank before any is measured.
        fixed: Whether `start` and the assumed efficiencies stay as they are.
    """

    at_borders = False  # free ranks get further steps within a round

    def __init__(
        self,
        settings: RoundSettings = SETTINGS,
        start: FittedCosts | DegreeCosts = START,
        *,
        fixed: bool = False,
    ) -> None:
        check_type("ElasticRounds", "settings", settings, RoundSettings, "RoundSettings")
        wanted = "FittedCosts, or DegreeCosts"
        check_type("ElasticRounds", "start", start, (FittedCosts, DegreeCosts), wanted)
        check_flag("ElasticRounds", "fixed", fixed)
        self.settings = settings
        given = start if isinstance(start, DegreeCosts) else from_efficiency(start, ASSUMED)
        self.profile = given
        self.errors: dict[int, FitError] = {}
        self._given, self._fixed = given, fixed
        self._fit = ProfileFit(given.one, WINDOW)
        self._samples: Counter[int] = Counter()
        self._fresh = 0  # samples since the last fit
        self._scheduler: RoundScheduler | None = None
        self._homes: dict[str, Devices] = {}
        self._border = 0.0  # of the round, as predicted

    def decide(
        self, now: float, calls: Sequence[RoundCall], ranks: Sequence[int], count: int
    ) -> RoundDecision:
        """Return the groups of the next round if all ranks are free; else what free ones do in it.

        Within a round, groups end by its border as it was predicted.
        """
        scheduler, requests = self._scheduler_of(count), [self._request(call) for call in calls]
        if len(ranks) == count:
            round_ = scheduler.decide(now, requests)
            self._homes, self._border = {}, now + round_.length
        else:
            idle = set(ranks)
            free = FreeDevices(count, [Devices(n, 1) for n in range(count) if n not in idle])
            round_ = scheduler.decide_within(now, self._border, free, requests)
        self._homes |= {id: g.devices for g in round_.groups for id in g.steps}
        groups = tuple(
            RankedGroup(tuple(g.devices.numbers), {int(id): n for id, n in g.steps.items()})
            for g in round_.groups
        )
        return RoundDecision(groups, tuple(map(int, round_.late)), tuple(map(int, round_.drops)))

    def learn(self, degree: int, batch: Sequence[StepLoad], seconds: float) -> None:
        if self._fixed or degree not in DEGREES:
            return
        self._fit.add(degree, [work_of(load) for load in batch], seconds)
        self._samples[degree] += 1
        self._fresh += 1

    def refit(self) -> None:
        """Fit the profile to the samples so far; degrees with few of them keep what is assumed."""
        found, errors = self._fit.fit()
        trusted = {k: cost for k, cost in found.by_degree.items() if self._samples[k] >= TRUSTED}
        self.errors = {k: e for k, e in errors.items() if self._samples[k] >= TRUSTED}
        self.profile = msgspec.structs.replace(found, by_degree=self._given.by_degree | trusted)
        self._scheduler, self._fresh = None, 0

    def _scheduler_of(self, count: int) -> RoundScheduler:
        """Return the scheduler for a number of ranks, with the latest profile."""
        early = sum(self._samples.values()) < EARLY
        if self._fresh and (early or self._fresh >= EVERY):
            self.refit()
        if self._scheduler is None or self._scheduler.devices != count:
            known = set(self.profile.degrees)
            degrees = tuple(k for k in self.settings.degrees if k <= count and k in known)
            settings = replace(self.settings, degrees=degrees)
            self._scheduler = RoundScheduler(self.profile, count, settings)
        return self._scheduler

    def _request(self, call: RoundCall) -> RoundRequest:
        id = str(call.id)
        work = work_of(call.load, call.steps)
        home = self._homes.get(id)
        return RoundRequest(id, work, call.left, call.arrived, call.due, call.after, home)


def work_of(load: StepLoad, steps: int = 1) -> Work:
    """Return what the cost model predicts the seconds of a step from."""
    return Work(sites=load.sites, whole=load.whole, steps=steps, branches=load.pictures)
