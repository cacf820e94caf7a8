"""What starts on free devices of a block before the block's border. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from maskfx.scheduling.rounds.drafts import Draft, alone, grown, join, without_groups
from maskfx.scheduling.rounds.placement import Devices, FreeDevices, PlacedGroup
from maskfx.scheduling.rounds.profile_memo import ProfileMemo
from maskfx.scheduling.rounds.round_plan import RoundSettings
from maskfx.scheduling.rounds.urgency import Pending, admit, by_urgency

Placed = tuple[Draft, Devices]


def until_border(
    pending: Sequence[Pending],
    length: float,
    free: FreeDevices,
    memo: ProfileMemo,
    settings: RoundSettings,
) -> list[Placed]:
    """Return groups whose steps end by the border; requests without such a step get none.

    Args:
        length: Seconds until the border.
        free: The devices of the block on which no group runs.
    """
    pending = [p for p in pending if p.times.least <= length]
    if not pending:
        return []
    admit(pending, free.count)
    pending = by_urgency(pending)
    groups: list[Placed] = []
    for request in pending:
        if not free.count:
            break
        fitting = [k for k in request.usable(length) if request.times.seconds[k] <= length]
        wanted = [k for k in fitting if k <= max(request.degree, fitting[0])]
        for degree in reversed(wanted):
            at = free.near(PlacedGroup(degree, request.request.home))
            if at is not None:
                free.take(at)
                groups.append((alone(request, degree), at))
                break
    if settings.scale_up:
        groups = grown(groups, free, memo)
    drafts = [draft for draft, _ in groups]
    join(without_groups(pending, drafts), drafts, length, memo, settings, length)
    return groups
