"""The replay of adapters' popularity: laws fitted to the paper's figures, and counted misses."""

from __future__ import annotations

import numpy as np
import pytest

from bench.adapters.popularity import LORAS, POPULATIONS, Population, replay, requests
from maskfx.runtime.popularity import LeastFrequentlyUsed, LeastRecentlyUsed

NETS = [one for one in POPULATIONS if one.kind == "nets"]


@pytest.mark.parametrize("population", NETS, ids=lambda p: p.service)
def test_the_top_nets_have_their_share_of_invocations(population: Population) -> None:
    shares = population.invocations(population.exponent())
    assert shares.sum() == pytest.approx(1)
    assert shares[: population.top].sum() == pytest.approx(population.share, abs=1e-6)
    uses = [key for own in requests(population, 20_000, False, 1) for key in own]
    assert np.mean(np.array(uses) < population.top) == pytest.approx(population.share, abs=0.005)


def test_requests_use_as_many_distinct_adapters_as_in_the_table() -> None:
    population = NETS[0]
    trace = requests(population, 20_000, True, 2)
    counts = np.bincount([len(own) for own in trace], minlength=4) / len(trace)
    assert counts == pytest.approx(population.used, abs=0.02)
    assert all(len(set(own)) == len(own) for own in trace)
    assert all(0 <= key < population.count for own in trace for key in own)


def test_loras_with_one_percent_are_as_many_as_a_zipf_law_allows() -> None:
    for population in POPULATIONS:
        if population.kind == "loras":
            shares = population.invocations(population.exponent())
            assert abs(int((shares >= 0.01).sum()) - population.frequent) <= 2
            assert population.sizes is LORAS


@pytest.mark.parametrize("policy", [LeastRecentlyUsed, LeastFrequentlyUsed])
def test_misses_are_counted(policy: type[LeastRecentlyUsed]) -> None:
    trace = [[1], [2]] * 50
    assert replay(trace, 1, policy())["miss_ratio"] == 1
    found = replay(trace, 2, policy())
    assert found == {"miss_ratio": 0, "loads_per_switch": 0}
    trace = requests(NETS[0], 2000, False, 3)
    misses = [replay(trace, size, policy())["miss_ratio"] for size in (1, 3, 6, 12)]
    assert misses == sorted(misses, reverse=True)
    assert misses[0] > 5 * misses[-1]
