"""Forecasts of a run: the outputs of calls that aren't computed, from those of earlier steps."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from torch import Tensor, nn
from torch.utils import _pytree as pytree

from maskfx.errors import InputError
from maskfx.pipelines.model_folders import model_folders
from maskfx.pipelines.schedules.schedule import schedulers_of, times_of
from maskfx.runtime.reuse.clean import KINDS, Mixture, latents_like
from maskfx.runtime.reuse.fitted_forecast import FittedCurve, ForecastTable, table_in
from maskfx.runtime.reuse.forecast import Curve
from maskfx.runtime.reuse.session import Times
from maskfx.runtime.reuse.step_selection import StepSelection

UNFITTED = (
    'forecast="fitted": no weights were fitted for these steps; outputs are extrapolated '
    "(maskfx fit-forecast)"
)
STRAIGHT = 0.0  # weight of a parabola: clean latents go on along a line
Key = tuple[object, ...]  # denoiser, branch and shapes: guidance may end midway


@dataclass
class Forecasts:
    """Continues the outputs of each kind of call, or the clean latents that they predict.

    Args:
        pipe: The pipeline, whose scheduler has the noise level of each timestep.
        kind: What is continued: "output", "clean" latents, or outputs by "fitted" weights. Where
            clean latents don't follow from an output (other kinds of denoisers, timesteps that
            aren't the scheduler's), or no weights were fitted, outputs are continued, which is
            noted; "auto" is "fitted" without that note, and notes a damaged file in place of
            raising. A table of weights stands for itself.
        modules: The denoisers by name, in whose models' folders tables of weights are.
        note: Receives what `explain()` prints.
        masked: Whether the run is an edit of a template, which has weights of its own.
    """

    pipe: object
    kind: str | ForecastTable = "output"
    modules: Callable[[str], nn.Module | None] = lambda _: None
    note: Callable[[str], None] = lambda _: None
    masked: bool = False
    _curves: dict[Key, Curve] = field(default_factory=dict)
    _converts: dict[Key, bool] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._levels = NoiseLevels(self.pipe)

    def selected(self, selection: StepSelection, names: Iterable[str]) -> StepSelection:
        """Return the steps to compute: of whole pictures those that weights were fitted for.

        Args:
            selection: The steps that are computed otherwise; as many.
            names: Of the denoisers.
        """
        if not (selection.skips and selection.even):
            return selection
        tables = [table for table in map(self._table, names) if table is not None]
        return replace(selection, chosen=tuple(one for t in tables for one in t.selections()))

    def learn(self, key: Key, times: Times, inputs: Mapping[str, object], result: object) -> None:
        """Take the output of a computed call."""
        latents = latents_like(list(inputs.values()), result) if self.kind == "clean" else None
        mixture = None if latents is None else self._levels.mixture(times)
        if self._converts.setdefault(key, mixture is not None):
            if latents is None or mixture is None:
                return  # clean latents of the other steps don't continue this output
            result = converted(result, lambda leaf: mixture.clean(latents, leaf))
        self._curve(key).learn(times, result)

    def at(
        self, key: Key, times: Times, inputs: Mapping[str, object], steps: int | None = None
    ) -> Any:
        """Return the output of a call that isn't computed; None before any output is known.

        `steps` is the number of steps of the run, if it is known.
        """
        curve = self._curve(key)
        if isinstance(curve, FittedCurve):
            return curve.forecast(times, inputs, steps)
        found = curve.at(times)
        if found is None or not self._converts.get(key, False):
            return found
        latents, mixture = latents_like(list(inputs.values()), found), self._levels.mixture(times)
        if latents is None or mixture is None:
            return None
        return converted(found, lambda leaf: mixture.output(latents, leaf))

    def clear(self) -> None:
        """Forget all outputs."""
        self._curves.clear()

    def forget(self, start: Key) -> None:
        """Forget the outputs of calls whose key begins so."""
        for known in [known for known in self._curves if known[: len(start)] == start]:
            del self._curves[known]

    def _curve(self, key: Key) -> Curve:
        if key not in self._curves:
            table = self._table(str(key[0]))
            if table is None:
                self._curves[key] = Curve(STRAIGHT) if self._converts.get(key) else Curve()
            else:
                self._curves[key] = FittedCurve(table=table, masked=self.masked, lacks=self._lacks)
        return self._curves[key]

    def _table(self, name: str) -> ForecastTable | None:
        """Return the fitted weights of a denoiser; None where others are continued."""
        if isinstance(self.kind, ForecastTable):
            return self.kind if self.kind.denoiser == name else None
        module = self.modules(name) if self.kind in ("fitted", "auto") else None
        if module is None:
            return None
        try:
            table = table_in(model_folders(module))
        except InputError as error:
            if self.kind == "fitted":
                raise
            self.note(f"outputs are extrapolated: {error}")
            return None
        if table is None:
            self._lacks()
        return table if table is None or table.denoiser == name else None

    def _lacks(self) -> None:
        if self.kind == "fitted":
            self.note(UNFITTED)


def converted(result: object, convert: Callable[[Tensor], Tensor]) -> object:
    [leaf], spec = pytree.tree_flatten(result)
    return pytree.tree_unflatten([convert(leaf)], spec)


class NoiseLevels:
    """The noise levels of the timesteps that a pipeline's scheduler steps through.

    A denoiser that was trained with a table of noise levels reads them by number of the timestep,
    whichever scheduler steps. Flow models have no such table: their paths are nearly straight.
    """

    def __init__(self, pipe: object) -> None:
        self._pipe = pipe
        self._steps: object = None  # the scheduler's timesteps when they were read
        self._times: list[float] = []

    @cached_property
    def _scheduler(self) -> Any:
        schedulers = schedulers_of(self._pipe)
        return schedulers[0] if len(schedulers) == 1 else None

    def mixture(self, times: Times) -> Mixture | None:
        """Return how a call's latents are mixed; None if they aren't known."""
        scheduler = self._scheduler
        kind = getattr(scheduler, "config", {}).get("prediction_type")
        table = getattr(scheduler, "alphas_cumprod", None)
        if kind not in KINDS or not isinstance(table, Tensor):
            return None
        steps = getattr(scheduler, "timesteps", None)
        if self._steps is not steps:  # reading them from a device blocks the host
            self._steps, self._times = steps, times_of(scheduler)
        if not all(any(abs(time - one) < 1e-2 for one in self._times) for time in times):
            return None
        powers = [power_at(table, time) for time in times]
        signal = tuple(power**0.5 for power in powers)
        return Mixture(kind, signal, tuple((1 - power) ** 0.5 for power in powers))


def power_at(table: Tensor, time: float) -> float:
    """Return the entry of a table at a timestep, on the line between two if it has a fraction."""
    time = min(max(time, 0.0), len(table) - 1.0)
    low = int(time)
    high = min(low + 1, len(table) - 1)
    return float(table[low] + (table[high] - table[low]) * (time - low))
