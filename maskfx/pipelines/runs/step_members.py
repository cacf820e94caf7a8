"""The members of a batch step: what calls choose; open decisions of patches are made together."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace

from maskfx.ir.geometry.level_shares import MaskWork
from maskfx.pipelines.handlers.call_handler import CallPart
from maskfx.pipelines.runs.computed_sites import kind_of, mask_work, sites_of
from maskfx.pipelines.runs.run import DenoiserCall
from maskfx.pipelines.templates.batches import batch_of
from maskfx.runtime.reuse.patches import PatchDecision, decide_together
from maskfx.runtime.steps import AnyStep, DenseStep, with_late

log = logging.getLogger(__name__)


@dataclass
class CallMember:
    """A member of a step: one call, or one sample of a call that lists several.

    While a decision is open, `step` computes everything.
    """

    call: DenoiserCall
    part: CallPart
    step: AnyStep
    result: object = None
    error: Exception | None = None
    decision: PatchDecision | None = None


def choose_steps(call: DenoiserCall) -> list[CallMember]:
    """Return the steps that the run's handler chooses for a call; decisions are still open."""
    members = []
    for part in call.parts():
        step = call.run.handler.choose(part)
        if isinstance(step, PatchDecision):
            members.append(CallMember(call, part, DenseStep(part.inputs), decision=step))
        else:
            members.append(CallMember(call, part, completed(step, part)))
    return members


def settled(calls: Sequence[list[CallMember]]) -> list[list[CallMember]]:
    """Make all open decisions together; return the calls whose steps are known.

    If a decision fails, each is made by itself, and only the calls whose own fails get an error.
    """
    waiting = [member for own in calls for member in own if member.decision is not None]
    decisions = [member.decision for member in waiting if member.decision is not None]
    try:
        computed = dict(zip(map(id, decisions), decide_together(decisions), strict=True))
    except Exception as error:
        log.debug("%d decisions fail together: %s", len(decisions), error)
        computed = {}
    known = []
    for own in calls:
        try:
            for member in own:
                if member.decision is not None:
                    step = member.decision.step(computed.get(id(member.decision)))
                    member.step, member.decision = completed(step, member.part), None
            count_call(own)
            known.append(own)
        except Exception as error:
            own[0].call.error = error
    return known


def completed(step: AnyStep, part: CallPart) -> AnyStep:
    step = replace(step, adapters=part.adapters) if part.adapters else step
    return step if part.late is None else with_late(step, part.late)


def count_call(members: Sequence[CallMember]) -> None:
    """Set the numbers of sites and samples of a call, and what it computes."""
    call = members[0].call
    for member in members:
        call.whole += sites_of(member.step, call.run.active)[1]
        call.samples += batch_of(member.step.inputs)
        call.kind = kind_of(member.step)
    count_sites(members)


def count_sites(members: Sequence[CallMember]) -> None:
    """Set the number of sites that a call computes; it is known in full after its step."""
    call = members[0].call
    call.sites = sum(sites_of(member.step, call.run.active)[0] for member in members)
    shares = call.denoiser.level_shares
    works = [mask_work(member.step, shares, call.run.mask) for member in members]
    known = [work for work in works if work is not None]
    if len(known) == len(works):
        call.work = MaskWork(*map(sum, zip(*known, strict=True)))
