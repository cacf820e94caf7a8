"""Costs: compute time of blocks and load time of bytes on this device, fitted to measurements.

Block time is linear in its FLOPs (separate slopes for products and attention) and in the number of
batch elements, load time linear in bytes. The fit keeps slopes and offsets at 0 or above. Knows
nothing of graphs and masks.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from maskfx.errors import InputError
from maskfx.runtime.planner.least_squares import Floats, non_negative

SCHEMA = 3


@dataclass(frozen=True)
class Sample:
    """One measured step: work by block and kind, seconds by block, seconds outside of blocks."""

    work: Floats  # (blocks, kinds)
    seconds: Floats  # (blocks,)
    around: float = 0.0


@dataclass(frozen=True)
class Costs:
    """Predicts seconds: `fixed + work @ slopes` per block, plus `around` once per step.

    A load takes `load_fixed + nbytes * load_slope` seconds. Computing all sites of a recording
    takes `whole` times what that predicts.
    """

    fixed: tuple[float, ...]
    slopes: tuple[tuple[float, ...], ...]
    around: float
    load_fixed: float
    load_slope: float
    whole: float = 1.0

    def compute(self, work: Floats) -> Floats:
        """Return the seconds of each block, without its fixed part."""
        if len(work) != len(self.slopes):
            raise InputError(
                f"these costs are of a denoiser with {len(self.slopes)} blocks, this one has "
                f"{len(work)}; calibrate it"
            )
        seconds: Floats = (work * np.array(self.slopes)).sum(1)
        return seconds

    def step(self, work: Floats) -> float:
        """Return the seconds of a step whose loads take no time."""
        return float(self.compute(work).sum() + sum(self.fixed)) + self.around

    def load(self, nbytes: float) -> float:
        return self.load_fixed + nbytes * self.load_slope if nbytes else 0.0

    def save(self, path: Path) -> None:
        path.write_text(json.dumps({"schema": SCHEMA, **asdict(self)}, indent=1) + "\n")

    @staticmethod
    def read(path: Path) -> Costs:
        """Read costs written by `save`."""
        try:
            found = json.loads(path.read_text())
            if found.pop("schema") != SCHEMA:
                raise ValueError("another schema")
            found["fixed"] = tuple(map(float, found["fixed"]))
            found["slopes"] = tuple(tuple(map(float, s)) for s in found["slopes"])
            return Costs(**found)
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise InputError(
                f"{path} holds no costs ({type(error).__name__}: {error}); calibrate and save them"
            ) from error


def fit(samples: Sequence[Sample], loads: Sequence[tuple[float, float]]) -> Costs:
    """Fit costs to measured steps and to (bytes, seconds) of measured loads."""
    if len(samples) < 3 or len(loads) < 2:
        raise InputError(
            f"fit(): {len(samples)} steps and {len(loads)} loads; measure at least 3 and 2, of "
            "different sizes"
        )
    work = np.stack([s.work for s in samples])
    seconds = np.stack([s.seconds for s in samples])
    lines = [fit_line(work[:, b], seconds[:, b]) for b in range(work.shape[1])]
    nbytes, taken = np.array(loads, dtype=np.float64).T
    load_fixed, (load_slope,) = fit_line(nbytes[:, None], taken)
    return Costs(
        tuple(fixed for fixed, _ in lines),
        tuple(tuple(slopes.tolist()) for _, slopes in lines),
        float(np.median([s.around for s in samples])),
        load_fixed,
        float(load_slope),
    )


def fit_line(features: Floats, seconds: Floats) -> tuple[float, Floats]:
    """Fit a non-negative offset and slopes by relative error, so that small masks count."""
    design = np.column_stack([features, np.ones(len(features))])
    found = non_negative(design, seconds, 1 / np.maximum(seconds, 1e-9) ** 2)
    return float(found[-1]), found[:-1]


def r_squared(predicted: Sequence[float], measured: Sequence[float]) -> float:
    """Return the coefficient of determination of the predictions."""
    found = np.array(measured, dtype=np.float64)
    left = ((found - np.array(predicted)) ** 2).sum()
    spread = ((found - found.mean()) ** 2).sum()
    return float(1 - left / spread) if spread else float(left == 0)
