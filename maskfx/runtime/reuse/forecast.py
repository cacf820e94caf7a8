"""Forecasts: answers of a denoiser that continue the course of its last ones, uncomputed."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch.utils import _pytree as pytree

from maskfx.ir.values import copy_of
from maskfx.runtime.reuse.session import Times, weighted

KEPT = 3  # answers; a parabola passes through them
BENT = 0.5  # between the line through the last two and that parabola, which swings out


@dataclass(frozen=True)
class Answer:
    at: int
    leaves: list[Any]
    spec: pytree.TreeSpec


@dataclass
class Curve:
    """One call's latest answers, over the times that it was called at, counted one by one.

    So schedulers say how far apart two answers are: they put their times where answers change. Some
    look ahead and repeat a time: of two answers at one time the later counts.
    """

    answers: list[Answer] = field(default_factory=list)
    _times: Times | None = None
    _count: int = -1  # times so far

    def learn(self, times: Times, result: Any) -> None:
        leaves, spec = pytree.tree_flatten(result)
        now = self._place(times)
        kept = [a for a in self.answers if a.at != now and fits(a, leaves, spec)]
        self.answers = [*kept, Answer(now, [copy_of(leaf) for leaf in leaves], spec)][-KEPT:]

    def at(self, times: Times) -> Any:
        """What lies on the curve at a time; None before an answer is known."""
        now = self._place(times)
        if not self.answers:
            return None
        weights = weights_of([answer.at for answer in self.answers], now)
        columns = zip(*(answer.leaves for answer in self.answers), strict=True)
        leaves = [weighted(column, [weights]) for column in columns]
        return pytree.tree_unflatten(leaves, self.answers[-1].spec)

    def _place(self, times: Times) -> int:
        if times != self._times:
            self._times, self._count = times, self._count + 1
        return self._count


def fits(answer: Answer, leaves: list[Any], spec: pytree.TreeSpec) -> bool:
    """Are these answers to calls of one kind? Guidance may end halfway."""
    shapes = [getattr(leaf, "shape", None) for leaf in leaves]
    return answer.spec == spec and shapes == [getattr(v, "shape", None) for v in answer.leaves]


def weights_of(known: list[int], now: int) -> list[float]:
    """Of one answer it is what it was; two lie on a line; of three, halfway to their parabola."""
    if len(known) < KEPT:
        return lagrange(known, now)
    line = [0.0, *lagrange(known[1:], now)]
    return [BENT * b + (1 - BENT) * a for a, b in zip(line, lagrange(known, now), strict=True)]


def lagrange(known: list[int], now: int) -> list[float]:
    """What each of some values counts on the polynomial through them."""
    weights = []
    for i, one in enumerate(known):
        weight = 1.0
        for other in known[:i] + known[i + 1 :]:
            weight *= (now - other) / (one - other)
        weights.append(weight)
    return weights
