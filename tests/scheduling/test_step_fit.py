"""What a batch is made of, and what its parts are found to cost."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import numpy as np
import pytest

from maskfx.runtime.step_kinds import StepKind
from maskfx.scheduling.composition import Composition, expected, members_of
from maskfx.scheduling.cost_model import COEFFICIENTS, START, FittedCosts
from maskfx.scheduling.load import Work
from maskfx.scheduling.step_fit import StepFit
from maskfx.scheduling.step_reports import StepMember

TRUTH = FittedCosts(
    base=0.05,
    per_request=0.02,
    per_first=0.03,
    per_reuse=0.04,
    per_size=0.03,
    per_site=1e-4,
    per_dense_site=6e-5,
    per_record_site=1.4e-4,
    per_reuse_site=2e-4,
    per_pair=2e-8,
)


def batches(count: int, seed: int) -> list[list[Work]]:
    draw = np.random.default_rng(seed)

    def one() -> Work:
        whole, kind = int(draw.choice([576, 1024, 1600])), StepKind(draw.choice(list(StepKind)))
        partial = kind in (StepKind.EDIT, StepKind.REUSE)
        sites = int(draw.integers(10, whole)) if partial else whole
        return Work(sites, whole, 20, branches=int(draw.integers(1, 3)), kind=kind)

    return [[one() for _ in range(draw.integers(1, 9))] for _ in range(count)]


def test_a_composition_counts_requests_sizes_sites_and_pairs() -> None:
    found = Composition.of(
        [
            StepMember(StepKind.EDIT, 100, 576, 2),
            StepMember(StepKind.EDIT, 50, 1024, first=True),
            StepMember(StepKind.DENSE, 576, 576, first=True),
            StepMember(StepKind.RECORD, 1024, 1024),
            StepMember(StepKind.REUSE, 300, 1024),
        ]
    )
    assert found[:5] == (1, 5, 1, 1, 2)
    assert found[5:9] == (150, 576, 1024, 300)
    assert found.pairs == 100 * 576 + 50 * 1024 + 576**2 + 1024**2 + 300 * 1024
    assert Composition.of([]) == Composition()
    assert Composition.of([StepMember(StepKind.REUSE, 0, 1024)]) == Composition(), "keeps all"


def test_costs_are_linear_in_the_composition() -> None:
    assert len(COEFFICIENTS) == len(Composition._fields)
    assert tuple(getattr(TRUTH, name) for name in COEFFICIENTS) == TRUTH.coefficients
    for batch in batches(20, seed=1):
        said = np.array(expected(batch)) @ np.array(TRUTH.coefficients)
        assert TRUTH.step(batch) == pytest.approx(said)


def test_sites_of_other_kinds_cost_as_those_of_an_edit_unless_told() -> None:
    plain = FittedCosts(base=0.0, per_request=0.0, per_site=1e-3)
    for kind in StepKind:
        assert plain.step([Work(10, 100, 1, kind=kind)]) == pytest.approx(0.01)


@pytest.mark.parametrize("noise", [0.0, 0.05])
def test_compositions_that_were_never_seen_are_predicted(noise: float) -> None:
    draw, fit = np.random.default_rng(2), StepFit(START.coefficients)
    for number, batch in enumerate(batches(240, seed=3)):
        disturbed = 5.0 if number % 20 == 7 else 1.0
        fit.add(expected(batch), TRUTH.step(batch) * disturbed * draw.normal(1, noise))
    found = np.array(fit.fit())
    off = [np.array(expected(b)) @ found / TRUTH.step(b) - 1 for b in batches(60, seed=4)]
    assert np.abs(off).mean() < (0.02 if noise else 0.005)
    assert fit.r2 is not None
    assert fit.r2 > 0.95


def test_a_machine_that_slows_down_is_followed_before_the_window_is_renewed() -> None:
    fit = StepFit(START.coefficients)
    for factor, count, seed in ((1.0, 200, 5), (3.0, 24, 6)):
        for batch in batches(count, seed):
            fit.add(expected(batch), factor * TRUTH.step(batch))
    [batch] = batches(1, seed=7)
    assert np.array(expected(batch)) @ np.array(fit.fit()) > 2.2 * TRUTH.step(batch)
    slow = np.array(fit.fit(drift=False))
    assert np.array(expected(batch)) @ slow < 1.5 * TRUTH.step(batch)


def test_a_worker_reports_what_is_expected_of_its_requests() -> None:
    work = Work(30, 576, 5, branches=2, kind=StepKind.REUSE)
    assert members_of([work]) == [StepMember(StepKind.REUSE, 60, 576, 2)]
    [found] = members_of([replace(work, weighted=45.5, pairs=2000.0)])
    assert (found.sites, found.work, found.pairs) == (60, 91.0, 4000.0)


def test_sites_and_pairs_weighted_by_level_count_where_they_are_known() -> None:
    plain, weighted = StepMember(StepKind.EDIT, 60, 576, 2), (91.0, 4000.0)
    both = Composition.of([plain, msgspec.structs.replace(plain, work=91.0, pairs=4000.0)])
    assert (both.edit_sites, both.pairs) == (60 + weighted[0], 60 * 576 + weighted[1])
    work = Work(30, 576, 5, branches=2, weighted=45.5, pairs=2000.0)
    assert TRUTH.step([work]) == pytest.approx(
        np.array(expected([work])) @ np.array(TRUTH.coefficients)
    )


def test_what_first_steps_take_longer_is_found_and_added_once() -> None:
    fit = StepFit(START.coefficients)
    for number, batch in enumerate(batches(200, seed=8)):
        members = [
            msgspec.structs.replace(member, first=(number + place) % 5 == 0)
            for place, member in enumerate(members_of(batch))
        ]
        firsts = Composition.of(members).firsts
        fit.add(Composition.of(members), TRUTH.step(batch) + TRUTH.per_first * firsts)
    assert fit.fit().firsts == pytest.approx(TRUTH.per_first, rel=0.05)
    without = msgspec.structs.replace(TRUTH, per_first=0.0)
    work = Work(30, 576, 5)
    assert TRUTH.solo(work) - without.solo(work) == pytest.approx(TRUTH.per_first)
    dense = replace(work, kind=StepKind.DENSE)
    assert TRUTH.solo(dense) == without.solo(dense)
