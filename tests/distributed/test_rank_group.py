"""RankGroup: ranks as processes, their number from step to step, and ranks that fail."""

from __future__ import annotations

import gc
import os
import signal
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import maskfx
from maskfx import CompiledDenoiser, DenseStep, EditStep, RecordStep
from maskfx.distributed import processes, rank_pool, sent_steps
from maskfx.distributed.division.partition import Partition
from maskfx.distributed.heartbeat import Waits
from maskfx.distributed.processes import RankProcesses
from maskfx.distributed.rank_group import RankGroup
from maskfx.errors import CacheError, InputError
from maskfx.ir.programs.head_sources import WAYS
from maskfx.runtime.cache import stored_steps
from maskfx.runtime.cache.rolling.rolling_pool import RollingPool
from maskfx.runtime.cache.serialize import LENGTH, encode
from maskfx.runtime.cache.step_cache import has_unread
from maskfx.runtime.cache.stored_steps import decode_parts
from maskfx.runtime.cache.stores.store import Store
from maskfx.runtime.steps import LateExchange, SplitRun
from tests.distributed import tiny
from tests.distributed.test_ranks import BOUND, cache_error, error, shares
from tests.factories.lora import update_of
from tests.factories.masks import MASKS
from tests.factories.step_caches import key
from tests.factories.thread_ranks import ThreadRanks
from tests.runtime.validation import test_sample_calls as ragged

EVEN = Partition(((1.0, 1.0),) * 2)


@pytest.fixture(scope="module")
def denoiser() -> CompiledDenoiser:
    return tiny.compiled()


@pytest.fixture
def group(denoiser: CompiledDenoiser) -> Iterator[RankGroup]:
    made = RankGroup(denoiser, 2, waits=Waits(exchange=3.0))
    yield made
    made.stop()


def edit_and_dense(denoiser: CompiledDenoiser, seed: int = 1) -> list[EditStep | DenseStep]:
    cache = denoiser.record(**tiny.inputs(seed))[1]
    mask = MASKS["random"]((8, 8), seed)
    return [EditStep(tiny.inputs(seed + 1), mask, cache), DenseStep(tiny.inputs(seed + 2))]


def worst(got: list[Any], wanted: list[Any]) -> float:
    return max(error(a, b) for a, b in zip(got, wanted, strict=True))


def test_a_step_over_two_processes_and_after_one_was_killed(
    denoiser: CompiledDenoiser, group: RankGroup
) -> None:
    steps = edit_and_dense(denoiser)
    wanted = denoiser.step(steps)
    assert worst(denoiser.step(steps, group.on(2, EVEN)), wanted) < BOUND
    assert group.computed_here == group.failures == 0
    assert all(part is not None and part.sent > 0 for part in group.last)
    assert group.pool.ranks is not None
    os.kill(group.pool.ranks.all[1].child.pid, signal.SIGKILL)
    assert worst(denoiser.step(steps, group.on(2, EVEN)), wanted) < BOUND
    assert (group.failures, group.computed_here) == (1, 0)


@pytest.mark.slow
def test_ranks_map_a_recording_that_is_copied_once(
    denoiser: CompiledDenoiser, group: RankGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each process gets the places of the rows; a new one, too, and nothing is left of others."""
    monkeypatch.setattr(sent_steps, "MAPPED", 0)
    edit, _ = edit_and_dense(denoiser)
    sent: list[object] = []
    asked = RankProcesses.ask

    def ask(self: Any, requests: Any) -> Any:
        sent.extend(request.steps[0].cache.contents for request in requests.values())
        return asked(self, requests)

    monkeypatch.setattr(RankProcesses, "ask", ask)
    (wanted,), split = denoiser.step([edit]), group.on(2, Partition(((1.0, 1.0),)))
    for attention in (None, "heads"):
        way = group.on(2, Partition(((1.0, 1.0),)), attention)
        assert error(denoiser.step([edit], way)[0], wanted) < BOUND
    assert len(group.pool.steps._files.items()) == 1
    del edit
    gc.collect()
    edit, _ = edit_and_dense(denoiser, 5)
    (wanted,) = denoiser.step([edit])
    assert error(denoiser.step([edit], split)[0], wanted) < BOUND
    assert len(group.pool.steps._files.items()) == 1
    assert group.pool.ranks is not None
    os.kill(group.pool.ranks.all[1].child.pid, signal.SIGKILL)
    assert error(denoiser.step([edit], split)[0], wanted) < BOUND
    assert sent == [None] * len(sent)
    assert (group.failures, group.computed_here) == (1, 0)


def test_ranks_exchange_with_gloo_where_rings_do_not_serve(
    denoiser: CompiledDenoiser, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes, "rings_serve", lambda ranks: False)
    group = RankGroup(denoiser, 2, waits=Waits(exchange=3.0))
    steps = edit_and_dense(denoiser)
    wanted = denoiser.step(steps)
    try:
        assert worst(denoiser.step(steps, group.on(2, EVEN)), wanted) < BOUND
        assert group.pool.ranks is not None
        assert group.pool.ranks.backend == "gloo"
        os.kill(group.pool.ranks.all[1].child.pid, signal.SIGKILL)
        assert worst(denoiser.step(steps, group.on(2, EVEN)), wanted) < BOUND
        assert (group.failures, group.computed_here) == (1, 0)
    finally:
        group.stop()


def test_late_rows_in_two_processes_and_after_one_was_killed(
    denoiser: CompiledDenoiser, group: RankGroup
) -> None:
    """The same as ranks that are threads; after the failure a step waits, and the next reads."""
    runs, split = [SplitRun(), SplitRun()], group.on(2)
    edit = next(s for s in edit_and_dense(denoiser, 50) if isinstance(s, EditStep))
    threads = ThreadRanks(denoiser.settings, Partition(((1.0, 1.0),)))

    def steps(number: int) -> list[EditStep]:
        inputs = tiny.inputs(50 + number)
        return [replace(edit, inputs=inputs, late=LateExchange(run, number)) for run in runs]

    for number in range(3):
        ours, theirs = steps(number)
        (got,) = denoiser.step([ours], split)
        assert error(got, denoiser.step([theirs], threads)[0]) < BOUND
    assert error(got, denoiser.step([theirs])[0]) > 10 * BOUND
    assert [run.reads for run in runs] == [2, 2]
    assert min(held(group)) > 0
    ranks = group.pool.ranks
    assert ranks is not None
    os.kill(ranks.all[1].child.pid, signal.SIGKILL)
    until, number = time.monotonic() + 120, 3
    while runs[0].reads == 2 and time.monotonic() < until:
        ours, theirs = steps(number)
        (got,) = denoiser.step([ours], split)
        if runs[0].reads == 2:
            assert error(got, denoiser.step([theirs])[0]) < BOUND
        number += 1
    assert (group.failures, group.computed_here) == (1, 0)
    assert runs[0].reads == 3
    runs[0].close()
    assert held(group) == [0, 0]


def held(group: RankGroup) -> list[int]:
    """Return the bytes of other ranks' rows that each rank holds."""
    assert group.pool.ranks is not None
    found = group.pool.ranks.end_runs({number: () for number in group.pool.ranks.alive})
    return [found[number] for number in sorted(found)]


def test_it_refuses_no_ranks(denoiser: CompiledDenoiser) -> None:
    with pytest.raises(InputError, match="count=0"):
        RankGroup(denoiser, 0)


@pytest.mark.slow
def test_the_number_of_ranks_changes_from_step_to_step(denoiser: CompiledDenoiser) -> None:
    group = RankGroup(denoiser, 4)
    steps = edit_and_dense(denoiser, 3)
    wanted = denoiser.step(steps)
    try:
        for ranks in (1, 2, 4, 3, (2, 0), (3, 1, 0), 1):
            count = ranks if isinstance(ranks, int) else len(ranks)
            split = group.on(ranks, Partition(((1.0,) * count,) * 2))
            assert worst(denoiser.step(steps, split), wanted) < BOUND
            assert len(group.last) == count
        # without shares, whole members go to ranks
        assert worst(denoiser.step(steps, group), wanted) < BOUND
        assert group.computed_here == group.failures == 0
    finally:
        group.stop()
    assert worst(denoiser.step(steps, group), wanted) < BOUND
    assert group.computed_here == 1


def test_without_room_for_weights_no_ranks_count(
    denoiser: CompiledDenoiser, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rank_pool, "can_be_sent", lambda *_, **__: False)
    group = RankGroup(denoiser, 2)
    assert group.pool.size == 1
    steps = edit_and_dense(denoiser, 3)
    assert worst(group.run(denoiser, steps), denoiser.step(steps)) < BOUND
    assert group.computed_here == 1


@pytest.mark.slow
def test_ranks_read_a_stored_recording_by_themselves(
    denoiser: CompiledDenoiser, group: RankGroup, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Until the entry is damaged: then the step fails as it does in one process."""
    monkeypatch.setattr(sent_steps, "MAPPED", 0)
    monkeypatch.setattr(stored_steps, "BEGINNING", LENGTH.size)  # no rows are read with the header
    edit, _ = edit_and_dense(denoiser)
    assert isinstance(edit, EditStep)
    (wanted,), store = denoiser.step([edit]), Store(tmp_path)
    assert store.put(key(), encode(edit.cache))
    for way in WAYS:
        split = group.on(2, Partition(((1.0, 1.0),)), way)
        parts = store.parts(key())
        assert parts is not None
        cache = decode_parts(parts)
        assert cache is not None
        assert error(denoiser.step([replace(edit, cache=cache)], split)[0], wanted) < BOUND
        assert has_unread(cache)  # here
    assert group.computed_here == group.failures == 0
    (path,) = tmp_path.glob("*.maskfx")
    parts = store.parts(key())
    assert parts is not None
    cache = decode_parts(parts)
    assert cache is not None
    data = bytearray(path.read_bytes())
    data[-len(data) // 3 :] = bytes(len(data[-len(data) // 3 :]))
    path.write_bytes(data)
    with pytest.raises(CacheError, match="record its template again"):
        denoiser.step([replace(edit, cache=cache)], split)


@pytest.mark.slow
def test_a_recording_over_ranks(denoiser: CompiledDenoiser, group: RankGroup) -> None:
    step = RecordStep(tiny.inputs(9))
    ((output, cache),) = denoiser.step([step])
    ((ours, own),) = denoiser.step([step], group.on(2, Partition(((2.0, 1.0),))))
    assert group.computed_here == 0
    assert error(ours, output) < BOUND
    assert cache_error(own, cache) < BOUND


@pytest.mark.slow
def test_a_rank_killed_inside_a_step(denoiser: CompiledDenoiser, group: RankGroup) -> None:
    """Larger inputs, so that the step takes a while; it may fail once, and its result is right."""
    inputs = tiny.inputs(1, 96, 96)
    steps = [DenseStep(inputs)]
    wanted = denoiser.step(steps)
    split = group.on(2, Partition(((1.0, 1.0),)))
    denoiser.step(steps, split)
    assert group.pool.ranks is not None
    pid = group.pool.ranks.all[1].child.pid
    killer = threading.Timer(0.05, os.kill, (pid, signal.SIGKILL))
    killer.start()
    for _ in range(8):
        assert worst(denoiser.step(steps, split), wanted) < BOUND
    killer.join()
    assert group.failures == 1


@pytest.mark.slow
def test_ranks_follow_changed_weights() -> None:
    denoiser = maskfx.compile(tiny.build())
    step = DenseStep(tiny.inputs(2))
    (first,) = denoiser.step([step])
    group = RankGroup(denoiser, 2)
    split = group.on(2, Partition(((1.0, 1.0),)))
    try:
        denoiser.step([step], split)
        denoiser.module.leave.weight.mul_(2.0)
        (wanted,) = denoiser.step([step])
        (got,) = denoiser.step([step], split)
        assert error(got, wanted) < BOUND < error(wanted, first)
        assert group.computed_here == 0
    finally:
        group.stop()


@pytest.mark.slow
def test_dropped_recordings_are_forgotten(denoiser: CompiledDenoiser, group: RankGroup) -> None:
    for seed in range(3):
        steps = edit_and_dense(denoiser, 10 * seed)
        denoiser.step(steps, group.on(2, EVEN))
        del steps
    steps = edit_and_dense(denoiser, 40)
    denoiser.step(steps, group.on(2, EVEN))
    assert group.pool.ranks is not None
    assert [len(process.known) for process in group.pool.ranks.all] == [1, 1]


@pytest.mark.slow
def test_disjoint_sets_of_ranks_step_at_the_same_time(denoiser: CompiledDenoiser) -> None:
    """Pairs and single ranks in threads; then one is killed, and all steps come back."""
    group = RankGroup(denoiser, 4, waits=Waits(exchange=5.0))
    steps = [edit_and_dense(denoiser, seed) for seed in range(4)]
    wanted = [denoiser.step(own) for own in steps]
    off = [0.0] * 4

    def run(number: int, *sets: tuple[int, ...]) -> None:
        for ranks in sets * 4:
            split = group.on(ranks, Partition(((1.0,) * len(ranks),) * 2))
            found = split.run(denoiser, steps[number])
            off[number] = max(off[number], worst(found, wanted[number]))

    def together(*plans: tuple[tuple[int, ...], ...]) -> None:
        threads = [threading.Thread(target=run, args=(n, *sets)) for n, sets in enumerate(plans)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(120)
        assert not any(thread.is_alive() for thread in threads)
        assert max(off) < BOUND

    try:
        together(((0, 1), (1,), (1, 0)), ((3, 2), (2, 3), (2,)))
        together(((0,),), ((1, 2), (2, 1)), ((3,),))
        assert group.failures == group.computed_here == 0
        assert group.pool.ranks is not None
        pid = group.pool.ranks.all[1].child.pid
        killer = threading.Timer(0.05, os.kill, (pid, signal.SIGKILL))
        killer.start()
        together(((0, 1), (1,)), ((3, 2), (2, 3)))
        killer.join()
        together(((0, 1),), ((2,),))  # the others
        assert group.failures >= 1
        assert group.computed_here == 0
    finally:
        group.stop()


@pytest.mark.slow
def test_a_rank_computes_whole_steps(denoiser: CompiledDenoiser, group: RankGroup) -> None:
    """Dense, edited and recorded; a step that fails on a rank fails as it does here."""
    steps: list[Any] = [*edit_and_dense(denoiser, 7), RecordStep(tiny.inputs(9))]
    wanted = denoiser.step(steps)
    found = group.on((1,)).run(denoiser, steps)
    assert worst(found[:2], wanted[:2]) < BOUND
    assert error(found[2][0], wanted[2][0]) < BOUND
    assert cache_error(found[2][1], wanted[2][1]) < BOUND
    assert group.computed_here == 0
    edit = EditStep(steps[0].inputs, steps[0].mask, found[2][1], any_step=True)
    assert error(group.on((0,)).run(denoiser, [edit])[0], denoiser.step([edit])[0]) < BOUND
    with pytest.raises(TypeError):
        group.on((0,)).run(denoiser, [DenseStep({"sample": "none"})])
    assert group.computed_here == 1
    assert worst(group.on(2, EVEN).run(denoiser, steps[:2]), wanted[:2]) < BOUND


@pytest.mark.slow
def test_samples_of_a_call_that_run_one_by_one() -> None:
    """Edited, recorded and dense, with adapters, and by rows of the request's own last step."""
    denoiser, calls = ragged.denoiser(), [ragged.make([7, 4], 9, seed) for seed in range(3)]
    own = (update_of(denoiser.module, 4, 1),)
    cache = denoiser.record(**calls[0])[1]
    steps: list[Any] = [
        EditStep(calls[1], ragged.a_mask(), cache, any_step=True),
        DenseStep(calls[0], own),
        RecordStep(calls[2]),
    ]
    rolling = [RollingPool(1 << 24).start(denoiser.programs[cache.program], cache) for _ in "12"]
    wanted = denoiser.step(steps)
    group = RankGroup(denoiser, 2)
    try:
        got = denoiser.step(steps, group.on(2, shares("unequal", 2, 6)))
        assert worst(got[:2], wanted[:2]) < BOUND
        assert cache_error(got[2][1], wanted[2][1]) < BOUND
        for call in calls[1:]:
            one, other = (
                EditStep(call, ragged.a_mask(), kept, any_step=True, record=True)
                for kept in rolling
            )
            expected = denoiser.step([one])
            assert worst(denoiser.step([other], group.on(2)), expected) < BOUND
        assert group.computed_here == group.failures == 0
    finally:
        group.stop()
