"""Adapters in the weights: for the steps of a denoiser whose members all have the same ones."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from maskfx.pipelines.runs.computed_sites import sites_of
from maskfx.pipelines.runs.step_members import CallMember
from maskfx.runtime.denoiser import CompiledDenoiser
from maskfx.runtime.in_place import shared
from maskfx.runtime.lora.in_place_costs import ChosenBy
from maskfx.runtime.lora.layers import digests_of
from maskfx.runtime.step_executor import SharedAdapters
from maskfx.runtime.steps import EditStep


@contextmanager
def adapters_in_place(
    denoiser: CompiledDenoiser, members: Sequence[CallMember], by: ChosenBy
) -> Iterator[bool]:
    """Have the members' adapters in the weights within the context, if that takes less time.

    Yields whether the step is measured for that: all members have the same adapters.
    """
    found = shared_adapters(members)
    updates, sites, left = ((), 0, 0) if found is None else (found.updates, found.sites, found.left)
    with denoiser.in_place.step(updates, len(members), sites, left, by):
        yield found is not None


def shared_adapters(members: Sequence[CallMember]) -> SharedAdapters | None:
    """Return the adapters that all members and their recordings have; None without any."""
    updates = shared([member.step.adapters for member in members])
    if not updates or not all(map(was_recorded_so, members)):
        return None
    sites = sum(sites_of(member.step, member.call.run.active)[0] for member in members)
    return SharedAdapters(updates, sites, max(map(steps_left, members)))


def was_recorded_so(member: CallMember) -> bool:
    """Return True unless an edit reads a recording with other adapters.

    Where such an edit runs in full, the recorded inputs run with the recording's adapters.
    """
    step = member.step
    return not isinstance(step, EditStep) or step.cache.adapters == digests_of(step.adapters)


def steps_left(member: CallMember) -> int:
    """Return how many steps of a run are computed from this one on; 1 if it isn't known."""
    call = member.call
    if call.steps is None:
        return 1
    return call.run.selection.left(call.step, call.steps) or 1
