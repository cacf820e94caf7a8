"""Baselines of the planner: FlashPS's Algorithm 1, its two strawmen, and no cache.

Each decides for the whole batch, between two choices passed by name: `cached`, and `full`, which
computes everything. `simulate` returns the time of a selection.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from maskfx.errors import InputError
from maskfx.runtime.planner.timeline import NOW, BlockChoice, BlockTimes, Start, Timeline, simulate

Picked = tuple[tuple[int, ...], ...]


def _named(block: BlockTimes, name: str) -> tuple[int, ...]:
    """Return for each member the index of the choice of that name."""
    numbers = []
    for choices in block.members:
        names = [choice.name for choice in choices]
        if name not in names:
            raise InputError(f"baseline {name!r}: choose one of {', '.join(names)}")
        numbers.append(names.index(name))
    return tuple(numbers)


def all_same(blocks: Sequence[BlockTimes], name: str) -> Picked:
    """Select the choice of one name for every block and member."""
    return tuple(_named(block, name) for block in blocks)


def greedy(blocks: Sequence[BlockTimes], cached: str, full: str, start: Start = NOW) -> Picked:
    """Select by Algorithm 1: load a block if its compute then ends no later.

    As in the paper, it ignores the staging buffer and the extra load of a full block after a
    cached one.
    """
    load, compute = start.load, start.compute
    picked = []
    for block in blocks:
        with_cache, without = _named(block, cached), _named(block, full)
        loads = sum(c.load_seconds for c in _chosen(block, with_cache))
        short = sum(c.compute_seconds for c in _chosen(block, with_cache)) + block.fixed_seconds
        long = sum(c.compute_seconds for c in _chosen(block, without)) + block.fixed_seconds
        if max(load + loads, compute) + short <= compute + long:
            load += loads
            compute = max(load, compute) + short
            picked.append(with_cache)
        else:
            compute += long
            picked.append(without)
    return tuple(picked)


def _chosen(block: BlockTimes, picked: Sequence[int]) -> list[BlockChoice]:
    return [choices[i] for choices, i in zip(block.members, picked, strict=True)]


def naive(
    blocks: Sequence[BlockTimes], cached: str, buffer_bytes: float = math.inf, start: Start = NOW
) -> Timeline:
    """Simulate loading a block, computing it, loading the next one, without overlap."""
    return simulate(blocks, all_same(blocks, cached), buffer_bytes, start, overlap=False)


def strawman(
    blocks: Sequence[BlockTimes], cached: str, buffer_bytes: float = math.inf, start: Start = NOW
) -> Timeline:
    """Simulate loading every block while earlier blocks are computed."""
    return simulate(blocks, all_same(blocks, cached), buffer_bytes, start)


def compute_all(blocks: Sequence[BlockTimes], full: str, start: Start = NOW) -> Timeline:
    """Simulate computing everything, without a cache."""
    return simulate(blocks, all_same(blocks, full), start=start)
