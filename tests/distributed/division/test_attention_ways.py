"""Each attention of a program in a way of its own."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch.nn.functional as F
from torch import Tensor, nn

import maskfx
from maskfx import CompiledDenoiser, DenseStep, EditStep, RecordStep
from maskfx.compiler.rank_twins import SplitProgram, split_program
from maskfx.distributed.divider import Divider
from maskfx.distributed.division.links import LinkCosts
from maskfx.distributed.division.partition import Partition
from maskfx.distributed.rank_step import RankPrograms
from maskfx.ir.programs.head_sources import WAYS, AttentionWays
from tests.distributed import tiny
from tests.distributed.test_ranks import BOUND, cache_error, error, shares
from tests.factories.masks import MASKS
from tests.factories.thread_ranks import ThreadRanks


class Levels(nn.Module):
    """Attention at two levels; the coarse one has a quarter of the sites."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.time = nn.Conv2d(4, 16, 3, padding=1), nn.Linear(1, 16)
        self.fine, self.coarse, self.text = nn.Linear(16, 48), nn.Linear(16, 48), nn.Linear(8, 16)
        self.down = nn.Conv2d(16, 16, 2, stride=2)
        self.up, self.leave = nn.ConvTranspose2d(16, 16, 2, stride=2), nn.Conv2d(16, 4, 1)

    def forward(self, sample: Tensor, timestep: Tensor, encoder_hidden_states: Tensor) -> Tensor:
        x = self.enter(sample) + self.time(timestep.view(-1, 1).float() / 1000)[:, :, None, None]
        x = attended(x, self.fine)
        y = F.silu(self.down(x)) + self.text(encoder_hidden_states).mean(1)[:, :, None, None]
        result: Tensor = self.leave(x + self.up(attended(y, self.coarse)))
        return result


def attended(x: Tensor, qkv: nn.Module) -> Tensor:
    rows = x.flatten(2).transpose(1, 2)
    return x + tiny.attend(qkv(rows)).transpose(1, 2).view(x.shape)


@pytest.fixture(scope="module")
def denoiser() -> CompiledDenoiser:
    return tiny.compiled(Levels)


def an_edit(denoiser: CompiledDenoiser, seed: int, mask: str = "random") -> EditStep:
    cache = denoiser.record(**tiny.inputs(seed, 16, 16))[1]
    return EditStep(tiny.inputs(seed + 1, 16, 16), MASKS[mask]((16, 16), seed), cache)


def attentions(denoiser: CompiledDenoiser) -> list[str]:
    (program,) = denoiser.programs.values()
    split = split_program(program)
    assert isinstance(split, SplitProgram)
    return [name for name, numbers in split.attentions.items() if numbers]


@pytest.mark.parametrize("seed", range(8))
def test_ways_may_differ_from_attention_to_attention(denoiser: CompiledDenoiser, seed: int) -> None:
    rng, names = random.Random(seed), attentions(denoiser)
    assert len(names) == 2
    ways: AttentionWays = tuple(
        (name, way) for name, way in zip(names, rng.sample(WAYS, 2), strict=True)
    )
    steps: list[Any] = [
        an_edit(denoiser, seed),
        DenseStep(tiny.inputs(seed, 8, 12)),
        RecordStep(tiny.inputs(seed, 12, 8)),
    ]
    kind, ranks = rng.choice(["equal", "unequal", "empty"]), rng.choice([2, 3, 4])
    split = ThreadRanks(denoiser.settings, shares(kind, ranks, 3, seed), ways)
    *wanted, (output, cache) = denoiser.step(steps)
    *got, (own, recorded) = denoiser.step(steps, split)
    assert split.batches == 1
    assert max(error(a, b) for a, b in zip(got, wanted, strict=True)) < BOUND
    assert error(own, output) < BOUND
    assert cache_error(recorded, cache) < BOUND


def test_each_level_attends_in_its_cheapest_way(denoiser: CompiledDenoiser) -> None:
    """Keys by rank take one exchange more, which saves bytes in proportion to the level's sites."""
    edit, found = an_edit(denoiser, 3, "square"), list[Any]()
    denoiser.step([edit], lambda *given: found.append(given))
    program, _, frame, _, members = found[0]
    fine, coarse = attentions(denoiser)
    divider, halves = Divider(RankPrograms(denoiser.settings)), Partition(((1.0, 1.0),))

    def chosen(exchange: float, partition: Partition = halves) -> AttentionWays:
        costs = LinkCosts(exchange=exchange, load=1.0, send=0.0, flop=1e-9)
        return divider.attention_ways(program, frame, members, partition, costs)

    half = 16 * 4  # bytes of half the keys and values of a site
    rest = [half * len(members[0].sites.rest(f"grid{level}")) for level in (0, 1)]
    assert rest[0] > 2 * rest[1]
    assert chosen(rest[1] / 2) in ("keys by rank", "heads")
    assert chosen(rest[0] * 2) == chosen(0.0, Partition(((1.0, 0.0),))) == "gathered"
    ways = chosen((rest[0] + rest[1]) / 2)
    assert not isinstance(ways, str)
    assert [name for name, _ in ways] == [fine]
    seconds = [
        divider.ways(program, members, 2, LinkCosts(rest[1] / 2, load, 0.0, 1e-9))[2][1]
        for load in (0.0, 1.0)
    ]  # a degree is predicted with the ways that its attentions would have
    assert seconds[0] - seconds[1] == pytest.approx(sum(rest) - rest[1])
    loaded = []
    for each in ("gathered", ways, chosen(rest[1] / 2)):
        split = ThreadRanks(denoiser.settings, halves, each)
        denoiser.step([edit], split)
        loaded.append(sum(split.loaded))
    assert [loaded[0] - one for one in loaded] == [0, 2 * rest[0], 2 * sum(rest)]


def test_a_twin_of_a_program_names_its_attentions_alike() -> None:
    """So ways chosen for a step serve its recordings."""
    denoiser = maskfx.compile(tiny.build(tiny.Joint))
    denoiser.record(**tiny.inputs(0))
    (program,) = denoiser.programs.values()
    names = [
        [node.name for node in module.graph.nodes if "attend" in node.name]
        for module in (program.module, program.recording)
    ]
    assert names[0] == names[1] != []
