"""Numbers of many requests at once against those of one after the other."""

from math import inf

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from maskfx.scheduling.cost_model import FittedCosts
from maskfx.scheduling.degree_costs import DegreeCost, DegreeCosts
from maskfx.scheduling.load import Work
from maskfx.scheduling.rounds.many_requests import of_many
from maskfx.scheduling.rounds.profile_memo import ProfileMemo
from maskfx.scheduling.rounds.round_plan import RoundRequest
from maskfx.scheduling.rounds.urgency import Pending

COSTS = DegreeCosts(
    one=FittedCosts(base=0.01, per_request=0.0, per_site=1e-4),
    by_degree={
        2: DegreeCost(fixed=0.004, slowdown=1.05),
        3: DegreeCost(fixed=0.005, slowdown=1.07),
        4: DegreeCost(fixed=0.006, slowdown=1.1),
        8: DegreeCost(fixed=0.02, slowdown=1.2),
    },
)


@st.composite
def asked(draw: st.DrawFn) -> RoundRequest:
    steps = draw(st.integers(1, 20))
    sites = draw(st.integers(1, 4000))
    return RoundRequest(
        str(draw(st.integers(0, 99))),
        Work(sites=sites, whole=max(1000, sites), steps=steps),
        draw(st.integers(1, steps)),
        draw(st.floats(0.0, 1.0)),
        draw(st.one_of(st.just(inf), st.floats(0.01, 20.0))),
        draw(st.floats(0.0, 0.2)),
    )


@settings(max_examples=150, deadline=None)
@given(
    st.lists(asked(), min_size=1, max_size=12), st.sampled_from(((1,), (1, 2, 3, 4, 8), (1, 4))),
    st.floats(0.0, 5.0), st.sampled_from((0.0, 0.02)),
)  # fmt: skip
def test_numbers_are_those_of_each_request_alone(
    requests: list[RoundRequest], degrees: tuple[int, ...], now: float, margin: float
) -> None:
    memo = ProfileMemo(COSTS, degrees, 8, kinds=8)  # fewer than there may be requests
    together = of_many(requests, memo, now, patience=2.0, margin=margin)
    for request, found in zip(requests, together, strict=True):
        times = ProfileMemo(COSTS, degrees, 8).of(request.work).times
        one = Pending(request, times, now, patience=2.0, margin=margin)
        assert (found.id, found.left, found.rank) == (one.id, one.left, one.rank)
        assert (found.overdue, found.degree) == (one.overdue, one.degree)
        assert found.due == one.due
        assert found.latest_start == one.latest_start
        assert found.need == pytest.approx(one.need, rel=1e-12)
        assert found.times.seconds == times.seconds
