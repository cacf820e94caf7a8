"""The bench of compositions: exact costs are found, and a predictor without sizes isn't exact."""

from __future__ import annotations

import numpy as np
import pytest

from bench.costs import compositions
from bench.costs.compositions import costs_of, judged, least, noise, repeated, repeats
from bench.costs.predictors import Served, SitesOnly, SupportVectors, WithCalls, errors
from bench.costs.steps import StepSeen, drawn
from maskfx.runtime.step_kinds import StepKind
from maskfx.scheduling.cost_model import FittedCosts
from maskfx.scheduling.load import Work
from maskfx.scheduling.step_reports import StepMember

TRUTH = FittedCosts(
    base=0.05, per_request=0.02, per_size=0.05, per_site=1e-4, per_dense_site=3e-4, per_pair=1e-7
)


def seen(count: int) -> list[StepSeen]:
    """Steps of random compositions, each three times."""
    draw, found = np.random.default_rng(0), []
    for run in range(count):
        asked = drawn(draw, 6)
        batch = []
        for one in asked:
            whole = (one.pixels // 8) ** 2
            partial = one.kind in (StepKind.EDIT, StepKind.REUSE)
            sites = round(one.share * whole) if partial else whole
            batch.append(Work(sites, whole, 5, kind=one.kind))
        members = [StepMember(work.kind, work.sites, work.whole) for work in batch]
        seconds = TRUTH.step(batch)
        found += [StepSeen(run, members, 2 * seconds, seconds)] * 3
    return found


def test_exact_costs_are_found_and_sites_alone_are_not_enough(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kinds = {"sites": SitesOnly, "composition": Served}
    monkeypatch.setattr(compositions, "predictors", lambda sizes: kinds)
    row = judged("made up", seen(40))
    for clock in ("cpu", "seconds"):
        assert row[clock]["noise"] == 0
        held_out = row[clock]["held_out"]
        assert held_out["composition"]["mape"] < 0.03
        assert held_out["composition"]["r2"] > 0.99
        assert held_out["sites"]["mape"] > 2 * held_out["composition"]["mape"]
    assert row["seconds"]["median"] == pytest.approx(2 * row["cpu"]["median"])


def test_noise_is_that_of_equal_steps() -> None:
    one = [StepMember(StepKind.EDIT, 9, 64)]
    steps = [StepSeen(0, one, 1.0, cpu) for cpu in (1.0, 1.0, 2.0)]
    found = noise(compositions.Data.of(steps, "cpu"))
    assert found == pytest.approx(0.5 / 3)


def test_support_vectors_learn_too() -> None:
    steps = [one.members for one in seen(30)]
    seconds = np.array([one.cpu for one in seen(30)])
    made = SupportVectors(sorted({m.whole for step in steps for m in step}), full=True)
    made.fit(steps, seconds)
    assert errors(seconds, made.predict(steps))["r2"] > 0.8


def test_costs_for_the_simulator_are_those_of_the_steps() -> None:
    found = costs_of("dit", seen(40))
    for kind in (StepKind.EDIT, StepKind.DENSE):
        batch = [Work(576, 576, 1, kind=kind), Work(100, 1024, 1)]
        assert found.step(batch) == pytest.approx(TRUTH.step(batch), rel=0.05)
    assert "'dit'" in found.origin


def test_a_step_repeated_in_other_turns_bounds_what_can_be_predicted() -> None:
    """The second turn is half as fast, and one of its steps has an outlier."""
    steps = [
        StepSeen(run, [StepMember(StepKind.EDIT, 9 + run, 64)], cpu, cpu, turn, 0, reference)
        for run in range(5)
        for turn, cpu, reference in ((0, 1.0, 0.1), (1, 4.0 if run == 4 else 2.0, 0.2))
    ]
    found = repeats(steps)
    assert (found["groups"], found["steps"]) == (5, 10)
    speeds = found["cpu"]["speeds"]
    assert speeds["1"] / speeds["0"] == pytest.approx(2)
    assert found["cpu"]["median"] > 0.4
    assert found["cpu"]["median_scaled"] == pytest.approx(0)
    assert found["cpu"]["mape_scaled"] > 0.1  # the outlier
    assert found["of the reference"]["median"] == pytest.approx(0)
    assert [one.cpu for one in least(steps)] == [1.0] * 5
    assert repeated(steps[::2]) == []


def test_calls_distinguish_what_the_composition_does_not() -> None:
    """A step that has dense members takes as long again for each of their sizes."""
    draw, steps, seconds = np.random.default_rng(1), [], []
    for _ in range(200):
        kinds = draw.choice([StepKind.EDIT, StepKind.DENSE], 3)
        sizes = draw.choice([64, 128, 256], 3).tolist()
        step = [StepMember(StepKind(k), n, n) for k, n in zip(kinds, sizes, strict=True)]
        calls = len({m.whole for m in step if m.kind is StepKind.DENSE})
        steps.append(step)
        seconds.append(1.0 + calls + 1e-3 * sum(sizes))
    seen_seconds = np.array(seconds)
    off = []
    for predictor in (WithCalls(), Served()):
        predictor.fit(steps[:150], seen_seconds[:150])
        off.append(errors(seen_seconds[150:], predictor.predict(steps[150:]))["mape"])
    assert off[0] < 0.02 < off[1]
