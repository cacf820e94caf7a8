"""The profile of a step by degree: its formula, its fit, its file."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from maskfx.errors import InputError
from maskfx.runtime.step_kinds import StepKind
from maskfx.scheduling.cost_model import FittedCosts
from maskfx.scheduling.degree_costs import (
    DegreeCost,
    DegreeCosts,
    ProfileFit,
    from_efficiency,
)
from maskfx.scheduling.load import Work
from maskfx.scheduling.rounds.profile_memo import ProfileMemo

ONE = FittedCosts(base=0.02, per_request=0.005, per_site=1e-5, per_pair=1e-9)
COSTS = DegreeCosts(
    one=ONE,
    by_degree={
        2: DegreeCost(fixed=0.003, slowdown=1.05, per_site=1e-7),
        4: DegreeCost(fixed=0.004, slowdown=1.1, per_site=2e-7),
    },
)
EDIT = Work(sites=500, whole=4096, steps=20)
DENSE = Work(sites=4096, whole=4096, steps=20)


def test_a_step_is_divided_by_its_degree_beyond_its_fixed_part() -> None:
    batch = [EDIT, DENSE]
    assert COSTS.step(1, batch) == ONE.step(batch)
    expected = 0.003 + ONE.step(batch) / 2 * 1.05 + 1e-7 * 4596
    assert COSTS.step(2, batch) == pytest.approx(expected)


def test_a_small_edit_gains_less_from_devices_than_a_dense_step() -> None:
    gains = [COSTS.step(1, [work]) / COSTS.step(4, [work]) for work in (EDIT, DENSE)]
    assert gains[0] < gains[1] < 4


def test_each_device_loads_its_share() -> None:
    one = FittedCosts(base=0.001, per_request=0.0, per_site=0.0, load_bandwidth=1e9)
    heavy = Work(10, 10, 1, bytes=10**9)
    assert from_efficiency(one, {4: 0.9}).step(4, [heavy]) == pytest.approx(0.25)


@st.composite
def works(draw: st.DrawFn) -> Work:
    sites, whole = draw(st.integers(1, 900)), draw(st.sampled_from((900, 2000)))
    kind = draw(st.sampled_from(StepKind))
    return Work(sites, whole, 5, branches=2, bytes=draw(st.sampled_from((0, 10**8))), kind=kind)


@given(st.lists(works(), min_size=1, max_size=3), st.lists(works(), min_size=1, max_size=3))
def test_a_joint_step_takes_what_the_step_of_all_its_members_does(
    some: list[Work], others: list[Work]
) -> None:
    one = FittedCosts(
        base=0.02, per_request=0.005, per_site=1e-5, per_dense_site=2e-5, per_size=0.01,
        load_bandwidth=1e9, avoidable=0.5, per_avoided_byte=1e-9,
    )  # fmt: skip
    costs = DegreeCosts(one=one, by_degree={2: DegreeCost(fixed=0.01, per_site=1e-6)})
    for degree in (1, 2):
        joint = costs.joint(degree)(costs.totals(some), costs.totals(others))
        assert joint == pytest.approx(costs.step(degree, [*some, *others]), rel=1e-12)
    assert costs.step(1, [*some, *others]) == pytest.approx(one.step([*some, *others]), rel=1e-12)


def test_the_memo_tells_works_of_different_kinds_apart() -> None:
    """Equal sites take longer where all of a picture is computed."""
    one = FittedCosts(base=0.02, per_request=0.005, per_site=1e-5, per_dense_site=2e-5)
    memo = ProfileMemo(DegreeCosts(one=one), (1,), 1)
    edit, dense = (Work(900, 900, 5, kind=kind) for kind in (StepKind.EDIT, StepKind.DENSE))
    found = memo.of_all([edit, dense, edit])
    assert found[0] is found[2] is memo.of(edit)
    assert found[1].times.seconds[1] - found[0].times.seconds[1] == pytest.approx(900e-5)


def test_a_fit_finds_the_costs_that_made_the_samples_and_reports_its_error() -> None:
    draw = np.random.default_rng(5)
    fit = ProfileFit(FittedCosts(base=0.01, per_request=0.01, per_site=1e-6, per_pair=1e-9))
    for degree in (1, 2, 4):
        for _ in range(60):
            sides = draw.integers(16, 128, draw.integers(1, 4)).tolist()
            batch = [Work(round(s * s * draw.uniform(0.05, 1)), s * s, 1) for s in sides]
            seconds = COSTS.step(degree, batch) * float(np.exp(draw.normal(0, 0.01)))
            fit.add(degree, batch, seconds)
    found, errors = fit.fit()
    assert found.degrees == (1, 2, 4)
    for degree in (1, 2, 4):
        for batch in ([EDIT], [DENSE], [EDIT, DENSE]):
            assert found.step(degree, batch) == pytest.approx(COSTS.step(degree, batch), rel=0.03)
        assert 0.003 < errors[degree].median < 0.02
        assert errors[degree].median <= errors[degree].largest
        assert errors[degree].samples == 60
        assert (errors[degree].r2 or 0.0) > 0.99


def test_a_fit_that_the_formula_does_not_describe_has_a_large_error() -> None:
    fit = ProfileFit(ONE)
    for seconds in (0.1, 1.0) * 4:
        fit.add(2, [EDIT], seconds)
    assert fit.fit()[1][2].largest > 0.4


def test_few_samples_on_one_device_keep_the_given_costs() -> None:
    fit = ProfileFit(ONE)
    fit.add(1, [EDIT], 7.0)
    assert fit.fit()[0].one == ONE


def test_wrong_samples_and_costs_are_refused() -> None:
    fit = ProfileFit(ONE)
    with pytest.raises(InputError, match="degree 5"):
        fit.add(5, [EDIT], 1.0)
    with pytest.raises(InputError, match="at least one request"):
        fit.add(2, [], 1.0)
    with pytest.raises(InputError, match="positive"):
        fit.add(2, [EDIT], float("nan"))
    with pytest.raises(InputError, match=r"by_degree has \[6\]"):
        DegreeCosts(one=ONE, by_degree={6: DegreeCost()})
    with pytest.raises(InputError, match="at most 1"):
        from_efficiency(ONE, {2: 1.2})


def test_costs_survive_their_file() -> None:
    assert DegreeCosts.from_json(COSTS.to_json()) == COSTS
    with pytest.raises(InputError, match="degree costs"):
        DegreeCosts.from_json(b'{"unknown": 1}')
