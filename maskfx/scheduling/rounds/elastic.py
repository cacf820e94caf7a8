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
from maskfx.scheduling.rounds.block_state import BlockState
from maskfx.scheduling.rounds.placement import Devices
from maskfx.scheduling.rounds.round_plan import DeviceGroup, LatePolicy, RoundRequest, RoundSettings
from maskfx.scheduling.rounds.round_policy import RankedGroup, RoundCall, RoundDecision, StepLoad
from maskfx.scheduling.rounds.rounds import RoundScheduler

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
        self._state = BlockState(1)

    def decide(
        self, now: float, calls: Sequence[RoundCall], ranks: Sequence[int], count: int
    ) -> RoundDecision:
        """Return what the free ranks do: rounds of blocks, or steps until the border of one."""
        scheduler, state = self._scheduler_of(count), self._updated(now, ranks, count)
        requests = [self._request(call, state) for call in calls]
        round_ = scheduler.decide(now, requests, state)
        state.begin(now, round_.groups)
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

    def _updated(self, now: float, ranks: Sequence[int], count: int) -> BlockState:
        """Return the state in which these ranks are free; others without a group end any time."""
        if self._state.devices != count:
            self._state = BlockState(count)
        state, idle = self._state, set(ranks)
        for at in state.running:
            if idle.issuperset(at.numbers):
                state.end(at)
        busy = [Devices(n, 1) for n in range(count) if n not in idle]
        if unknown := [DeviceGroup(at, {}, 0.0) for at in busy if state.free.fits(at)]:
            state.begin(now, unknown)
        return state

    def _request(self, call: RoundCall, state: BlockState) -> RoundRequest:
        id = str(call.id)
        work = work_of(call.load, call.steps)
        return RoundRequest(id, work, call.left, call.arrived, call.due, call.after, state.home(id))


def work_of(load: StepLoad, steps: int = 1) -> Work:
    """Return what the cost model predicts the seconds of a step from."""
    return Work(sites=load.sites, whole=load.whole, steps=steps, branches=load.pictures)
