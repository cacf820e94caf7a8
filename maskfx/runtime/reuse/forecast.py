"""Forecasts: extrapolate a denoiser's outputs from its latest ones instead of computing them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch.utils import _pytree as pytree

from maskfx.ir.values import copy_of
from maskfx.runtime.reuse.session import Times, weighted

KEPT = 3  # outputs; a parabola passes through them
BENT = 0.5  # weight of that parabola, which overshoots, against the line through the last two


@dataclass(frozen=True)
class Answer:
    at: int
    times: Times
    leaves: list[Any]
    spec: pytree.TreeSpec


@dataclass
class Curve:
    """Extrapolates one call's outputs over the index of the times it was called at.

    The index serves as distance because schedulers place their timesteps where outputs change.
    Some schedulers repeat a timestep: of two outputs at one time the later one counts.

    Args:
        bent: weight of the parabola through three outputs against the line through the last two.
        kept: the number of outputs that are kept; None keeps all.
    """

    bent: float = BENT
    kept: int | None = KEPT
    answers: list[Answer] = field(default_factory=list)
    _times: Times | None = None
    _count: int = -1  # index of the latest time

    def learn(self, times: Times, result: object) -> None:
        leaves, spec = pytree.tree_flatten(result)
        now = self._place(times)
        kept = [a for a in self.answers if a.at != now and fits(a, leaves, spec)]
        kept.append(Answer(now, times, [copy_of(leaf) for leaf in leaves], spec))
        self.answers = kept if self.kept is None else kept[-self.kept :]

    def at(self, times: Times) -> Any:
        """Return the extrapolated output at a time; None before any output is known."""
        now = self._place(times)
        if not self.answers:
            return None
        latest = self.answers[-KEPT:]
        weights = weights_of([answer.at for answer in latest], now, self.bent)
        columns = zip(*(answer.leaves for answer in latest), strict=True)
        leaves = [weighted(column, [weights]) for column in columns]
        return pytree.tree_unflatten(leaves, self.answers[-1].spec)

    def _place(self, times: Times) -> int:
        if times != self._times:
            self._times, self._count = times, self._count + 1
        return self._count


def fits(answer: Answer, leaves: list[object], spec: pytree.TreeSpec) -> bool:
    """Whether the outputs have the same structure and shapes; guidance may end mid-run."""
    shapes = [getattr(leaf, "shape", None) for leaf in leaves]
    return answer.spec == spec and shapes == [getattr(v, "shape", None) for v in answer.leaves]


def weights_of(known: list[int], now: int, bent: float = BENT) -> list[float]:
    """Return the weight of each known output in the extrapolated one.

    One output is repeated; two are extrapolated linearly; of three, the parabola
    through all and the line through the last two are weighted by `bent`.
    """
    if len(known) < KEPT:
        return lagrange(known, now)
    line = [0.0, *lagrange(known[1:], now)]
    return [bent * b + (1 - bent) * a for a, b in zip(line, lagrange(known, now), strict=True)]


def lagrange(known: list[int], now: int) -> list[float]:
    """Return the Lagrange weights at `now` of the polynomial through the `known` points."""
    weights = []
    for i, one in enumerate(known):
        weight = 1.0
        for other in known[:i] + known[i + 1 :]:
            weight *= (now - other) / (one - other)
        weights.append(weight)
    return weights
