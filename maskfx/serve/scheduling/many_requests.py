"""The numbers of many requests of a round at once, with arrays: the same as `Pending` has of one.

Pure: no clock.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf

import numpy as np

from maskfx.runtime.planner.least_squares import Floats
from maskfx.serve.scheduling.allocation import EDGE
from maskfx.serve.scheduling.profile_memo import ProfileMemo
from maskfx.serve.scheduling.round_plan import RoundRequest
from maskfx.serve.scheduling.urgency import Pending, Rank

FEW = 16  # requests, up to which arrays take longer
RANKS = tuple(Rank)


def pending_of(
    requests: Sequence[RoundRequest],
    memo: ProfileMemo,
    now: float,
    *,
    patience: float,
    margin: float,
) -> list[Pending]:
    """Return the requests with their numbers, in the order given."""
    if len(requests) > FEW:
        return of_many(requests, memo, now, patience=patience, margin=margin)
    return [
        Pending(r, memo.of(r.work).times, now, patience=patience, margin=margin) for r in requests
    ]


def of_many(
    requests: Sequence[RoundRequest],
    memo: ProfileMemo,
    now: float,
    *,
    patience: float,
    margin: float,
) -> list[Pending]:
    memo.make_room(len(requests))
    kinds = [memo.of(request.work) for request in requests]
    rows = [kind.row for kind in kinds]
    seconds, sizes = memo.seconds[rows], memo.sizes[rows]
    left: Floats = np.array([r.left for r in requests], np.float64)
    least: Floats = np.array([kind.times.least for kind in kinds])
    asked: Floats = np.array([r.due for r in requests])
    due = asked - np.array([r.after for r in requests])
    end = now + left * least
    late = end > due * (1 + EDGE) + EDGE
    patient = ~late & (asked == inf)
    alone = np.maximum([r.work.steps for r in requests], left) * least
    patient_due = np.array([r.arrived for r in requests]) + patience * alone
    kept = np.minimum(due, np.maximum(end, now + (due - now) * (1 - margin)))
    due = np.where(late, np.maximum(due, patient_due), np.where(patient, patient_due, kept))
    ranks = np.where(late, Rank.LATE, np.where(patient, Rank.PATIENT, Rank.CROWDED))
    room = (due - now) * (1 + EDGE) + EDGE
    within = left[:, None] * seconds <= room[:, None]
    degrees = sizes[np.arange(len(rows)), within.argmax(1)]  # the first if none is
    numbers = zip(
        ranks.tolist(),
        due.tolist(),
        ((ranks >= Rank.PATIENT) & (now > due)).tolist(),
        (due - left * least).tolist(),
        fluid(left, due - now, seconds, sizes).tolist(),
        degrees.astype(np.intp).tolist(),
        strict=True,
    )
    found = []
    for request, kind, known in zip(requests, kinds, numbers, strict=True):
        made = Pending.__new__(Pending)
        made.request, made.times, made.now = request, kind.times, now
        made.left, made.id = request.left, request.id
        made.set_numbers(RANKS[known[0]], *known[1:])
        found.append(made)
    return found


def fluid(left: Floats, slack: Floats, seconds: Floats, sizes: Floats) -> Floats:
    """Return what `StepTimes.fluid` does, of many requests.

    Args:
        seconds: A row per request: the times of its hull, slowest first, then infinite ones.
        sizes: The degrees of these times.
    """
    each = slack / np.maximum(left, 1)
    least = seconds.min(1)
    found: Floats = left * sizes.max(1) * least
    with np.errstate(invalid="ignore"):  # infinite times where a hull has fewer degrees
        for at in range(seconds.shape[1] - 2, -1, -1):
            slow, fast = seconds[:, at], seconds[:, at + 1]
            share = (slow - each) / (slow - fast)
            cost = share * sizes[:, at + 1] * fast + (1 - share) * sizes[:, at] * slow
            found = np.where((each >= fast) & (fast < inf), left * cost, found)
    found = np.where(each >= seconds[:, 0], left * sizes[:, 0] * seconds[:, 0], found)
    found = np.where(left * least > slack * (1 + EDGE) + EDGE, inf, found)
    return np.where(left == 0, 0.0, found)
