"""Sides of the picture among the numbers of a tensor, such as `img_sizes` of shape [batch, 2].

Python reads such numbers as sizes, but a tensor under export has no values. Where the numbers are
the sides of the call's picture, in sites, in pixels or in patches, or products of them, the export
gives Python the picture's own symbolic sizes in their place, so that one capture serves pictures of
any size. A call whose numbers aren't its picture's sides isn't served by such a capture.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from math import prod

import torch

from maskfx.compiler.capture.arguments.grid_numbers import PIXELS, grid_numbers, side_of
from maskfx.compiler.capture.arguments.roles import Roles
from maskfx.ir.values import PLAIN_TENSORS

MOST = 16  # numbers of one sample
PATCHES = (1, 2, 4, 8, 16)


def small_wholes(value: object, batch: int) -> list[int]:
    """Return the whole numbers that a small tensor has for each sample; [] for other tensors.

    A first axis as long as the batch lists samples, whose numbers are equal.
    """
    if not isinstance(value, torch.Tensor) or type(value) not in PLAIN_TENSORS:
        return []
    if value.is_meta or not 0 < value.dim() <= 3:
        return []
    whole = not value.is_floating_point() and not value.is_complex() and value.dtype != torch.bool
    each = value[:1] if lists_samples(value, batch) else value
    if not whole or not 0 < each.numel() <= MOST or not bool((value == each).all()):
        return []
    return [int(n) for n in each.flatten().tolist()]


def lists_samples(value: torch.Tensor, batch: int) -> bool:
    """Return True if the first axis of a small tensor of numbers lists the samples of a batch."""
    return value.shape[0] == batch


def lines_of(value: torch.Tensor, numbers: Sequence[int]) -> list[range]:
    """Return the places of the numbers that lie in one line: along the last axis."""
    width = value.shape[-1] if value.dim() > 1 or len(numbers) == value.numel() else 1
    return [range(start, start + width) for start in range(0, len(numbers), width)]


def roles_of_samples(value: torch.Tensor, batch: int) -> Roles:
    """Return the roles of the dimensions of a small tensor of numbers."""
    return ("batch" if lists_samples(value, batch) else "", *[""] * (value.dim() - 1))


def grid_of_tensors(
    tensors: Mapping[str, torch.Tensor],
    numbers: Mapping[str, Sequence[int]],
    tokens: int,
    turned: bool = False,
) -> dict[str, int]:
    """Return the sides of the picture that a number of tokens makes, if they are in a tensor.

    Height stands before width, or behind it if `turned`.
    """
    every = [grid_in(tensors[path], own, tokens) for path, own in numbers.items()]
    exact = (sides for sides in every if sides and prod(sides.values()) == tokens)
    found = next(exact, next(filter(None, every), {}))
    return {**found, "y": found["x"], "x": found["y"]} if found and turned else found


def grid_in(value: torch.Tensor, numbers: Sequence[int], tokens: int) -> dict[str, int]:
    """Return the sides of the picture that a number of tokens makes, if a tensor has them."""
    lines = lines_of(value, numbers)
    paths = [f"{i}.{k}" for i, line in enumerate(lines) for k in line]
    found = grid_numbers(paths, numbers, tokens)
    given = dict(zip(paths, numbers, strict=True))
    return dict(side_of(role, given[path]) for path, (role,) in found.items())


def roles_in(
    value: torch.Tensor, numbers: Sequence[int], sizes: Mapping[str, int], turned: bool = False
) -> Roles:
    """Return the roles of the numbers in a tensor that are sides of a picture; () if none is.

    Args:
        value: the tensor.
        numbers: those of one sample.
        sizes: the picture's height, width and frames, or the number of its tokens.
        turned: whether width stands before height where both orders fit.
    """
    found = [""] * len(numbers)
    if "y" in sizes:
        for line in lines_of(value, numbers):
            for one, other in pairwise(line):
                pair = () if found[one] else sides_of(numbers[one], numbers[other], sizes, turned)
                if pair:
                    found[one], found[other] = pair
                    before = one - 1
                    if before in line and not found[before] and sizes.get("frames", 1) > 1:
                        found[before] = "frames" if numbers[before] == sizes["frames"] else ""
    for place, number in enumerate(numbers):
        found[place] = found[place] or count_of(number, sizes)
    return tuple(found) if any(found) else ()


def sides_of(one: int, other: int, sizes: Mapping[str, int], turned: bool) -> tuple[str, ...]:
    """Return the roles of two numbers that are a picture's sides, in sites, pixels or patches."""
    axes = ("y", "x"), ("x", "y")
    for first, second in reversed(axes) if turned else axes:
        pair = sizes[first], sizes[second]
        if (one, other) == pair:
            return first, second
        for width in PIXELS:
            if (one, other) == (width * pair[0], width * pair[1]):
                return f"{first}*{width}", f"{second}*{width}"
        for patch in PATCHES[1:]:
            if (patch * one, patch * other) == pair:
                return f"{first}/{patch}", f"{second}/{patch}"
    return ()


def count_of(number: int, sizes: Mapping[str, int]) -> str:
    """Return the role of a number that counts a picture's sites, its patches or its tokens."""
    if "y" not in sizes:
        return "tokens" if number > 1 and number == sizes.get("tokens") else ""
    sites = prod(sizes.get(axis, 1) for axis in ("frames", "y", "x"))
    patches = (p for p in PATCHES if sizes["y"] % p == 0 and sizes["x"] % p == 0)
    return next((f"tokens/{p * p}" for p in patches if number * p * p == sites and number > 1), "")
