"""Forecasts: answers of a denoiser that continue the course of its last ones, uncomputed."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch.utils import _pytree as pytree

from maskfx.session import Times, spread, weighted
from maskfx.values import copy_of

KEPT = 3  # answers; a parabola passes through them


@dataclass(frozen=True)
class Answer:
    times: Times
    leaves: list[Any]
    spec: pytree.TreeSpec


@dataclass
class Curve:
    """One call's latest answers over the scheduler's time.

    Schedulers that look ahead repeat timesteps: of two answers at one time the later counts.
    """

    answers: list[Answer] = field(default_factory=list)

    def learn(self, times: Times, result: Any) -> None:
        leaves, spec = pytree.tree_flatten(result)
        kept = [a for a in self.answers if a.times != times and fits(a, leaves, spec)]
        self.answers = [*kept, Answer(times, [copy_of(leaf) for leaf in leaves], spec)][-KEPT:]

    def at(self, times: Times) -> Any:
        """What lies on the curve at a time; None before two answers are known."""
        if len(self.answers) < 2:
            return None
        latest = self.answers[-1]
        weights = weights_of([answer.times for answer in self.answers], times)
        columns = zip(*(answer.leaves for answer in self.answers), strict=True)
        leaves = [weighted(column, weights) for column in columns]
        return pytree.tree_unflatten(leaves, latest.spec)


def fits(answer: Answer, leaves: list[Any], spec: pytree.TreeSpec) -> bool:
    """Are these answers to calls of one kind? Guidance may end halfway."""
    shapes = [getattr(leaf, "shape", None) for leaf in leaves]
    return answer.spec == spec and shapes == [getattr(v, "shape", None) for v in answer.leaves]


def weights_of(known: list[Times], now: Times) -> list[list[float]]:
    """Lagrange's weights of the known times, for each element of the batch."""
    columns = list(zip(*spread([*known, now]), strict=True))
    return [lagrange(column[:-1], column[-1]) for column in columns]


def lagrange(known: tuple[float, ...], now: float) -> list[float]:
    """The last one alone, where elements of a batch stand still."""
    if len(set(known)) < len(known):
        return [0.0] * (len(known) - 1) + [1.0]
    weights = []
    for i, one in enumerate(known):
        weight = 1.0
        for other in known[:i] + known[i + 1 :]:
            weight *= (now - other) / (one - other)
        weights.append(weight)
    return weights
