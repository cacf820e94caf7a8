"""Measures, in each rank, what its exchanges, loads and products cost."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable

import torch

from maskfx.distributed.division.links import LinkCosts
from maskfx.ops.exchange import Group
from maskfx.runtime.cache.movers import wait
from maskfx.runtime.hardware.devices import moved

SMALL, LARGE = 16, 1 << 19  # numbers that an exchange sends to each rank
ROUNDS, LARGE_ROUNDS = 20, 4
WIDTH, ROWS = 512, 1024  # of a product, and of rows that are read


def measure_links(
    group: Group, ranks: int, device: torch.device, finish: Callable[[], None]
) -> LinkCosts:
    """Return the costs as this rank finds them; all ranks measure at the same time.

    Args:
        group: All ranks.
        ranks: Their number.
        device: Where this rank computes; rows are loaded to it from host memory.
        finish: Waits until the exchanges so far have ended; see `Link.finish`.
    """
    others = [rank for rank in range(ranks) if rank != group.rank]

    def exchange(count: int, number: int) -> None:
        incoming = {rank: torch.empty(count, device=device) for rank in others}
        group.exchange(dict.fromkeys(others, torch.zeros(count, device=device)), incoming, number)
        finish()

    def seconds(act: Callable[[], object], rounds: int) -> float:
        def complete() -> None:
            act()
            wait(device)

        complete()  # the first one chooses kernels
        return median_seconds(complete, rounds)

    exchange(SMALL, 1)  # connects the ranks
    small = seconds(lambda: exchange(SMALL, 1), ROUNDS)
    large = seconds(lambda: exchange(LARGE, 2), LARGE_ROUNDS)
    rows, weight = torch.rand(4 * ROWS, WIDTH), moved(torch.rand(WIDTH, WIDTH), device)
    index, own = torch.arange(0, 4 * ROWS, 2), moved(rows[:ROWS], device)
    load = seconds(lambda: moved(rows.index_select(0, index), device), ROUNDS)
    product = seconds(lambda: own @ weight, ROUNDS)
    return LinkCosts(
        exchange=small,
        load=load / (len(index) * WIDTH * rows.itemsize),
        send=max(0.0, large - small) / (LARGE * rows.itemsize * len(others)),
        flop=product / (2 * ROWS * WIDTH * WIDTH),
    )


def median_seconds(act: Callable[[], object], rounds: int) -> float:
    taken = []
    for _ in range(rounds):
        start = time.perf_counter()
        act()
        taken.append(time.perf_counter() - start)
    return statistics.median(taken)


def slowest(found: Iterable[LinkCosts]) -> LinkCosts:
    """Return the highest cost of each kind: a step waits for its slowest rank."""
    each = list(found)
    return LinkCosts(
        exchange=max(one.exchange for one in each),
        load=max(one.load for one in each),
        send=max(one.send for one in each),
        flop=max(one.flop for one in each),
    )
