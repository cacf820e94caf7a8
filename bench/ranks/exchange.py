"""The time of one exchange between two ranks: rings in shared memory against gloo.

    OMP_NUM_THREADS=1 python -m bench.ranks.exchange

Two processes send each other as many bytes; both ways alternate in one run. Seconds as the slower
process sees them, from the call until what the other one sent is there. Writes ranks-exchange.json
to bench/results.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from bench.harness import ROOT, alternate, figure, header, ratio, write_json
from bench.report import columns
from maskfx.distributed.exchanges.connect import connect
from maskfx.distributed.exchanges.process_group import Link
from maskfx.distributed.exchanges.ring_link import SharedMemory
from maskfx.distributed.exchanges.world import RINGS, World
from maskfx.runtime.hardware.devices import CPU

SIZES = 64, 1 << 14, 1 << 18, 1 << 22, 1 << 24  # bytes
RANKS, SECONDS = 2, 60.0


def measure(links: dict[str, Link], rank: int, rounds: int) -> dict[int, dict[str, list[float]]]:
    """Return the seconds of each round, by size and link; the first round isn't counted."""
    other, number, found = 1 - rank, 0, {}
    for size in SIZES:
        sent, received = torch.full((size // 4,), float(rank)), torch.empty(size // 4)

        def exchange(link: Link, sent: torch.Tensor = sent, got: torch.Tensor = received) -> None:
            nonlocal number
            number += 1
            link.start({other: sent}, {other: got}, number).wait()
            assert float(got[-1]) == other

        sides = {name: lambda _, link=link: exchange(link) for name, link in links.items()}
        few = max(rounds // 10, 4) if size > 1 << 20 else rounds
        taken = alternate(sides, few + 1)
        found[size] = {name: seconds[1:] for name, seconds in taken.items()}
    return found


def rank_of(rank: int, memory: int, folder: str, rounds: int, results: Any) -> None:
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    worlds = {
        name: World(str(Path(folder) / name), rank, RANKS, name, SECONDS)
        for name in (RINGS, "gloo")
    }
    links = {name: connect(world, memory, CPU) for name, world in worlds.items()}
    results.put(measure(links, rank, rounds))
    results.close()
    results.join_thread()
    os._exit(0)  # without waiting for the other's connections


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--results", type=Path, default=ROOT / "bench" / "results")
    args = parser.parse_args(argv)
    context = multiprocessing.get_context("fork")
    results, memory = context.Queue(), SharedMemory.new(RANKS)
    with tempfile.TemporaryDirectory() as folder:
        processes = [
            context.Process(
                target=rank_of, args=(rank, memory.descriptor, folder, args.rounds, results)
            )
            for rank in range(RANKS)
        ]
        for process in processes:
            process.start()
        found = [results.get(timeout=600) for _ in processes]
        for process in processes:
            process.join()
    rows: list[dict[str, Any]] = []
    for size in SIZES:
        slower = {
            name: [max(pair) for pair in zip(*(one[size][name] for one in found), strict=True)]
            for name in (RINGS, "gloo")
        }
        rows.append(
            {
                "bytes": size,
                **{name: figure(seconds) for name, seconds in slower.items()},
                "faster": ratio(slower["gloo"], slower[RINGS]),
            }
        )
    table = [["bytes", "rings, µs", "gloo, µs", "times faster"]]
    for row in rows:
        micro = (f"{1e6 * row[name]['median']:.0f}" for name in (RINGS, "gloo"))
        table.append([f"{row['bytes']:,}", *micro, f"{row['faster']['median']:.1f}"])
    print(columns(table))
    given = list(sys.argv[1:] if argv is None else argv)
    result = {**header("bench.ranks.exchange", given), "rounds": args.rounds, "rows": rows}
    write_json(args.results / "ranks-exchange.json", result)
    return 0


if __name__ == "__main__":
    sys.exit(main())
