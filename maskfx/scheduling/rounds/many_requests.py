"""The numbers of many requests of a round at once, with arrays: the same as `Pending` has of one.

Pure: no clock.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from operator import attrgetter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from maskfx.runtime.planner.least_squares import Floats
from maskfx.scheduling.rounds.allocation import EDGE
from maskfx.scheduling.rounds.profile_memo import ProfileMemo
from maskfx.scheduling.rounds.round_plan import RoundRequest
from maskfx.scheduling.rounds.urgency import Pending, Rank

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
    works = [request.work for request in requests]
    kinds = memo.of_all(works)
    rows = column(kinds, "row", np.int64)
    seconds, sizes, least = memo.seconds[rows], memo.sizes[rows], memo.least[rows]
    left: Floats = column(requests, "left")
    asked: Floats = column(requests, "due")
    due = asked - column(requests, "after")
    end = now + left * least
    late = end > due * (1 + EDGE) + EDGE
    patient = ~late & (asked == inf)
    alone = np.maximum(column(works, "steps"), left) * least
    patient_due = column(requests, "arrived") + patience * alone
    kept = np.minimum(due, np.maximum(end, now + (due - now) * (1 - margin)))
    due = np.where(late, np.maximum(due, patient_due), np.where(patient, patient_due, kept))
    ranks = np.where(late, Rank.LATE, np.where(patient, Rank.PATIENT, Rank.CROWDED))
    room = (due - now) * (1 + EDGE) + EDGE
    within = left[:, None] * seconds <= room[:, None]
    degrees = sizes[np.arange(len(rows)), within.argmax(1)]  # the first if none is
    numbers = zip(
        requests,
        kinds,
        map(RANKS.__getitem__, ranks.tolist()),
        due.tolist(),
        ((ranks >= Rank.PATIENT) & (now > due)).tolist(),
        (due - left * least).tolist(),
        fluid(left, due - now, seconds, sizes, memo.widest[rows]).tolist(),
        degrees.astype(np.intp).tolist(),
        strict=True,
    )
    found = []
    new = Pending.__new__
    for request, kind, rank, until, overdue, start, need, degree in numbers:
        made = new(Pending)
        made.request, made.times, made.now = request, kind[1], now
        made.left, made.id = request.left, request.id
        made.rank, made.due, made.overdue, made.latest_start = rank, until, overdue, start
        made._need, made._degree = need, degree
        found.append(made)
    return found


def column(items: Sequence[object], name: str, dtype: type = np.float64) -> NDArray[Any]:
    """Return an attribute of each."""
    return np.fromiter(map(attrgetter(name), items), dtype, len(items))


def fluid(left: Floats, slack: Floats, seconds: Floats, sizes: Floats, widest: Floats) -> Floats:
    """Return what `StepTimes.fluid` does, of many requests.

    Args:
        seconds: A row per request: the times of its hull, slowest first, then infinite ones.
        sizes: The degrees of these times.
        widest: The last of the degrees.
    """
    each = slack / np.maximum(left, 1)
    least = seconds.min(1)
    requests, within = np.arange(len(left)), seconds <= each[:, None]
    above = within.argmax(1)  # the first degree that is in time; 0 if none is
    below = np.maximum(above - 1, 0)
    fast, slow = seconds[requests, above], seconds[requests, below]
    high, low = sizes[requests, above], sizes[requests, below]
    between = above > 0
    share = (slow - each) / np.where(between, slow - fast, 1.0)
    cost = share * high * fast + (1 - share) * low * slow
    found: Floats = np.where(between, left * cost, left * high * fast)
    found = np.where(each < least, left * widest * least, found)
    found = np.where(left * least > slack * (1 + EDGE) + EDGE, inf, found)
    return np.where(left == 0, 0.0, found)
