"""How often a net or a LoRA isn't resident, by cache size and policy, in a replay of requests.

    python -m bench.adapters.popularity

The trace behind the figures of "Katz: Efficient Workflow Serving for Diffusion Models with Many
Adapters" isn't read here. Requests are drawn from what the paper states of two production services:

- Table 1: how many ControlNets and LoRAs a request uses.
- Section 3.1: service A has 47 ControlNets, of which the top 5 make 98 % of invocations; service B
  has 94, of which the top 8 make 95 %.
- Section 3.2: service A has 6,980 LoRAs, of which 6,968 have less than 1 % of invocations each;
  service B has 7,463, of which 7,449 do.

Each population follows a Zipf law whose exponent is fitted to these figures: for nets, the share of
the top ones is exact; for LoRAs, the exponent is the smallest one at which the number of LoRAs with
1 % or more is closest to the paper's (of service B it is 12 or 13 at any exponent, and 14 in the
paper). A request's adapters are distinct.
`stationary` draws all requests from the same law; in `drifting` (an assumption: the paper gives no
figure for it) a tenth of the adapters change places with others after each 20th of the requests.

The policies are those of `maskfx.runtime.popularity`, which the engine uses for nets: LRU, LFU, and
LFU whose counts halve with a half-life, in uses. `miss_ratio` is the share of invocations whose
adapter isn't resident; `loads_per_switch` the number of loads of a request that uses other adapters
than the one before, as in figure 6 of the paper. `miss_ratio_of_the_top_always_resident` is the
least that is possible in the stationary trace. Writes adapters-popularity.json to bench/results.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from bench.harness import ROOT, header, write_json
from bench.report import columns
from maskfx.engine.processes.services import HALF_LIFE
from maskfx.runtime.popularity import (
    LeastFrequentlyUsed,
    LeastRecentlyUsed,
    Popularity,
    ResidentSet,
)

EPOCHS = 20  # the trace has 20 days
MOVED = 0.1  # share of adapters that change places between two epochs
WANTED = {"A": {5: 0.02}, "B": {8: 0.05}}  # miss ratios of nets by cache size, at most
PAPER = {"lru": 0.54, "lfu": 0.57}  # section 3.2: loads per switch, LoRAs of service B, size 10


@dataclass(frozen=True)
class Population:
    """The adapters of one kind in one service.

    Args:
        kind: "nets" or "loras".
        service: "A" or "B".
        count: Number of adapters.
        used: Table 1: probability that a request uses 0, 1, 2, ... of them.
        top: Number of the most popular ones whose share is known, for nets.
        share: Their share of invocations.
        frequent: Number of adapters with at least 1 % of invocations each, for LoRAs.
        sizes: Numbers of resident adapters that are tried.
    """

    kind: str
    service: str
    count: int
    used: tuple[float, ...]
    top: int = 0
    share: float = 0.0
    frequent: int = 0
    sizes: tuple[int, ...] = ()

    def exponent(self) -> float:
        """Return the exponent of the fitted Zipf law."""
        if self.top:
            return first_root(lambda s: self.invocations(s)[: self.top].sum() - self.share)
        distances = [
            (abs(int((self.invocations(s) >= 0.01).sum()) - self.frequent), s)
            for s in np.arange(0.5, 2.0, 0.01)
        ]
        return float(min(distances)[1])

    def invocations(self, exponent: float) -> Any:
        """Return each adapter's share of invocations: a request's adapters are distinct."""
        law = zipf(self.count, exponent)
        first = law / (1 - law)
        shares = [law, law * (first.sum() - first)]
        if len(self.used) > 3:
            pairs = first[:, None] * law / (1 - law[:, None] - law)
            np.fill_diagonal(pairs, 0)
            shares.append(law * (pairs.sum() - pairs.sum(0) - pairs.sum(1)))
        found = sum(
            sum(self.used[place + 1 :]) * own
            for place, own in enumerate(shares)
            if place + 1 < len(self.used)
        )
        return found / found.sum()


NETS, LORAS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16), (10, 20, 50, 100, 200)
POPULATIONS = (
    Population("nets", "A", 47, (0.0, 0.305, 0.695, 0.0), top=5, share=0.98, sizes=NETS),
    Population("nets", "B", 94, (0.019, 0.251, 0.699, 0.031), top=8, share=0.95, sizes=NETS),
    Population("loras", "A", 6980, (0.002, 0.088, 0.91), frequent=12, sizes=LORAS),
    Population("loras", "B", 7463, (0.072, 0.736, 0.192), frequent=14, sizes=LORAS),
)
POLICIES: dict[str, Callable[[], Popularity]] = {
    "lru": LeastRecentlyUsed,
    "lfu": LeastFrequentlyUsed,
    "lfu, half-life 64": lambda: LeastFrequentlyUsed(64),
    f"lfu, half-life {HALF_LIFE:.0f}": lambda: LeastFrequentlyUsed(HALF_LIFE),
    "lfu, half-life 1024": lambda: LeastFrequentlyUsed(1024),
}


def zipf(count: int, exponent: float) -> Any:
    weights = np.arange(1.0, count + 1) ** -exponent
    return weights / weights.sum()


def first_root(difference: Callable[[float], float]) -> float:
    """Return the smallest exponent at which a difference changes from below zero to above."""
    step = 0.05
    low = next(k * step for k in range(200) if difference((k + 1) * step) >= 0)
    high = low + step
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (low, middle) if difference(middle) >= 0 else (middle, high)
    return high


def requests(population: Population, count: int, drifting: bool, seed: int) -> list[list[int]]:
    """Return the adapters of each request."""
    draw = np.random.default_rng(seed)
    shares = np.array(population.used) / sum(population.used)
    numbers = draw.choice(len(shares), size=count, p=shares)
    law = zipf(population.count, population.exponent())
    names = np.arange(population.count)
    found: list[list[int]] = []
    for epoch in np.array_split(numbers, EPOCHS):
        ranks = iter(draw.choice(population.count, size=4 * int(epoch.sum()) + 1000, p=law))
        found += [[int(names[rank]) for rank in distinct(ranks, number)] for number in epoch]
        if drifting:
            moved = draw.choice(population.count, size=int(MOVED * population.count), replace=False)
            names[moved] = names[draw.permutation(moved)]
    return found


def distinct(ranks: Iterator[int], number: int) -> list[int]:
    found: list[int] = []
    while len(found) < number:
        rank = next(ranks)
        if rank not in found:
            found.append(rank)
    return found


def replay(trace: Sequence[Sequence[int]], size: int, popularity: Popularity) -> dict[str, float]:
    """Return how often adapters weren't resident; the first half of the requests isn't counted."""
    resident = ResidentSet(size, popularity)
    uses = misses = switches = loads = 0
    before: set[int] = set()
    for number, own in enumerate(trace):
        counted = number >= len(trace) // 2
        missed = 0
        for key in own:
            missed += not resident.use(key)
            resident.pin(key)
        for key in own:
            resident.admit(key, 1)  # None if the request has more of them than fit
        for key in own:
            resident.unpin(key)
        if counted:
            uses, misses = uses + len(own), misses + missed
        if counted and set(own) != before:
            switches, loads = switches + 1, loads + missed
        before = set(own)
    return {"miss_ratio": misses / max(1, uses), "loads_per_switch": loads / max(1, switches)}


def measured(population: Population, count: int, seed: int) -> dict[str, Any]:
    """Return the results of one population, by trace, policy and size."""
    exponent = population.exponent()
    shares = population.invocations(exponent)
    found: dict[str, Any] = {
        "kind": population.kind,
        "service": population.service,
        "count": population.count,
        "used_by_a_request": list(population.used),
        "exponent": exponent,
        "share_of_top": {str(top): float(shares[:top].sum()) for top in (1, 5, 8, 10, 100)},
        "with_one_percent": int((shares >= 0.01).sum()),
        "miss_ratio_of_the_top_always_resident": {
            str(size): float(shares[size:].sum()) for size in population.sizes
        },
        "requests": count,
    }
    for name, drifting in (("stationary", False), ("drifting", True)):
        trace = requests(population, count, drifting, seed)
        found[name] = {
            policy: {str(size): replay(trace, size, make()) for size in population.sizes}
            for policy, make in POLICIES.items()
        }
    return found


def show(result: dict[str, Any]) -> str:
    lines = []
    for own in result["populations"]:
        least = own["miss_ratio_of_the_top_always_resident"]
        lines.append(f"exponent {own['exponent']:.2f}, {own['with_one_percent']} with 1 % or more")
        lines += [f"least: {' '.join(f'{k}: {v:.3f}' for k, v in least.items())}", ""]
        for trace in ("stationary", "drifting"):
            sizes = list(next(iter(own[trace].values())))
            head = f"{own['kind']} of {own['service']}, {trace}"
            rows = [[head, *sizes]]
            for policy, by_size in own[trace].items():
                rows.append([policy, *(f"{by_size[size]['miss_ratio']:.3f}" for size in sizes)])
            lines += [columns(rows), ""]
    return "\n".join([*lines, str(result["accepted"])])


def accepted(populations: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the wanted miss ratios of nets, and those of the engine's policy."""
    used = f"lfu, half-life {HALF_LIFE:.0f}"
    return [
        {
            "service": own["service"],
            "size": size,
            "wanted": most,
            "stationary": {p: own["stationary"][p][str(size)]["miss_ratio"] for p in ("lru", used)},
            "met": own["stationary"][used][str(size)]["miss_ratio"] <= most,
        }
        for own in populations
        if own["kind"] == "nets"
        for size, most in WANTED[own["service"]].items()
    ]


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.adapters.popularity")
    parser.add_argument("--requests", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", default="adapters-popularity.json")
    options = parser.parse_args(arguments)
    began = time.perf_counter()
    populations = [measured(one, options.requests, options.seed) for one in POPULATIONS]
    result = {
        **header("bench.adapters.popularity", arguments),
        "populations": populations,
        "paper_loads_per_switch_loras_b_10": PAPER,
        "accepted": accepted(populations),
        "seconds": time.perf_counter() - began,
    }
    write_json(ROOT / "bench" / "results" / options.out, result)
    print(show(result))


if __name__ == "__main__":
    main(sys.argv[1:])
