"""Trains a judge on runs of a model that computed everything, and tabulates it.

A random forest learns from the features that are known before a step whether the output of a patch
would have been wrong, had it been continued from earlier outputs instead of computed.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray

from maskfx.errors import InputError
from maskfx.ir.geometry.grids import Floats
from maskfx.runtime.reuse.forecast import KEPT, weights_of
from maskfx.runtime.reuse.judges import FEATURES, Bools, TableJudge, bin_changes
from maskfx.runtime.reuse.patch_calls import ObservedCall
from maskfx.runtime.sites.patches import PatchGrid

if TYPE_CHECKING:
    from sklearn.ensemble import RandomForestClassifier

TREES, DEPTH, LEAF = 20, 8, 20  # of the forest
NOISES, CHANGES = 32, 256  # bins of the table
MOST = 200_000  # samples that the forest is trained on
AGREEING = 0.99  # share of held-out samples on which table and forest should decide alike


@dataclass(frozen=True)
class ObservedRun:
    """The calls of one guidance branch of a run that computed all patches."""

    grid: PatchGrid
    calls: Sequence[ObservedCall]


@dataclass(frozen=True)
class Samples:
    """Features in the order of `FEATURES`, and whether computing was necessary."""

    features: Floats
    computed: Bools

    @staticmethod
    def joined(parts: Sequence[Samples]) -> Samples:
        return Samples(
            np.concatenate([part.features for part in parts]),
            np.concatenate([part.computed for part in parts]),
        )

    def some(self, most: int, draw: np.random.Generator) -> Samples:
        if len(self.computed) <= most:
            return self
        chosen = draw.choice(len(self.computed), most, replace=False)
        return Samples(self.features[chosen], self.computed[chosen])


def samples_of(run: ObservedRun, greatest: int, tolerance: float) -> Samples:
    """Return a sample per call, age, stretch and patch.

    Args:
        run: The run.
        greatest: The greatest age.
        tolerance: The relative error of a patch's output from which it has to be computed.
    """
    parts = []
    calls = run.calls
    for now in range(len(calls)):
        for age in range(1, greatest + 1):
            last = now - age
            if last < 0 or not np.isfinite(calls[last].rates[1:]).all():
                continue
            change = calls[last].rates * age
            change[0] = change_of(run.grid, calls[now].inputs, calls[last].inputs)
            wrong = forecast_error(run, now, last) > tolerance
            stretch = np.broadcast_to(np.arange(len(change))[:, None], change.shape)
            columns = (
                change,
                stretch,
                np.full_like(change, age),
                np.full_like(change, noise(run, now)),
            )
            features = np.stack([column.reshape(-1) for column in columns], 1).astype(np.float64)
            parts.append(Samples(features, np.broadcast_to(wrong, change.shape).reshape(-1)))
    if not parts:
        raise InputError("train-judge: the runs are too short; give more steps")
    return Samples.joined(parts)


def noise(run: ObservedRun, call: int) -> float:
    return run.calls[call].noise


def change_of(grid: PatchGrid, now: torch.Tensor, before: torch.Tensor) -> Floats:
    """Return the relative change of each patch, as a session measures it."""
    return relative(grid, (now - before).abs(), before.abs())


def forecast_error(run: ObservedRun, now: int, last: int) -> Floats:
    """Return the relative error of each patch's output, continued from those up to call `last`."""
    known = list(range(max(0, last - KEPT + 1), last + 1))
    outputs = [run.calls[at].outputs.double() for at in known]
    guess = sum(w * value for w, value in zip(weights_of(known, now), outputs, strict=True))
    wanted = run.calls[now].outputs.double()
    return relative(run.grid, (guess - wanted).abs(), wanted.abs())


def relative(grid: PatchGrid, part: torch.Tensor, whole: torch.Tensor) -> Floats:
    sums = [
        np.bincount(grid.ids, weights=value.double().mean(1).cpu().numpy(), minlength=grid.count)
        for value in (part, whole)
    ]
    return np.asarray(sums[0] / np.maximum(sums[1], 1e-12))


def train_judge(
    runs: Sequence[Sequence[ObservedRun]],
    greatest: int,
    tolerance: float,
    about: Mapping[str, object],
    seed: int = 0,
) -> TableJudge:
    """Train a judge; the last quarter of the runs is held out.

    Args:
        runs: The branches of each run.
        greatest: The greatest age.
        tolerance: The relative error of a patch's output from which it has to be computed.
        about: Further entries of the card.
        seed: Of the forest and of the choice of samples.
    """
    if len(runs) < 2:
        raise InputError("train-judge: one run is held out; give two runs or more")
    held = max(1, len(runs) // 4)
    draw = np.random.default_rng(seed)
    found = [[samples_of(branch, greatest, tolerance) for branch in run] for run in runs]
    learnt = Samples.joined([one for run in found[:-held] for one in run]).some(MOST, draw)
    tested = [Samples.joined(run).some(MOST // held, draw) for run in found[-held:]]
    forest = fitted(learnt, seed)
    stretches = len(runs[0][0].calls[0].rates)
    table = tabulated(forest, stretches, greatest)
    judge = TableJudge(table, {})
    card = {**about, **scores(forest, judge, learnt, tested), "tolerance": tolerance}
    return TableJudge(table, {**card, "age": greatest, "runs": len(runs), "held_out": held})


def fitted(samples: Samples, seed: int) -> RandomForestClassifier:
    from sklearn.ensemble import RandomForestClassifier

    forest = RandomForestClassifier(
        n_estimators=TREES, max_depth=DEPTH, min_samples_leaf=LEAF, random_state=seed
    )
    return forest.fit(samples.features, samples.computed)


def decisions(forest: RandomForestClassifier, features: Floats) -> Bools:
    """Return what the forest decides; one trained on a single class always decides for it."""
    return np.asarray(forest.predict(features)).astype(bool)


def tabulated(forest: RandomForestClassifier, stretches: int, ages: int) -> Bools:
    """Return the forest's decisions at the middle of each bin."""
    noises = (np.arange(NOISES) + 0.5) / NOISES
    out = np.zeros((stretches, ages, NOISES, CHANGES), bool)
    grid = np.stack(np.meshgrid(noises, bin_changes(CHANGES), indexing="ij"), -1).reshape(-1, 2)
    for stretch in range(stretches):
        for age in range(ages):
            rows = np.empty((len(grid), len(FEATURES)))
            rows[:, 0], rows[:, 3] = grid[:, 1], grid[:, 0]
            rows[:, 1], rows[:, 2] = stretch, age + 1
            out[stretch, age] = decisions(forest, rows).reshape(NOISES, CHANGES)
    return out


def scores(
    forest: RandomForestClassifier, judge: TableJudge, learnt: Samples, runs: Sequence[Samples]
) -> dict[str, object]:
    """Return the scores on held-out runs, and how often the table decides as the forest."""
    from sklearn.metrics import roc_auc_score

    tested = Samples.joined(runs)
    wanted, by_forest = tested.computed, decisions(forest, tested.features)
    by_table = looked_up(judge.table, tested.features)
    by_run = [(looked_up(judge.table, run.features) == run.computed).mean() for run in runs]
    both = len(forest.classes_) == 2 and 0 < wanted.mean() < 1
    area = None
    if both:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            area = float(roc_auc_score(wanted, forest.predict_proba(tested.features)[:, 1]))
    importance = dict(zip(FEATURES, forest.feature_importances_.round(4).tolist(), strict=True))
    return {
        "features": list(FEATURES),
        "importance": importance,
        "samples": len(learnt.computed),
        "held_out_samples": len(wanted),
        "computed_share": float(learnt.computed.mean()),
        "held_out_computed_share": float(wanted.mean()),
        "accuracy": float((by_forest == wanted).mean()),
        "auc": area,
        "table_agreement": float((by_table == by_forest).mean()),
        "table_accuracy": float((by_table == wanted).mean()),
        "table_accuracy_by_run": np.round(by_run, 4).tolist(),
    }


def looked_up(table: Bools, features: Floats) -> NDArray[np.bool_]:
    """Return the table's decisions for samples."""
    from maskfx.runtime.reuse.judges import change_bins

    _, ages, noises, changes = table.shape
    stretch = features[:, 1].astype(int)
    age = np.minimum(features[:, 2].astype(int), ages) - 1
    level = np.clip(features[:, 3] * noises, 0, noises - 1).astype(int)
    return np.asarray(table[stretch, age, level, change_bins(features[:, 0], changes)])
