"""Patches that are chosen stretch by stretch while a step runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from maskfx.errors import InputError
from maskfx.runtime.cache.rolling.read_inputs import InputChanges
from maskfx.runtime.cache.rolling.rolling_pool import RollingPool
from maskfx.runtime.planner.step_planner import StepPlanner
from maskfx.runtime.reuse.judges import Bools, PatchFeatures, TableJudge, Threshold, judge_together
from maskfx.runtime.reuse.patch_choice import PatchChoice, StretchState, choose_patches
from maskfx.runtime.reuse.patch_session import PatchSession
from maskfx.runtime.reuse.patches import PatchReuse
from maskfx.runtime.sites.mask import Mask
from maskfx.runtime.steps import AnyStep, DenseStep, EditStep, RecordStep
from tests.passes.tools import error
from tests.runtime.planner.test_step_planner import costs_of
from tests.runtime.reuse.test_patches import (
    BYTES,
    FAMILIES,
    FLUX,
    Chosen,
    Run,
    always,
    never,
    walk,
)
from tests.runtime.test_oracle import assert_near, tensors
from tests.runtime.test_stretches import denoiser_of, planned_of

STEPS, MOST = 6, 64


def by_table(seed: int, share: float = 0.5) -> Callable[[PatchFeatures], Bools]:
    """Decisions that depend on the call, the stretch and the patch alone."""
    table = np.random.default_rng(seed).random((STEPS, MOST, MOST)) < share

    def choose(features: PatchFeatures) -> Bools:
        rows, patches = features.change.shape
        first = features.stretch - 1
        return np.asarray(table[features.step, first : first + rows, :patches])

    return choose


def run_of(name: str, choose: Callable[[PatchFeatures], Bools], index: int = 0, **more: Any) -> Run:
    settings = {"order": "stretch", "age": 99, "judge": Chosen(choose), **more}
    return Run(name, RollingPool(BYTES), index, index, **settings)


# Numbers.


def choice_of(state: StretchState, judge: Any, inputs: float = 1.0, **more: Any) -> PatchChoice:
    patches = state.patches
    return PatchChoice(
        PatchReuse(**{"sets": "each", "order": "stretch", **more}),
        judge,
        state,
        np.full(patches, inputs),
        np.ones(patches, bool),
        0.5,
        0,
        lambda row: Mask(torch.from_numpy(row)),
    )


def test_no_patch_is_kept_for_more_steps_than_the_greatest_age() -> None:
    draw, most = np.random.default_rng(0), 0
    judge = Chosen(lambda features: draw.random(features.change.shape) < 0.1)
    for greatest in (1, 2, 5):
        state, kept = StretchState(4, 9, reported={2, 4}), np.zeros((4, 9), int)
        for call in range(60):
            sets = ("each", "alike")[call % 2]
            choice = choice_of(state, judge, age=greatest, sets=sets)
            for stretch in range(1, 5):
                changes = draw.random(9) if draw.random() < 0.5 else None
                choose_patches([choice], stretch, [changes])
            kept = np.where(choice.computed, 0, kept + 1)
            assert kept.max() <= greatest
            most = max(most, kept.max())
            state.advance(choice.computed, choice.changes)
        assert most == greatest


def test_a_change_is_the_last_one_that_was_compared_until_the_stretch_computes() -> None:
    state, judge = StretchState(3, 2, reported={2, 3}), Threshold(0.5)
    wanted = [  # of the second stretch: what is compared, and what it computes
        ([0.2, 0.6], [False, True]),
        ([np.nan, 0.1], [False, False]),
        ([np.nan, 0.7], [False, True]),
        ([0.5, np.nan], [True, False]),
        ([0.3, 0.3], [False, False]),
        ([0.3, 0.4], [False, False]),
        ([np.nan, np.nan], [False, False]),  # it is no sum of changes
    ]
    for compared, computed in wanted:
        choice = choice_of(state, judge, age=99)
        for stretch in (1, 2, 3):
            choose_patches([choice], stretch, [np.array(compared) if stretch == 2 else None])
        assert choice.computed.tolist() == [[True, True], computed, [False, False]]
        state.advance(choice.computed, choice.changes)
    assert state.since[1].tolist() == pytest.approx([0.3, 0.4])


def test_stretches_follow_where_nothing_is_compared_or_all_are_alike() -> None:
    draw = np.random.default_rng(0)
    for reported, sets, follow in (
        ({2, 4}, "each", {2: 1}),
        ({2, 3, 4}, "alike", {2: 1, 3: 2}),
        ({3, 4}, "alike", {1: 0, 3: 2}),
    ):
        state = StretchState(4, 12, reported)
        judge = Chosen(lambda features: draw.random(features.change.shape) < 0.5)
        choice = choice_of(state, judge, sets=sets)
        for stretch in range(1, 5):
            choose_patches([choice], stretch, [None])
        assert len(judge.seen) == 4 - len(follow)
        for row in range(1, 4):
            assert np.array_equal(choice.computed[row], choice.computed[row - 1]) == (row in follow)


def test_judges_decide_for_several_requests_as_for_each() -> None:
    draw = np.random.default_rng(0)
    table = TableJudge(draw.random((3, 4, 5, 6)) < 0.5, {})
    asked: list[tuple[Any, PatchFeatures]] = []
    for number, judge in enumerate((table, Threshold(0.3), table, Chosen(always), Threshold(0.3))):
        count = 3 + number
        change, age = draw.random((1, count)), draw.integers(1, 6, (1, count))
        asked.append((judge, PatchFeatures(change, age, (number + 1) / 6, number, 2)))
    for found, (judge, features) in zip(judge_together(asked), asked, strict=True):
        assert np.array_equal(found, judge.computes(features))


def test_a_table_decides_for_a_batch_as_for_each_request_by_its_features() -> None:
    """Also where some inputs weren't compared: all of a request's, or those of some patches."""
    draw = np.random.default_rng(3)
    table = TableJudge(draw.random((4, 3, 8, 16)) < 0.5, {})
    counts = (5, 7, 9)
    together = [StretchState(4, n, {2, 3, 4}) for n in counts]
    alone = [StretchState(4, n, {2, 3, 4}) for n in counts]
    for _ in range(6):
        noises, inputs = draw.random(3), draw.random(3)
        compared = [[10 ** draw.uniform(-5, 2, n) for n in counts] for _ in range(4)]
        compared[1][1][2:4] = np.nan
        given: list[list[Any]] = [list(row) for row in compared]
        given[2][0] = None
        batch = [choice_of(s, table, i) for s, i in zip(together, inputs, strict=True)]
        by_features = Chosen(table.computes)
        others = [choice_of(s, by_features, i) for s, i in zip(alone, inputs, strict=True)]
        for choice, other, noise in zip(batch, others, noises, strict=True):
            choice.noise = other.noise = float(noise)
        for stretch in range(1, 5):
            choose_patches(batch, stretch, given[stretch - 1])
            for other, own in zip(others, given[stretch - 1], strict=True):
                choose_patches([other], stretch, [own])
        for choice, other in zip(batch, others, strict=True):
            assert (choice.computed == other.computed).all()
            for one in (choice, other):
                one.state.advance(one.computed, one.changes)


# Runs.


@pytest.mark.parametrize("name", FAMILIES)
def test_both_orders_give_the_same_numbers_for_the_same_decisions(name: str) -> None:
    choose = by_table(1)
    one, other = run_of(name, choose), run_of(name, choose, order="step")
    shares = set()
    for _ in range(STEPS):
        found, wanted = tensors(one.step()), tensors(other.step())
        assert all(error(a, b) < 1e-5 for a, b in zip(found, wanted, strict=True))
        shares.add(round(one.session.counts.share, 4))
    assert one.session.counts.share == other.session.counts.share < 1
    assert len(shares) > 3
    assert np.array_equal(one.state.age, other.state.age)


@pytest.mark.parametrize("name", FAMILIES)
def test_everything_computed_is_dense_and_everything_kept_is_the_last_answer(name: str) -> None:
    run = run_of(name, lambda features: (always if features.step < 4 else never)(features))
    for _ in range(4):
        last = tensors(run.step())
        assert_near(last, tensors(run.dense()))
    for _ in range(2):
        assert all(map(torch.equal, tensors(run.step()), last))
    assert error(tensors(run.dense())[0], last[0]) > 1e-2
    zero = run_of(name, always, judge=None, threshold=0.0)
    for _ in range(3):
        assert not isinstance(zero.ask(), EditStep)
        assert torch.equal(tensors(zero.take(zero.dense()))[0], tensors(zero.dense())[0])


@pytest.mark.parametrize("name", FAMILIES)
def test_members_of_a_batch_get_what_they_get_alone(name: str) -> None:
    """Other sizes, steps, sets and orders; a recording, a dense step and an edit beside them."""
    denoiser, pool = denoiser_of(name), RollingPool(BYTES)

    def run(index: int) -> Run:
        order = ("stretch", "step", "stretch", "stretch")[index]
        judge = Chosen(by_table(index, (0.5, 0.5, 0.2, 0.0)[index]))
        return Run(name, pool, index, index, order=order, age=99, judge=judge)

    alone, together = [run(i) for i in range(4)], [run(i) for i in range(4)]
    for one in (*alone[:1], *together[:1]):  # the first one is ahead
        one.step()
    beside = next(walk(name, 1, 9))
    output, cache = denoiser.record(**beside)
    mask = torch.zeros(together[1].session.grid.shape, dtype=torch.bool).flatten()
    mask[: len(mask) // 3] = True
    edit = EditStep(beside, mask.view(together[1].session.grid.shape), cache)
    for number in range(4):
        wanted = [one.step() for one in alone]
        more: list[AnyStep] = [edit, DenseStep(beside), RecordStep(beside)]
        asked = [one.ask() for one in together]
        results = denoiser.step([*asked, *(more if number == 2 else [])])
        for one, result, expected in zip(together, results, wanted, strict=False):
            assert_near(one.take(result), expected)
        for result in results[4:]:
            assert_near(tensors(result)[: len(tensors(output))], tensors(output))
    for one, other in zip(alone, together, strict=True):
        assert np.allclose(one.state.since, other.state.since, rtol=1e-3, atol=1e-5)
        assert np.array_equal(one.state.age, other.state.age)


@pytest.mark.parametrize("name", FAMILIES[:2])
def test_inputs_are_compared_with_those_that_a_stretch_last_read(name: str) -> None:
    """The first stretch computes all and the others nothing, so each step is further from those."""
    run = run_of(name, lambda f: (always if f.stretch == 1 else never)(f))
    judge = run.session.settings.judge
    assert isinstance(judge, Chosen)
    run.step()
    run.step()
    _, read = run.denoiser.record(**run.asked)
    cache = run.session._branches[""].cache
    assert cache is not None
    assert cache.changes is not None
    taps = [tap for tap, stretch in cache.changes.boundaries.items() if stretch == 2]
    for _ in range(3):
        judge.seen.clear()
        run.step()
        [compared] = [f.change[0] for f in judge.seen if f.stretch == 2]
        _, now = run.denoiser.record(**run.asked)
        change = size = torch.zeros(run.session.grid.count, dtype=torch.float64)
        for tap in taps:
            before, after = (kept.rows[tap].double().flatten(2) for kept in (read, now))  # type: ignore[union-attr]
            ids = torch.from_numpy(run.session.grid.ids)
            if after.shape[1] != len(ids):  # a square of tokens over the latent's sites
                side = int(after.shape[1] ** 0.5)
                ids = torch.from_numpy(run.session.grid.at((side, side)))
            change = change.index_add(0, ids, (after - before).abs().mean(2).sum(0))
            size = size.index_add(0, ids, before.abs().mean(2).sum(0))
        assert np.allclose(compared, (change / size).numpy(), rtol=1e-3)


def test_one_call_of_a_judge_decides_a_stretch_for_all_requests(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pool, denoiser, seen = RollingPool(BYTES), denoiser_of(FLUX), list[PatchFeatures]()
    usual = Threshold.computes

    def counted(self: Threshold, features: PatchFeatures) -> Bools:
        seen.append(features)
        return usual(self, features)

    monkeypatch.setattr(Threshold, "computes", counted)
    runs = [Run(FLUX, pool, i, i, order="stretch", threshold=0.01) for i in range(3)]
    for _ in range(3):
        seen.clear()
        results = denoiser.step([run.ask() for run in runs])
        for run, result in zip(runs, results, strict=True):
            run.take(result)
    assert [f.stretch for f in seen] == [1, 2, 3, 4]
    patches = sum(run.session.grid.count for run in runs)
    assert all(f.change.shape == (1, patches) for f in seen)


@pytest.mark.slow
@pytest.mark.parametrize("name", [FLUX, "SD3Transformer2DModel"])
def test_plans_and_loads_do_not_change_it(name: str) -> None:
    choose = by_table(3)
    one, other = run_of(name, choose), run_of(name, choose)
    other.denoiser = other.session.denoiser = planned_of(name)
    for _ in range(STEPS):
        assert_near(one.step(), other.step())


def test_a_step_with_planned_edits_leaves_it_alone() -> None:
    """A planner counts the sites of edits before the step; those of a choice aren't known then."""
    run = run_of(FLUX, by_table(5))
    denoiser = run.denoiser = run.session.denoiser = planned_of(FLUX)
    for _ in range(2):
        run.step()
    step = run.ask()
    assert isinstance(step, EditStep)
    assert step.choice is not None
    _, kept = denoiser.record(**run.asked)
    kept.given = []  # nothing can be computed whole from the recording's inputs
    mask = torch.arange(run.session.grid.shape[0]) < 3
    edit = EditStep(run.asked, mask, kept, any_step=True)
    planner = StepPlanner(denoiser, costs_of(denoiser, [edit], 1e-6))
    found = planner.plan_step([step, edit])
    assert found[0] is step
    assert isinstance(found[1], EditStep)
    assert found[1].plan, "slow loads: project what can be"


@pytest.mark.parametrize(("sets", "compared"), [("alike", [2]), ("each", [2, 3, 4])])
def test_inputs_are_compared_where_the_judge_is_asked(
    sets: str, compared: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    run, seen = run_of(FLUX, by_table(6, 0.7), sets=sets), list[int]()
    compare = InputChanges.at

    def counted(self: InputChanges, stretch: int, rows_of: Any) -> Any:
        seen.append(stretch)
        return compare(self, stretch, rows_of)

    monkeypatch.setattr(InputChanges, "at", counted)
    for _ in range(3):
        seen.clear()
        run.step()
    assert seen == compared


def test_a_mask_bounds_what_is_chosen() -> None:
    """Everything chosen is an edit of the mask; full calls in between renew the rest."""
    run = run_of(FLUX, always)
    shape = run.session.grid.shape
    mask = torch.arange(shape[0]) < shape[0] // 3
    run.session = PatchSession(
        run.denoiser, run.session.pool, run.session.settings, run.session.grid, mask, refresh=3
    )
    kept: Any = None
    for number in range(7):
        output = tensors(run.step())[0]
        if number in (0, 1, 4):
            assert_near(output, tensors(run.dense())[0])
            _, kept = run.denoiser.record(**run.asked)
            continue
        wanted = run.denoiser.step([EditStep(run.asked, mask, kept, any_step=True)])[0]
        assert_near(output[:, mask], tensors(wanted)[0][:, mask])


def test_a_step_that_fails_chooses_again(monkeypatch: pytest.MonkeyPatch) -> None:
    choose = by_table(4)
    one, other = run_of(FLUX, choose), run_of(FLUX, choose)
    for _ in range(3):
        one.step()
        other.step()
    step = one.ask()
    with monkeypatch.context() as patch:

        def fails(*_: object) -> None:
            raise RuntimeError("no memory")

        patch.setattr("maskfx.runtime.execution.executor.write_rows", fails)
        with pytest.raises(RuntimeError, match="no memory"):
            one.denoiser.step([step])
    result = one.denoiser.step([step])[0]
    assert isinstance(step, EditStep)
    assert step.choice is not None
    assert len(step.choice.chosen) == len(one.denoiser.stretches)
    assert_near(one.take(result), other.step())
    assert_near(one.step(), other.step())


def test_refuses_caches_that_keep_no_inputs() -> None:
    run = run_of(FLUX, always)
    plain = Run(FLUX, RollingPool(BYTES), order="step", judge=Chosen(always))
    for one in (run, plain):
        one.step()
        one.step()
    step, cache = run.ask(), plain.session._branches[""].cache
    assert isinstance(step, EditStep)
    assert cache is not None
    wrong = EditStep(step.inputs, step.mask, cache, record=True, choice=step.choice)
    with pytest.raises(InputError, match="since_read=True"):
        run.denoiser.step([wrong])


def test_graphs_that_run_as_a_whole_refuse_choices(monkeypatch: pytest.MonkeyPatch) -> None:
    run = run_of(FLUX, always)
    for _ in range(2):
        run.step()
    step = run.ask()
    monkeypatch.setattr(run.denoiser._executor.graphs, "source", object())
    with pytest.raises(InputError, match="runs its graph as a whole"):
        run.denoiser.step([step])


def test_rows_that_are_kept_twice_count() -> None:
    bytes_of = []
    for order in ("step", "stretch"):
        run = Run(FLUX, RollingPool(BYTES, requests=1), order=order, judge=Chosen(always))
        run.step()
        cache = run.session._branches[""].cache
        assert cache is not None
        bytes_of.append(run.session.pool.nbytes())
        kept = cache.block.inputs
    assert kept is not None
    assert bytes_of[1] - bytes_of[0] == sum(rows.nbytes for rows in kept.rows.values()) > 0
    assert all(isinstance(rows, Tensor) for rows in kept.rows.values())


def test_calls_choose_together_what_each_chooses_alone() -> None:
    """With several judges and settings, and where some of them leave in the middle of a step."""
    draw = np.random.default_rng(3)
    table = TableJudge(draw.random((4, 3, 4, 16)) < 0.5, {})
    kinds: list[tuple[Any, dict[str, Any]]] = [
        (Threshold(0.5), {}),
        (table, {"sets": "alike"}),
        (Threshold(0.5), {"age": 1}),
        (table, {}),
        (Chosen(lambda features: features.change > features.noise), {}),
        (Chosen(lambda features: features.age > 1), {}),
    ]
    states = [StretchState(4, 5 + n, reported={2, 4}) for n in range(len(kinds))]
    for state in states:
        state.advance(draw.random(state.age.shape) < 0.5, None)

    def choices() -> list[PatchChoice]:
        each = zip(states, kinds, strict=True)
        return [choice_of(state, judge, 0.4, **more) for state, (judge, more) in each]

    together, alone = choices(), choices()
    for stretch in range(1, 5):
        left = slice(0, 6 if stretch < 3 else 4)
        changes = [draw.random(s.patches) if draw.random() < 0.7 else None for s in states]
        found = choose_patches(together[left], stretch, changes[left])
        for number, mask in enumerate(found):
            [wanted] = choose_patches([alone[number]], stretch, [changes[number]])
            assert mask == wanted
    for one, other in zip(together, alone, strict=True):
        assert np.array_equal(one.computed, other.computed)
        assert np.array_equal(one.changes, other.changes, equal_nan=True)
        assert one.chosen == other.chosen
