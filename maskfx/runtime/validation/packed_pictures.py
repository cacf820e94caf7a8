"""Packed pictures: tokens of several pictures in one sequence, whose sizes are arguments.

The sizes may be in a list of tuples, in rows of a tensor, or in the places at which the pictures
end. What belongs to each picture alone follows from sizes only, so it is a guess, which
`SampleCalls` compares with the module.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from math import isqrt, prod
from typing import Any, Protocol

from torch import Tensor

from maskfx.ir.listed import is_picture
from maskfx.ir.read_numbers import read_once
from maskfx.ir.values import PLAIN_TENSORS

MOST = 64  # pictures of a call


class View(Protocol):
    """Returns a part of a tensor, `less` than its numbers by a number."""

    def __call__(
        self, value: Tensor, cuts: tuple[tuple[int, int, int], ...], *, less: int = 0
    ) -> Tensor: ...


class PackedPictures:
    """The pictures that the tokens of a call consist of; none if its sizes don't show them.

    Args:
        inputs: The call's arguments.
    """

    def __init__(self, inputs: Mapping[str, Any]) -> None:
        self.inputs = inputs
        first = next(filter(is_picture, inputs.values()), None)
        tokens = 0 if first is None or first.dim() != 3 or len(first) != 1 else first.shape[1]
        self._every = list(self._counts(inputs.values())) if tokens else []
        scaled = (in_tokens(counts, tokens) for counts in self._every)
        self.counts: list[int] = next(filter(None, scaled), [])

    def calls(self, cut: View) -> list[dict[str, object]]:
        """Return the arguments of each picture; `cut` returns a part of a tensor."""
        return [
            {name: self._part(value, i, cut) for name, value in self.inputs.items()}
            for i in range(len(self.counts))
        ]

    def _counts(self, values: Any) -> Iterator[list[int]]:
        """Yield how many tokens sizes give to each of several pictures, or texts."""
        for value in values:
            if isinstance(value, Mapping):
                yield from self._counts(value.values())
            elif 1 < len(found := counts_in(value)) <= MOST:
                yield found
            elif isinstance(value, (list, tuple)):
                yield from self._counts(value)

    def _part(self, value: Any, index: int, cut: View) -> object:
        """Return what belongs to one picture of an argument."""
        if isinstance(value, Tensor):
            return self._tensor(value, index, cut)
        if isinstance(value, Mapping):
            return {name: self._part(own, index, cut) for name, own in value.items()}
        if isinstance(value, (list, tuple)):
            alone = len(value) == len(self.counts)
            return type(value)([value[index]] if alone else self._parts(value, index, cut))
        longest = type(value) is int and value == max(self.counts)
        return self.counts[index] if longest else value

    def _parts(self, values: Sequence[Any], index: int, cut: View) -> list[object]:
        return [self._part(value, index, cut) for value in values]

    def _tensor(self, value: Tensor, index: int, cut: View) -> Tensor:
        ends = ends_in(value)
        if len(ends) == len(self.counts) + 1:
            return cut(value, ((0, index, 2),), less=ends[index])
        for counts in [self.counts, *self._every]:
            if len(counts) != len(self.counts):
                continue
            axes = (axis for axis, size in enumerate(value.shape[:2]) if size == sum(counts))
            for axis in axes:
                return cut(value, ((axis, sum(counts[:index]), counts[index]),))
        rows = value.dim() > 0 and len(value) == len(self.counts)
        return cut(value, ((0, index, 1),)) if rows else value


def in_tokens(counts: Sequence[int], tokens: int) -> list[int]:
    """Return how many tokens each picture has, whose sizes may be in pixels; [] if others fit."""
    each, left = divmod(sum(counts), tokens)
    square = each > 0 and not left and isqrt(each) ** 2 == each
    whole = square and all(count and count % each == 0 for count in counts)
    return [count // each for count in counts] if whole else []


def counts_in(value: Any) -> list[int]:
    """Return the numbers of tokens that sizes give to each of several pictures; [] for others."""
    if isinstance(value, Tensor):
        ends = ends_in(value)
        if ends:
            return [stop - start for start, stop in pairwise(ends)]
        rows = whole_numbers(value) if value.dim() in (1, 2) else []
    else:
        rows = list(value) if isinstance(value, (list, tuple)) else []
    each = [row if isinstance(row, (list, tuple)) else [row] for row in rows]
    few = all(len(row) == len(each[0]) <= 3 for row in each)
    numbers = all(type(n) is int and n > 0 for row in each for n in row)
    return [prod(row) for row in each] if few and numbers else []


def ends_in(value: Tensor) -> list[int]:
    """Return the places at which sequences begin and end one after another; [] for others."""
    numbers = whole_numbers(value) if value.dim() == 1 else []
    steps = all(start < stop for start, stop in pairwise(numbers))
    return numbers if len(numbers) > 1 and numbers[0] == 0 and steps else []


def whole_numbers(value: Tensor) -> list[Any]:
    """Return the numbers of a small tensor of several integers; [] for others."""
    plain = type(value) in PLAIN_TENSORS and not value.is_meta and 1 < value.numel() <= 4 * MOST
    whole = not value.is_floating_point() and not value.is_complex()
    return read_once(value) if plain and whole and value.dtype.itemsize > 1 else []
