"""SlackAdmission: the engine's policy of admission, by the server's scheduler.

Translates between the engine's requests and `scheduler.py`: the engine is one worker, whose
requests in flight are those that step. Costs are fitted to its steps. Pure: no clock, no torch.
"""

from __future__ import annotations

from collections.abc import Sequence

from maskfx.ir.argument_checks import check_flag, check_number, check_type
from maskfx.scheduling.admission_policy import AdmissionDecision
from maskfx.scheduling.cost_model import START, FittedCosts, LearnedCosts
from maskfx.scheduling.load import Demand, Running, Work, Worker
from maskfx.scheduling.rounds.round_policy import RoundCall, StepLoad
from maskfx.scheduling.router import make_router
from maskfx.scheduling.scheduler import SlackScheduler
from maskfx.scheduling.step_reports import StepMember, Stepped

ENGINE = "engine"  # the name of the only worker


class SlackAdmission:
    """Admits the request with the least slack, where its step gains and makes none late.

    Pass it to `maskfx.Engine` as `admission`. `SlackScheduler` has the rules and the settings.

    Args:
        start: Costs of a step before any is measured.
        fixed: Whether they stay as they are.
        gain: Least speed-up of a joint step for a request to join the others.
        share: Slack added per request that the user has in flight.
        patience: Virtual deadline of requests without one, in multiples of their time alone.
        shorter: Seconds of waiting that outweigh a second of time alone, of requests without one.
    """

    def __init__(
        self,
        start: FittedCosts = START,
        *,
        fixed: bool = False,
        gain: float = 1.06,
        share: float = 0.5,
        patience: float = 20.0,
        shorter: float = 3.0,
    ) -> None:
        check_type("SlackAdmission", "start", start, FittedCosts, "FittedCosts")
        check_flag("SlackAdmission", "fixed", fixed)
        check_number("SlackAdmission", "gain", gain)
        check_number("SlackAdmission", "share", share)
        check_number("SlackAdmission", "patience", patience)
        check_number("SlackAdmission", "shorter", shorter)
        self.costs, self._fixed = LearnedCosts(start), fixed
        self._scheduler = SlackScheduler(
            self.costs,
            make_router("cost"),
            gain=gain,
            share=share,
            patience=patience,
            shorter=shorter,
        )

    def acts(self, dues: Sequence[float]) -> bool:
        return True

    def decide(
        self, now: float, waiting: Sequence[RoundCall], active: Sequence[RoundCall], slots: int
    ) -> AdmissionDecision:
        worker = Worker(ENGINE, slots, [Running(demand_of(call), call.left) for call in active])
        demands = [demand_of(call) for call in waiting]
        found = self._scheduler.decide(now, demands, [worker])
        after = {str(call.id): call.after for call in waiting}
        drops = {int(d.id): self._alone(d.work) + after[d.id] for d in found.drops}
        return AdmissionDecision(tuple(int(demand.id) for demand, _ in found.starts), drops)

    def learn(self, batch: Sequence[StepLoad], seconds: float) -> None:
        if not self._fixed:
            self.costs.observe(Stepped(seconds, [member_of(load) for load in batch]))

    def _alone(self, work: Work) -> float:
        return self.costs.around(work) + work.steps * self.costs.step([work])


def demand_of(call: RoundCall) -> Demand:
    """Return a request as the scheduler sees it; what follows its steps comes off its deadline."""
    load = call.load
    work = Work(load.sites, load.whole, call.left, load.pictures, kind=load.kind)
    return Demand(str(call.id), work, call.arrived, call.due - call.after, call.user)


def member_of(load: StepLoad) -> StepMember:
    """Return what a worker would report of a request's step."""
    return StepMember(
        load.kind, load.sites * load.pictures, load.whole, load.pictures, first=load.first
    )
