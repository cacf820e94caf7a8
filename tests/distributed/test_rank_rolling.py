"""Steps that read rows of the request's own last step, over ranks: the same as on one."""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import Callable
from typing import Any

import pytest
import torch

from maskfx import CompiledDenoiser, DenseStep, EditStep, RecordStep
from maskfx.distributed.division.partition import Partition
from maskfx.distributed.heartbeat import Waits
from maskfx.distributed.rank_group import RankGroup
from maskfx.ir.programs.head_sources import AttentionWay
from maskfx.runtime.cache.rolling.rolling_cache import RollingCache
from maskfx.runtime.cache.rolling.rolling_pool import RollingPool
from maskfx.runtime.cache.rolling.shared_block import SharedBlock
from maskfx.runtime.processes import memory_files
from tests.distributed.test_ranks import BOUND, cache_error, error, shares
from tests.factories import masks
from tests.factories.thread_ranks import ThreadRanks
from tests.factories.zoo import ZOO
from tests.runtime.test_changed_inputs import other_inputs
from tests.runtime.test_stretches import anywhere, denoiser_of

BYTES = 1 << 28
UNET, FLUX, SD3 = "UNet2DConditionModel-nomid", "FluxTransformer2DModel", "SD3Transformer2DModel"


class Requests:
    """Requests of several sizes, each with a cache for steps on one process and one for ranks."""

    def __init__(self, name: str, count: int = 3) -> None:
        self.name, self.case, self.denoiser = name, ZOO[name], denoiser_of(name)
        self.sizes = [self.case.sizes[i % len(self.case.sizes)] for i in range(count)]
        self.pools = RollingPool(BYTES), RollingPool(BYTES)
        self.caches: list[tuple[RollingCache, ...]] = []
        for seed, size in enumerate(self.sizes):
            kept = self.denoiser.record(**self.case.inputs(size, seed))[1]
            program = self.denoiser.programs[kept.program]
            self.caches.append(tuple(pool.start(program, kept) for pool in self.pools))

    def steps(self, step: int) -> tuple[list[Any], list[Any]]:
        """The same edits for one process and for ranks; other requests are in between."""
        found: tuple[list[Any], list[Any]] = ([], [])
        for seed, (size, caches) in enumerate(zip(self.sizes, self.caches, strict=True)):
            mask = masks.random(self.case.mask_shape(size), 7 * step + seed, 0.4)
            wide = anywhere(len(self.denoiser.stretches), mask, 11 * step + seed)
            if step == 2 and seed == 0:  # all sites: nothing is read
                mask, wide = mask | True, {}
            inputs = other_inputs(self.name, size, 20 + 10 * step + seed, seed)
            for own, cache in zip(found, caches, strict=True):
                own.append(EditStep(inputs, mask, cache, any_step=True, wide=wide, record=True))
        for own in found if step % 2 else ():
            own.insert(1, DenseStep(self.case.inputs(self.sizes[0], 5)))
            own.append(RecordStep(self.case.inputs(self.sizes[-1], 6)))
        return found

    def check(self, step: int, split: Any) -> None:
        for_one, for_ranks = self.steps(step)
        wanted = self.denoiser.step(for_one)
        run = getattr(split, "run", None)
        got = self.denoiser.step(for_ranks, split) if run is None else run(self.denoiser, for_ranks)
        assert error(got, wanted) < BOUND
        for one, other in self.caches:
            assert cache_error(other, one) < BOUND
            assert error(other.output, one.output) < BOUND


@pytest.mark.parametrize(
    "name", [UNET, *(pytest.param(n, marks=pytest.mark.slow) for n in (FLUX, SD3))]
)
@pytest.mark.parametrize(
    ("ranks", "kind", "way"),
    [
        (2, "equal", "gathered"),
        pytest.param(3, "unequal", "keys by rank", marks=pytest.mark.slow),
        (4, "empty", "heads"),
        pytest.param(4, "unequal", "heads", marks=pytest.mark.slow),
    ],
)
def test_steps_over_threads(name: str, ranks: int, kind: str, way: AttentionWay) -> None:
    requests = Requests(name)
    for step in range(4):
        own = shares(kind, ranks, 5, seed=step, texts=(True, False))
        split = ThreadRanks(requests.denoiser.settings, own, way)
        requests.check(step, split)
        assert split.batches == 1


@pytest.fixture
def make() -> Any:
    made: list[RankGroup] = []

    def group(denoiser: CompiledDenoiser, ranks: int) -> RankGroup:
        made.append(RankGroup(denoiser, ranks, waits=Waits(exchange=10.0)))
        return made[-1]

    yield group
    for one in made:
        one.stop()


@pytest.mark.parametrize("name", [UNET, pytest.param(FLUX, marks=pytest.mark.slow)])
def test_steps_over_processes_and_after_one_was_killed(
    name: str, make: Callable[..., RankGroup]
) -> None:
    """Other shares and other ranks at each step; rows are written once a step has succeeded."""
    requests = Requests(name)
    group = make(requests.denoiser, 3)
    sets: list[Any] = [group.on((0, 1)), group.on((2,)), group.on((1, 2, 0)), group.on((1, 0))]
    for step, split in enumerate(sets):
        if len(split.ranks) > 1:
            split.partition = shares("unequal", len(split.ranks), 3 + 2 * (step % 2), seed=step)
        requests.check(step, split)
    assert group.computed_here == group.failures == 0
    assert group.pool.ranks is not None
    assert all(len(rank.blocks) == 1 for rank in group.pool.ranks.all)
    os.kill(group.pool.ranks.all[1].child.pid, signal.SIGKILL)
    requests.check(4, group.on((0, 1)))
    assert (group.failures, group.computed_here) == (1, 0)


@pytest.mark.slow
def test_ranks_unmap_blocks_that_no_longer_exist(make: Callable[..., RankGroup]) -> None:
    requests = Requests(UNET, 1)
    group, even = make(requests.denoiser, 2), Partition(((1.0, 1.0),))
    requests.check(0, group.on(2, even))
    assert group.pool.ranks is not None
    first = {block.number for block in requests.pools[1]._all()}
    assert [rank.blocks for rank in group.pool.ranks.all] == [first, first]
    requests.caches.clear()
    later = Requests(UNET, 1)
    requests.pools = later.pools
    gc.collect()
    later.check(0, group.on(2, even))
    second = {block.number for block in later.pools[1]._all()}
    assert [rank.blocks for rank in group.pool.ranks.all] == [second, second]
    assert group.computed_here == 0


@pytest.mark.slow
def test_without_memory_for_other_processes_steps_run_here(
    make: Callable[..., RankGroup], monkeypatch: pytest.MonkeyPatch
) -> None:
    requests = Requests(UNET, 1)
    group = make(requests.denoiser, 2)

    def full(name: str, nbytes: int) -> int:
        raise OSError("no space")

    monkeypatch.setattr(memory_files, "memory_file", full)
    requests.check(0, group.on(2))
    assert (group.computed_here, group.failures) == (1, 0)


def test_rows_that_moved_to_memory_of_all_processes() -> None:
    """Caches, their parts and later requests of the block read and write there."""
    requests = Requests(UNET, 2)
    caches = [other for _, other in requests.caches]
    part, before = caches[0].element(0), caches[0].copy()
    (block,) = requests.pools[1]._all()
    shared = SharedBlock(block)
    there = shared.buffers.mapped(shared.descriptor)
    assert cache_error(caches[0], before) == 0
    assert cache_error(part, before) == 0
    requests.check(1, None)
    for tap, rows in there.rows.items():
        assert torch.equal(rows.view(torch.int32), block.rows[tap].view(torch.int32))
    later = requests.pools[1].start(
        requests.denoiser.programs[before.program],
        requests.denoiser.record(**requests.case.inputs(requests.sizes[0], 0))[1],
    )
    if later.block is block:
        tap = next(iter(later.rows))
        later.rows[tap].fill_(3.0)  # type: ignore[union-attr]
        assert (there.rows[tap] == 3.0).any()
