"""Judges: decide which patches a stretch of blocks computes, from how far its inputs changed.

Pure functions of numbers: no tensors, no denoiser. `patches.py` asks them once per step,
`patch_choice.py` once per stretch.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import log
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from maskfx.errors import InputError
from maskfx.ir.argument_checks import check_number
from maskfx.ir.geometry.grids import Floats

Bools = NDArray[np.bool_]

FILE = "judge.npz"  # of a model, in its folder
AUTO = "auto"  # the judge in the model's folder
FEATURES = ("change", "stretch", "age", "noise")
SMALLEST, LARGEST = 1e-4, 10.0  # changes that a table distinguishes
SPAN = log(LARGEST / SMALLEST)
# the same in single precision, made once: bins are found before each stretch
LOW, HIGH, LOG_LOW = (np.float32(x) for x in (SMALLEST, LARGEST, log(SMALLEST)))


@dataclass(frozen=True)
class PatchFeatures:
    """What is known of each patch before a step or a stretch; arrays have a row per stretch.

    Args:
        change: The relative change of the stretch's input since the patch was last computed there.
        age: The number of steps since then, 1 after the last one.
        noise: The time of the step divided by that of the first one.
        step: The number of the call, from 0.
        stretch: The number of the first row's stretch, from 1.

    Where requests are judged together, the patches of all are in a row, and `noise` and `step` have
    a number for each. Only judges of this file get such features.
    """

    change: Floats
    age: NDArray[np.int64]
    noise: Floats | float
    step: Any = 0
    stretch: int = 1


class Judge(Protocol):
    """Decides which patches are computed."""

    @property
    def keeps_nothing(self) -> bool:
        """Whether all patches are computed, whatever the features."""
        ...

    def refusal(self, stretches: int) -> str:
        """Return why a denoiser of this number of stretches can't be judged, or ""."""
        ...

    def computes(self, features: PatchFeatures) -> Bools:
        """Return, by stretch and patch, whether the patch is computed."""
        ...


@dataclass(frozen=True)
class Threshold:
    """Computes the patches whose change reaches a value; 0 computes all."""

    value: float

    def __post_init__(self) -> None:
        check_number("Threshold", "value", self.value)

    @property
    def keeps_nothing(self) -> bool:
        return self.value == 0

    def refusal(self, stretches: int) -> str:
        return ""

    def computes(self, features: PatchFeatures) -> Bools:
        return np.asarray(features.change >= self.value)


@dataclass(frozen=True, eq=False)
class TableJudge:
    """A trained judge as a table: one gather per step.

    Args:
        table: Whether to compute, by stretch (from the first), age (from 1), noise and change.
        card: How it was trained, and how it scores.
    """

    table: Bools
    card: dict[str, Any]

    @property
    def keeps_nothing(self) -> bool:
        return bool(self.table.all())

    def refusal(self, stretches: int) -> str:
        own = self.table.shape[0]
        if own == stretches:
            return ""
        return (
            f"the judge was trained for a denoiser of {own} stretches, this one has {stretches}; "
            "train one for it with: maskfx train-judge MODEL"
        )

    def computes(self, features: PatchFeatures) -> Bools:
        places = self.places(features.age, features.noise, features.stretch)
        return self.at(places, features.change)

    def places(
        self, age: NDArray[np.int64], noise: Floats | float, stretch: int = 1
    ) -> NDArray[np.int64]:
        """Return where the table has each patch without its change; the rest as `PatchFeatures`."""
        _, ages, noises, changes = self.table.shape
        rows = np.arange(stretch - 1, stretch - 1 + len(age)) * (ages * noises * changes)
        found = np.minimum(age, ages)
        found *= noises * changes
        found += rows[:, None] + (noise_bin(noise, noises) - noises) * changes
        return found

    def at(self, places: NDArray[np.int64], change: Floats) -> Bools:
        """Return whether to compute the patches at `places`, by their changes."""
        return np.asarray(
            self.table.reshape(-1).take(places + change_bins(change, self.table.shape[3]))
        )

    def save(self, path: Path) -> None:
        """Write the table and its card, as `path` and the same name with .json."""
        np.savez_compressed(path, table=np.packbits(self.table), shape=self.table.shape)
        path.with_suffix(".json").write_text(json.dumps(self.card, indent=1) + "\n")


def judge_together(asked: Sequence[tuple[Judge, PatchFeatures]]) -> list[Bools]:
    """Return what each judge computes by its features, which are of the same stretches.

    A table decides for all requests that it judges at once, and so do equal thresholds.
    """
    groups: dict[object, list[int]] = {}
    for number, (judge, _) in enumerate(asked):
        joins = isinstance(judge, Threshold | TableJudge)
        groups.setdefault(judge if joins else number, []).append(number)
    found: dict[int, Bools] = {}
    for own in groups.values():
        judge, parts = asked[own[0]][0], [asked[n][1] for n in own]
        computed = judge.computes(parts[0] if len(parts) == 1 else joined(parts))
        ends = np.cumsum([part.change.shape[1] for part in parts])[:-1]
        found |= dict(zip(own, np.split(computed, ends, axis=1), strict=True))
    return [found[number] for number in range(len(asked))]


def joined(parts: Sequence[PatchFeatures]) -> PatchFeatures:
    """Return the features of several requests as those of one with all patches."""
    counts = [part.change.shape[1] for part in parts]
    return PatchFeatures(
        np.concatenate([part.change for part in parts], 1),
        np.concatenate([part.age for part in parts], 1),
        np.repeat([part.noise for part in parts], counts),
        np.repeat([part.step for part in parts], counts),
        parts[0].stretch,
    )


def judge_in(folders: Sequence[Path]) -> Path | None:
    """Return the judge's file of the first folder that has one."""
    return next((path for path in (folder / FILE for folder in folders) if path.is_file()), None)


def load_judge(path: str | os.PathLike[str]) -> TableJudge:
    """Return a judge that `maskfx train-judge` wrote."""
    path = Path(path)
    if not path.is_file():
        raise InputError(f"judge {path}: no such file; make one with: maskfx train-judge MODEL")
    return _load(path, path.stat().st_mtime_ns)


@lru_cache(maxsize=8)
def _load(path: Path, written: int) -> TableJudge:
    try:
        with np.load(path, allow_pickle=False) as found:
            shape = tuple(int(n) for n in found["shape"])
            bits = np.unpackbits(found["table"], count=int(np.prod(shape)))
    except (OSError, ValueError, KeyError) as error:
        raise InputError(
            f"judge {path}: not a file of maskfx train-judge ({error}); train it again"
        ) from error
    card = path.with_suffix(".json")
    about = json.loads(card.read_text()) if card.is_file() else {}
    return TableJudge(bits.astype(bool).reshape(shape), about)


def change_bins(change: Floats, count: int) -> NDArray[np.int32]:
    """Return the bin of each change: bins are equal in the logarithm."""
    # functions of two arrays: `clip` takes several times as long for a row of patches
    place = np.minimum(change, HIGH, dtype=np.float32, casting="same_kind")
    np.maximum(place, LOW, out=place)
    np.log(place, out=place)
    place -= LOG_LOW
    place *= np.float32(count / SPAN)
    np.minimum(place, np.float32(count - 1), out=place)
    return place.astype(np.int32)


def bin_changes(count: int) -> Floats:
    """Return the change in the middle of each bin."""
    middle = (np.arange(count) + 0.5) / count
    return np.asarray(SMALLEST * (LARGEST / SMALLEST) ** middle)


def noise_bin(noise: float | Floats, count: int) -> NDArray[np.int64]:
    """Return the bin of a noise level, or of each."""
    return np.asarray(np.clip(np.asarray(noise) * count, 0, count - 1), np.int64)


def cascade(
    moving: Bools, resting: Bools, forced: Bools, sources: Sequence[int | None]
) -> NDArray[np.bool_]:
    """Return what is computed, stretch by stretch, as a stretch's input depends on those before.

    Args:
        moving: What is computed where the stretch before is, by stretch and patch.
        resting: What is computed where it isn't, so that the input changes no further.
        forced: What is computed in any case.
        sources: For each stretch the one that makes its input; None for the denoiser's input.
    """
    found, kept = moving | forced, resting | forced
    differs = (found != kept).any(1)
    for row, source in enumerate(sources):
        if source is not None and differs[row]:
            found[row] = np.where(found[source], found[row], kept[row])
    return np.asarray(found)
