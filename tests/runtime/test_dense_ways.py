"""Dense members run the way that measured faster, and the other one is tried again some time."""

from __future__ import annotations

from math import inf

import numpy as np

from maskfx.runtime.dense_ways import AGAIN, TRIES, DenseBatch, DenseWay, DenseWays

BATCH = DenseBatch.of(4, 2, 100)


def run(ways: DenseWays, seconds: dict[DenseWay, float], steps: int) -> list[DenseWay]:
    chosen = []
    for _ in range(steps):
        way = ways.choose(BATCH)
        ways.add(BATCH, way, seconds[way], 100)
        chosen.append(way)
    return chosen


def test_both_are_measured_then_the_faster_one_runs() -> None:
    for faster, slower in ((DenseWay.ROWS, DenseWay.MODULE), (DenseWay.MODULE, DenseWay.ROWS)):
        ways = DenseWays()
        chosen = run(ways, {faster: 1.0, slower: 2.0}, 20)
        assert sorted(chosen[: 2 * TRIES]) == sorted([faster, slower] * TRIES)
        assert set(chosen[2 * TRIES :]) == {faster}
        assert any(f"runs as {faster}" in line for line in ways.lines())


def test_the_other_way_is_measured_again_and_chosen_when_it_became_faster() -> None:
    ways = DenseWays()
    run(ways, {DenseWay.ROWS: 1.0, DenseWay.MODULE: 2.0}, 8)
    chosen = run(ways, {DenseWay.ROWS: 9.0, DenseWay.MODULE: 2.0}, 3 * AGAIN)
    assert chosen.count(DenseWay.MODULE) > 2 * AGAIN


def test_a_slow_first_measurement_is_forgotten() -> None:
    """The first step in rows captures the module."""
    ways, draw = DenseWays(), iter([100.0, *[1.0] * 50])
    for _ in range(30):
        way = ways.choose(BATCH)
        ways.add(BATCH, way, next(draw) if way is DenseWay.ROWS else 2.0, 10)
    assert ways.choose(BATCH) is DenseWay.ROWS


def test_a_way_that_fails_is_left_until_it_works_again() -> None:
    ways = DenseWays()
    chosen = run(ways, {DenseWay.ROWS: inf, DenseWay.MODULE: 2.0}, 20)
    assert set(chosen[2 * TRIES :]) == {DenseWay.MODULE}
    later = run(ways, {DenseWay.ROWS: 1.0, DenseWay.MODULE: 2.0}, 2 * AGAIN)
    assert later[-1] is DenseWay.ROWS


def test_numbers_sizes_and_sites_are_judged_apart() -> None:
    """Two small requests may gain by rows, where two large ones of as many sizes don't."""
    ways, draw = DenseWays(), np.random.default_rng(0)
    fast = {(2, 1, 384): DenseWay.ROWS, (2, 1, 2048): DenseWay.MODULE, (4, 3, 384): DenseWay.MODULE}
    for _ in range(60):
        key = list(fast)[int(draw.integers(3))]
        batch = DenseBatch.of(*key)
        way = ways.choose(batch)
        ways.add(batch, way, 1.0 if way is fast[key] else 3.0, key[2])
    assert [ways.choose(DenseBatch.of(*key)) for key in fast] == list(fast.values())
    assert DenseBatch.of(2, 1, 384) == DenseBatch.of(2, 1, 300) != DenseBatch.of(2, 1, 200)
    assert any("2 dense requests of 1 size, 256 to 511 sites" in line for line in ways.lines())
