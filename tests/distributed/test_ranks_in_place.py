"""Adapters in the weights of ranks: results of merged weights, all ranks or none, bits restored."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from maskfx import CompiledDenoiser, DenseStep, EditStep, RecordStep
from maskfx.distributed.division.partition import Partition
from maskfx.distributed.messages import WriteRequest, WriteResult
from maskfx.distributed.rank_group import RankGroup, RankSet
from maskfx.runtime.lora.adapter import Updates
from maskfx.runtime.lora.in_place_costs import Elsewhere
from maskfx.runtime.step_executor import SharedAdapters
from tests.distributed import tiny
from tests.distributed.test_ranks import cache_error, error
from tests.factories.lora import difference_of, merged, update_of
from tests.factories.masks import MASKS
from tests.runtime.test_in_place import Always

BOUND = 1e-4
HALVES = (1.0, 1.0)


@pytest.fixture(scope="module")
def started() -> Iterator[RankGroup]:
    group = RankGroup(tiny.compiled(), 2)
    yield group
    group.stop()


@pytest.fixture
def group(started: RankGroup) -> Iterator[RankGroup]:
    started._choices.clear()
    started.denoiser.in_place.elsewhere.clear()
    before = [value.clone() for value in started.denoiser.module.parameters()]
    yield started
    assert all(map(torch.equal, started.denoiser.module.parameters(), before))
    assert started.computed_here == 0


def always(group: RankGroup, ranks: tuple[int, ...]) -> Elsewhere:
    """Have these ranks write the adapters of each step."""
    seen = group.in_place(ranks).seen
    seen.costs = Always()
    return seen


def steps_of(denoiser: CompiledDenoiser, own: Updates) -> tuple[list[Any], list[Any]]:
    """Return an edit, a recording and a dense member with these adapters, and their results."""
    call = tiny.inputs(1)
    cache = denoiser.step([RecordStep(call, own)])[0][1]
    mask = MASKS["stroke"]((8, 8), 1)
    steps: list[Any] = [
        EditStep(call, mask, cache, adapters=own),
        RecordStep(call, own),
        DenseStep(call, own),
    ]
    return steps, denoiser.step(steps)


def divided(group: RankGroup, members: int) -> RankSet:
    return group.on(2, Partition((HALVES,) * members))


def same(found: list[Any], wanted: list[Any]) -> bool:
    (edit, (output, cache), dense), (one, (other, kept), third) = found, wanted
    errors = [error(edit, one), error(output, other), cache_error(cache, kept), error(dense, third)]
    return max(errors) < BOUND


def test_results_of_several_ranks_and_of_one(group: RankGroup) -> None:
    denoiser, module = group.denoiser, group.denoiser.module
    sets = [(update_of(module, 4, 1),), (difference_of(module, 5), update_of(module, 8, 2))]
    plain: list[Any] = [DenseStep(tiny.inputs(1))]
    before = [divided(group, 1).run(denoiser, plain)[0], group.on((1,)).run(denoiser, plain)[0]]
    seen = always(group, (0, 1)), always(group, (1,))
    for own in (*sets, sets[0]):
        steps, wanted = steps_of(denoiser, own)
        assert error(wanted[2], merged(module, own)(**steps[2].inputs)) < BOUND
        shared = SharedAdapters(own, 192, 10)
        for _ in range(2):
            assert same(divided(group, 3).run(denoiser, steps, shared), wanted)
            assert same(group.on((1,)).run(denoiser, steps, shared), wanted)
            assert seen[0].written
            assert seen[1].written
    assert [one.costs.steps_in_place for one in seen] == [6, 6]
    assert [one.costs.written for one in seen] == [3, 3]
    after = [divided(group, 1).run(denoiser, plain)[0], group.on((1,)).run(denoiser, plain)[0]]
    assert all(map(torch.equal, before, after)), "the weights have their bits again"
    assert not any(one.written for one in seen)
    assert not group.failures
    assert "In the ranks 0, 1: Adapters that all members" in denoiser.in_place.describe()


def test_measured_costs_decide(group: RankGroup) -> None:
    """Two steps with low-rank terms, two with adapters in the weights, then what took less time."""
    denoiser = group.denoiser
    own = (update_of(denoiser.module, 4, 1),)
    steps, wanted = steps_of(denoiser, own)
    seen, written = group.in_place((0, 1)).seen, []
    for left in range(8, 0, -1):
        shared = SharedAdapters(own, 192, left)
        assert same(divided(group, 3).run(denoiser, steps, shared), wanted)
        written.append(seen.written)
    assert written[:4] == [False, False, True, True]
    assert seen.costs.write_seconds(1000) > 0


def test_if_a_rank_cannot_write_no_rank_has(
    group: RankGroup, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    denoiser = group.denoiser
    own = (update_of(denoiser.module, 4, 1),)
    steps, wanted = steps_of(denoiser, own)
    divided(group, 3).run(denoiser, steps)
    seen, ranks = always(group, (0, 1)), group.pool.ranks
    assert ranks is not None
    ask, asked = ranks.ask, list[Any]()

    def refusing(requests: Any) -> Any:
        found = ask(requests)
        if isinstance(requests.get(1), WriteRequest):
            asked.append(requests)
            found[1] = WriteResult("no memory is left")
        return found

    with monkeypatch.context() as patch:
        patch.setattr(ranks, "ask", refusing)
        for left in (10, 9):
            found = divided(group, 3).run(denoiser, steps, SharedAdapters(own, 192, left))
            assert same(found, wanted)
    assert len(asked) == 1, "later steps with these adapters don't try again"
    assert "no memory is left" in seen.refused
    assert not seen.written
    assert not seen.costs.steps_in_place
    assert "rank 1: no memory is left" in caplog.text
    assert not any(process.written for process in ranks.all)


def test_a_rank_in_place_of_a_failed_one_writes_them_too(group: RankGroup) -> None:
    denoiser = group.denoiser
    own = (update_of(denoiser.module, 4, 1),)
    steps, wanted = steps_of(denoiser, own)
    seen, shared = always(group, (0, 1)), SharedAdapters(own, 192, 10)
    assert same(divided(group, 3).run(denoiser, steps, shared), wanted)
    assert group.pool.ranks is not None
    group.pool.ranks.all[1].child.kill()
    for _ in range(3):
        assert same(divided(group, 3).run(denoiser, steps, shared), wanted)
        assert seen.written
    assert group.failures


def test_weights_beyond_the_limit_are_not_copied(
    group: RankGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("maskfx.runtime.in_place.PRIVATE_BYTES", 1000)
    denoiser = group.denoiser
    own = (update_of(denoiser.module, 4, 1),)
    steps, wanted = steps_of(denoiser, own)
    seen = always(group, (0, 1))
    found = divided(group, 3).run(denoiser, steps, SharedAdapters(own, 192, 10))
    assert same(found, wanted)
    assert not seen.written
    assert "the limit is 1000" in denoiser.in_place.describe()
