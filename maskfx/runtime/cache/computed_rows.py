"""ComputedCache: a recorded step of which some rows are computed again instead of loaded.

They are computed from the inputs that the step was recorded with, so they are the recorded ones up
to rounding. Before they are computed, the recorded rows are read in their place. Knows nothing of
graphs and plans.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field, fields
from typing import Any

from torch import Tensor

from maskfx.runtime.cache.quantize import Packed
from maskfx.runtime.cache.rows import InterpolatedRows, Rows, RowSubset, StoredRows, as_they_are
from maskfx.runtime.cache.step_cache import StepCache
from maskfx.runtime.cache.stores.read_speed import ReadSpeed


@dataclass(eq=False)
class ComputedValue:
    """The rows of one tap, and what is computed in their place.

    Args:
        recorded: The recorded rows.
        computed: The rows of all sites, once they are computed.
    """

    recorded: Rows
    computed: Tensor | None = None
    nbytes: int = 0  # to be read from a store
    speed: ReadSpeed = field(default_factory=ReadSpeed)

    @property
    def is_read(self) -> bool:
        return self.computed is not None

    def fetch(self) -> None:
        """Do nothing: they are computed where a step reads them."""

    def read(self) -> Any:
        """Return the computed rows; the recorded ones before they are computed."""
        return self.recorded if self.computed is None else self.computed


@dataclass(eq=False, kw_only=True)
class ComputedCache(StepCache):
    """A recorded step some of whose rows are computed from its inputs when a step reads it.

    Args:
        recorded: The step with its recorded rows.
        values: What is computed, by tap.
    """

    recorded: StepCache
    values: dict[str, ComputedValue]

    @property
    def left(self) -> frozenset[str]:
        """Return the taps whose rows aren't computed yet."""
        return frozenset(tap for tap, value in self.values.items() if not value.is_read)


def with_computed(cache: StepCache, taps: Collection[str]) -> StepCache:
    """Return a step whose rows of these taps are computed when they are read first."""
    if not taps:
        return cache
    values = {tap: ComputedValue(cache.rows[tap]) for tap in taps}
    rows = dict(cache.rows)
    for tap, value in values.items():
        rows[tap] = StoredRows(value, shown(value.recorded), as_they_are)
    kept = {f.name: getattr(cache, f.name) for f in fields(StepCache)}
    return ComputedCache(**{**kept, "rows": rows}, recorded=cache, values=values)


def shown(rows: Rows) -> Tensor | Packed | RowSubset:
    """Return rows without values, of the same shape and format."""
    if isinstance(rows, StoredRows):
        return rows.shown
    assert not isinstance(rows, InterpolatedRows), "rows between two steps aren't computed"
    return rows.to("meta") if isinstance(rows, Tensor) else rows.mapped(lambda t: t.to("meta"))


def recorded_step(cache: StepCache) -> StepCache:
    """Return the step as it was recorded."""
    return cache.recorded if isinstance(cache, ComputedCache) else cache


def computed_taps(cache: StepCache | None) -> frozenset[str]:
    """Return the taps of a step whose rows are computed instead of loaded."""
    return frozenset(cache.values) if isinstance(cache, ComputedCache) else frozenset()


def is_computed(rows: Rows) -> bool:
    """Return True for rows that are computed instead of loaded."""
    return isinstance(rows, StoredRows) and isinstance(rows.value, ComputedValue)


def is_exact(rows: Rows) -> bool:
    """Return True for rows in full precision: what is computed in their place differs by rounding.

    Rows in fewer bits, or between two steps, would make an edit depend on whether it computes them.
    """
    if isinstance(rows, StoredRows):
        return is_exact(rows.shown)
    return isinstance(rows, Tensor) or (
        isinstance(rows, RowSubset) and isinstance(rows.rows, Tensor)
    )
