"""Fitted forecasts: outputs that aren't computed, by weights fitted on runs of the model itself.

The output of a skipped step is a weighted sum of the latents at that step and of all outputs that
the run has computed before. `forecast_fitting.py` finds the weights, for one schedule and one
selection of steps, of whole pictures or of edits; a `ForecastTable` has those of one denoiser.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.utils import _pytree as pytree

from maskfx.errors import InputError
from maskfx.runtime.reuse.clean import latents_like
from maskfx.runtime.reuse.forecast import Curve
from maskfx.runtime.reuse.session import Times, weighted

FILE = "forecasts.json"  # of a model, in its folder
SCHEMA = 1
# Of a schedule's range: times that differ by less are the same step, such as with the shift of
# another picture size.
APART = 0.03
# Of that range: computed steps of another number of steps may lie so far from those that were
# fitted for their weights to serve.
NEAR = 0.04


@dataclass(frozen=True)
class FittedRun:
    """The weights of one selection of steps in one schedule.

    Args:
        times: The times of the denoiser's calls, in the order of the steps.
        computed: The steps that are computed.
        weights: For each other step: the weight of the latents, then those of the outputs of the
            computed steps before it.
        masked: Whether they are of edits, whose latents outside the mask are a template's. Those of
            whole pictures differ: there all that a step changes acts on the next ones.
    """

    times: tuple[float, ...]
    computed: tuple[int, ...]
    weights: Mapping[int, tuple[float, ...]]
    masked: bool = False

    def distance(self, steps: Sequence[int], times: Sequence[float]) -> float | None:
        """Return how far these times of steps are from the own ones; None if it is too far."""
        furthest = self._furthest(steps, times)
        return furthest if furthest <= APART * self._span else None

    def shared(self, times: Sequence[float], time: float) -> tuple[float, tuple[float, ...]] | None:
        """Return the weights of a step of a run of another number of steps, with their distance.

        They are those of as long a time after the last computed step, on the line between two steps
        that were fitted. None if the computed steps before lie elsewhere, or the time is beyond the
        gap that was fitted.

        Args:
            times: Those of the computed steps so far.
            time: That of the step.
        """
        count, gone = len(times), abs(time - times[-1])
        known, following = self.computed[:count], self.computed[count : count + 1]
        if len(known) < count or self._furthest(known, times) > NEAR * self._span:
            return None
        last, stop = known[-1], following[0] if following else len(self.times)
        steps = [step for step in range(last + 1, stop) if step in self.weights]
        end = min(stop, len(self.times) - 1)
        if not steps or gone > self._after(last, end):
            return None
        upper = next((n for n in steps if self._after(last, n) >= gone), steps[-1])
        lower = max((n for n in steps if n < upper), default=last)
        held = (*[0.0] * count, 1.0)  # the last output itself
        one, other = self.weights.get(lower, held), self.weights[upper]
        part = (gone - self._after(last, lower)) / self._after(lower, upper)
        found = tuple((1 - part) * a + part * b for a, b in zip(one, other, strict=True))
        return self._furthest(known, times), found

    def _after(self, one: int, other: int) -> float:
        return abs(self.times[other] - self.times[one])

    @property
    def _span(self) -> float:
        return abs(self.times[0] - self.times[-1])

    def _furthest(self, steps: Sequence[int], times: Sequence[float]) -> float:
        return max(abs(self.times[n] - t) for n, t in zip(steps, times, strict=True))

    def stored(self) -> dict[str, object]:
        weights = {str(step): list(values) for step, values in self.weights.items()}
        return {
            "masked": self.masked,
            "times": list(self.times),
            "computed": list(self.computed),
            "weights": weights,
        }

    @classmethod
    def of(cls, stored: Mapping[str, Any]) -> FittedRun:
        weights = {int(n): tuple(map(float, v)) for n, v in stored["weights"].items()}
        times, computed = map(float, stored["times"]), map(int, stored["computed"])
        run = cls(tuple(times), tuple(computed), weights, bool(stored.get("masked", False)))
        known = sorted(run.computed)
        if not known or known[-1] >= len(run.times) or not run.times:
            raise ValueError(f"the steps {known} aren't among {len(run.times)} times")
        for step, values in weights.items():
            if len(values) != 1 + sum(one < step for one in known):
                raise ValueError(f"step {step} has {len(values)} weights")
        return run


@dataclass
class ForecastTable:
    """The fitted runs of one denoiser.

    Args:
        denoiser: Its name among the pipeline's components.
        runs: One for each schedule and selection, of whole pictures and of edits.
        card: The model and the pipeline on whose runs they were fitted.
    """

    denoiser: str
    runs: list[FittedRun] = field(default_factory=list)
    card: dict[str, Any] = field(default_factory=dict)

    def weights(
        self,
        known: Sequence[tuple[int, float]],
        now: int,
        time: float,
        count: int | None,
        masked: bool = False,
    ) -> tuple[float, ...] | None:
        """Return the weights of a step that isn't computed; None if no run was fitted for it.

        Args:
            known: Number and time of the steps computed so far.
            now: Number of the step.
            time: Its time.
            count: The number of steps of the run, if it is known.
            masked: Whether the run is an edit of a template.
        """
        steps, times = (list(one) for one in zip(*known, (now, time), strict=True))
        found = []
        for run in self.runs:
            fits = run.masked == masked and len(run.times) == count and now in run.weights
            if fits and [n for n in run.computed if n < now] == steps[:-1]:
                distance = run.distance(steps, times)
                if distance is not None:
                    found.append((distance, run.weights[now]))
        if found:
            return min(found)[1]
        alike = [run.shared(times[:-1], time) for run in self.runs if run.masked == masked]
        return min((one for one in alike if one is not None), default=(0.0, None))[1]

    def selections(self) -> list[tuple[int, tuple[int, ...]]]:
        """Return the number of steps of each whole picture, and which are computed."""
        return [(len(run.times), run.computed) for run in self.runs if not run.masked]

    def with_run(self, run: FittedRun) -> ForecastTable:
        """Return a table in which this run replaces that of the same schedule and selection.

        Of whole pictures all selections of as many steps are the same: each run computes its own.
        """

        def same(one: FittedRun) -> bool:
            steps = range(len(run.times))
            alike = one.computed == run.computed
            if not run.masked:
                alike = len(one.computed) == len(run.computed)
            alike = alike and (one.masked, len(one.times)) == (run.masked, len(run.times))
            return alike and one.distance(steps, run.times) is not None

        return ForecastTable(
            self.denoiser, [*(r for r in self.runs if not same(r)), run], self.card
        )

    def save(self, path: Path) -> None:
        runs = [run.stored() for run in self.runs]
        stored = {"schema": SCHEMA, "denoiser": self.denoiser, "card": self.card, "runs": runs}
        path.write_text(json.dumps(stored, indent=1) + "\n", encoding="utf-8")


def table_in(folders: Sequence[Path]) -> ForecastTable | None:
    """Return the table of the first folder that has one."""
    path = next((path for path in (folder / FILE for folder in folders) if path.is_file()), None)
    return None if path is None else load_table(path)


def load_table(path: str | os.PathLike[str]) -> ForecastTable:
    """Return a table that `maskfx fit-forecast` wrote."""
    path = Path(path)
    return _load(path, path.stat().st_mtime_ns)


@lru_cache(maxsize=8)
def _load(path: Path, written: int) -> ForecastTable:
    try:
        stored = json.loads(path.read_text(encoding="utf-8"))
        if stored["schema"] != SCHEMA:
            raise ValueError(f"its schema is {stored['schema']}, not {SCHEMA}")
        runs = [FittedRun.of(run) for run in stored["runs"]]
        return ForecastTable(str(stored["denoiser"]), runs, dict(stored["card"]))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise InputError(
            f"forecasts {path}: can't be read: {error!r}; make them anew with: "
            "maskfx fit-forecast MODEL"
        ) from error


@dataclass
class FittedCurve(Curve):
    """Forecasts one kind of call by fitted weights; extrapolates where none were fitted.

    Args:
        table: The weights.
        masked: Whether the run is an edit of a template.
        lacks: Called at a step for which no weights were fitted.
    """

    kept: int | None = None
    table: ForecastTable = field(default_factory=lambda: ForecastTable(""))
    masked: bool = False
    lacks: Callable[[], None] = lambda: None

    def forecast(self, times: Times, inputs: Mapping[str, object], count: int | None) -> Any:
        """Return the output of a call that isn't computed; None before any output is known.

        `count` is the number of steps of the run, if it is known.
        """
        now = self._place(times)
        if not self.answers:
            return None
        latents, weights = latents_like(list(inputs.values()), self.answers[-1].leaves), None
        if latents is not None and len(set(times)) == 1:
            known = [(answer.at, answer.times[0]) for answer in self.answers]
            weights = self.table.weights(known, now, times[0], count, self.masked)
        if weights is None:
            self.lacks()
            return self.at(times)
        outputs: list[Tensor] = [answer.leaves[0] for answer in self.answers]
        found = weighted([latents, *outputs], [weights])
        return pytree.tree_unflatten([found], self.answers[-1].spec)
