"""Judges: thresholds and tables, and the training of tables."""

from __future__ import annotations

from pathlib import Path
from time import process_time

import numpy as np
import pytest
import torch

from maskfx.errors import InputError
from maskfx.runtime.reuse.judge_training import (
    AGREEING,
    ObservedRun,
    forecast_error,
    samples_of,
    train_judge,
)
from maskfx.runtime.reuse.judges import (
    PatchFeatures,
    TableJudge,
    Threshold,
    bin_changes,
    change_bins,
    load_judge,
)
from maskfx.runtime.reuse.patch_calls import LISTED, ObservedCall, PatchCounts
from maskfx.runtime.reuse.patches import PatchReuse
from maskfx.runtime.sites.patches import PatchGrid

GRID, STRETCHES, CALLS = PatchGrid((8, 8), 2), 3, 14


def features(change: object, age: int = 1, noise: float = 0.5) -> PatchFeatures:
    found = np.asarray(change, float)
    return PatchFeatures(found, np.full(found.shape, age), noise)


def run_of(seed: int) -> ObservedRun:
    """Patches move at speeds of their own; outputs bend where inputs change fast."""
    draw = np.random.default_rng(seed)
    speed = draw.choice([0.01, 0.3], GRID.count)
    calls = []
    value = torch.from_numpy(draw.random((64, 4))) + 1
    for call in range(CALLS):
        moved = torch.from_numpy(speed[GRID.ids])[:, None] * torch.from_numpy(
            draw.standard_normal((64, 4))
        )
        rates = np.tile(speed, (STRETCHES, 1)) if call else np.full((STRETCHES, GRID.count), np.inf)
        value = value + moved
        calls.append(ObservedCall("0", value, value.clone(), rates, 1 - call / CALLS))
    return ObservedRun(GRID, calls)


def test_a_threshold_computes_what_changed_as_much() -> None:
    assert Threshold(0.2).computes(features([[0.1, 0.2, 0.3]])).tolist() == [[False, True, True]]
    assert Threshold(0.0).keeps_nothing
    assert not Threshold(0.1).keeps_nothing


def test_a_table_is_looked_up_by_stretch_age_noise_and_change() -> None:
    draw = np.random.default_rng(1)
    table = draw.random((5, 4, 8, 16)) < 0.5
    age, noise = draw.integers(1, 9, (3, 20)), draw.random(20)
    change = 10 ** draw.uniform(-6, 3, (3, 20))
    judge, asked = TableJudge(table, {}), PatchFeatures(change, age, noise, stretch=2)
    found = judge.computes(asked)
    for row, patch in np.ndindex(3, 20):
        [level] = change_bins(change[row, patch : patch + 1], 16)
        own = min(int(age[row, patch]), 4) - 1, int(noise[patch] * 8), level
        assert found[row, patch] == table[row + 1][own]
    places = judge.places(np.concatenate([age[:1], age]), noise)[1:]  # of all stretches at once
    assert (judge.at(places, change) == found).all()


def test_bins_are_those_of_their_middles_and_hold_everything() -> None:
    assert change_bins(bin_changes(64), 64).tolist() == list(range(64))
    assert change_bins(np.array([0.0, 1e-9, 1e9, np.inf]), 64).tolist() == [0, 0, 63, 63]


def test_a_table_is_read_by_stretch_age_noise_and_change() -> None:
    table = np.zeros((2, 3, 4, 8), bool)
    table[1, 2, 3, 7] = True
    judge = TableJudge(table, {})
    asked = features([[9.0, 9.0], [0.001, 9.0]], age=5, noise=1.0)
    assert judge.computes(asked).tolist() == [[False, False], [False, True]]
    assert not judge.computes(features([[9.0], [9.0]], age=5, noise=0.7)).any()
    assert "of 2 stretches, this one has 3" in judge.refusal(3)
    assert judge.refusal(2) == ""


def test_a_saved_judge_is_read_again(tmp_path: Path) -> None:
    draw = np.random.default_rng(0)
    judge = TableJudge(draw.random((3, 2, 5, 7)) < 0.5, {"auc": 0.9})
    judge.save(tmp_path / "judge.npz")
    found = load_judge(tmp_path / "judge.npz")
    assert np.array_equal(found.table, judge.table)
    assert found.card == {"auc": 0.9}
    assert PatchReuse(judge=tmp_path / "judge.npz").decides is found
    (tmp_path / "other.npz").write_bytes(b"nothing")
    with pytest.raises(InputError, match="train it again"):
        load_judge(tmp_path / "other.npz")
    with pytest.raises(InputError, match="judge=5: give a file"):
        PatchReuse(judge=5)  # type: ignore[arg-type]


def test_samples_say_whether_a_continued_output_is_wrong() -> None:
    run = run_of(0)
    samples = samples_of(run, 2, 0.1)
    calls = sum(min(2, call - 1) for call in range(2, CALLS))
    assert len(samples.computed) == calls * STRETCHES * GRID.count
    wanted = np.concatenate(
        [forecast_error(run, 2, 1) > 0.1] * STRETCHES  # the first one: call 2, age 1
    )
    assert np.array_equal(samples.computed[: len(wanted)], wanted)
    speeds = run.calls[1].rates[0]
    assert samples.features[GRID.count, 0] == pytest.approx(speeds[0])  # of the second stretch
    assert samples.features[0, 2:].tolist() == [1, run.calls[2].noise]


def test_a_trained_judge_tells_fast_patches_from_slow_ones() -> None:
    judge = train_judge([[run_of(seed)] for seed in range(8)], 3, 0.05, {"model": "none"})
    card = judge.card
    assert card["held_out"] == 2
    assert card["auc"] > 0.9
    assert card["table_agreement"] >= AGREEING
    assert max(card["importance"], key=card["importance"].get) == "change"
    found = judge.computes(features(np.full((STRETCHES, 1), 0.4)))
    kept = judge.computes(features(np.full((STRETCHES, 1), 0.005)))
    assert found.all()
    assert not kept.any()
    with pytest.raises(InputError, match="two runs or more"):
        train_judge([[run_of(0)]], 3, 0.05, {})


def test_judging_a_step_of_many_requests_takes_less_than_a_millisecond() -> None:
    """24 stretches, 16 requests, 64 patches; the best of many tries, as the machine is shared."""
    draw = np.random.default_rng(0)
    judge = TableJudge(draw.random((24, 6, 32, 256)) < 0.5, {})
    asked = features(draw.random((24, 16 * 64)), age=2)
    judge.computes(asked)
    best = 1.0
    for _ in range(50):
        began = process_time()
        judge.computes(asked)
        best = min(best, process_time() - began)
    assert best < 1e-3


def test_counts_of_patches_are_kept_by_stretch_up_to_a_bound() -> None:
    whole = PatchCounts()
    counts = PatchCounts(whole=whole)
    counts.add(np.ones(1), 100)  # a call in full
    counts.add(np.array([1.0, 0.5, 0.0]), 100)
    counts.add(np.linspace(1, 0, LISTED + 8), 10)
    for own in (counts, whole):
        assert own.computed == pytest.approx(155)
        assert own.total == 210
        assert sorted(own.stretches) == list(range(1, LISTED + 1))
        assert own.stretches[2].computed == pytest.approx(50 + 10 * (1 - 1 / (LISTED + 7)))
        assert own.stretches[2].total == 110
        assert own.stretches[LISTED].total == 9 * 10
    counts.clear()
    assert (counts.total, counts.stretches, whole.total) == (0, {}, 210)
