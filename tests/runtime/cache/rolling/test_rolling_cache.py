"""Rolling caches: a step reads the request's own last step, and replaces what it computes."""

from __future__ import annotations

import dataclasses
import gc
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import maskfx
from maskfx.errors import CacheError
from maskfx.ir.geometry.lanes import is_image
from maskfx.ir.programs.program import Program
from maskfx.ir.programs.sources import Loaded, Rest, RestSum
from maskfx.ops.kernels.serves import SWITCH
from maskfx.runtime.batch.rows import tap_parts
from maskfx.runtime.cache.rolling.free_ranges import FreeRanges
from maskfx.runtime.cache.rolling.rolling_cache import RollingCache, write_rows
from maskfx.runtime.cache.rolling.rolling_pool import RollingPool
from maskfx.runtime.cache.step_cache import StepCache, keep_rows
from maskfx.runtime.execution import executor, step_results
from tests.factories import masks
from tests.factories.pools import poison
from tests.factories.zoo import ZOO, slow_unet
from tests.passes.test_cut_stretches import Layers, layer_inputs
from tests.passes.tools import error
from tests.runtime.test_changed_inputs import other_inputs
from tests.runtime.test_oracle import assert_near, module_of, tensors
from tests.runtime.test_stretches import NAMES, anywhere, denoiser_of

BYTES = 1 << 30
OTHERS = ["SanaTransformer2DModel", "PixArtTransformer2DModel", "UNet2DConditionModel-residuals"]
FAMILIES = [*NAMES, *(pytest.param(n, marks=pytest.mark.slow) for n in OTHERS)]


def program_of(denoiser: maskfx.CompiledDenoiser, kept: StepCache) -> Program:
    return denoiser.programs[kept.program]


class Mixed:
    """What every rolling cache should hold, from full values of each tap: the slow twin."""

    def __init__(self, program: Program) -> None:
        self.taps = list(program.interface.taps.values())
        self.parts: dict[int, list[list[Tensor]]] = {}
        self.recorded: list[list[list[Tensor]]] = []

    def keep(self, cache: StepCache, taps: Any, parts: Sequence[list[Tensor]]) -> None:
        """Stands for `keep_rows`."""
        self.recorded.append([[part.clone() for part in tap] for tap in parts])
        keep_rows(cache, taps, parts)

    def write(
        self, layout: Any, caches: Mapping[int, RollingCache], emitted: Sequence[Tensor]
    ) -> None:
        """Stands for `write_rows`."""
        for number, cache in caches.items():
            for tap, rows, kept in zip(self.taps, emitted, self.parts[id(cache)], strict=True):
                images = filter(is_image, tap.segments)
                found = tap_parts(tap, rows, layout, number)
                for segment, new, full in zip(images, found, kept, strict=True):
                    full[:, layout.sites[number].active(segment)] = new
        write_rows(layout, caches, emitted)

    def cache(self, rolling: RollingCache) -> StepCache:
        """A full recording of the mixed values."""
        whole = dataclasses.replace(rolling.copy(), rows={}, stats={})
        keep_rows(whole, self.taps, self.parts[id(rolling)])
        return whole


def moments(cache: StepCache, key: Any) -> Tensor:
    """Mean and spread of each group over all sites, without the centre."""
    stats, groups = cache.stats[key], key[1]
    sites = stats.values.shape[1]  # type: ignore[union-attr]
    mean, spread = stats.total.view(len(stats.total), 2, -1, groups).unbind(1)
    mean = mean / sites
    spread = spread - stats.size * sites * mean.square()
    return torch.stack([stats.centre + mean, spread / (stats.size * sites)])


def assert_holds(cache: RollingCache, wanted: StepCache) -> None:
    """The rows to the bit, statistics and sums to rounding."""
    assert cache.rows.keys() == wanted.rows.keys()
    for tap, rows in cache.rows.items():
        assert torch.equal(rows, wanted.rows[tap]), tap  # type: ignore[arg-type]
    assert cache.stats.keys() == wanted.stats.keys()
    for key in cache.stats:
        assert error(moments(cache, key), moments(wanted, key)) < 1e-5
        assert error(cache.stats[key].total, whole_total(cache, key)) < 1e-9
    for tap in cache.sums:
        assert error(cache.sums[tap], wanted.total_of(tap)) < 1e-9


def whole_total(cache: StepCache, key: Any) -> Tensor:
    values = cache.stats[key].values
    assert isinstance(values, Tensor)
    return values.sum(1, dtype=torch.float64)


@pytest.fixture
def mixed(monkeypatch: pytest.MonkeyPatch) -> type[Mixed]:
    """Patches the executor for a twin that the test makes."""

    class Patched(Mixed):
        def __init__(self, program: Program) -> None:
            super().__init__(program)
            monkeypatch.setattr(step_results, "keep_rows", self.keep)
            monkeypatch.setattr(executor, "write_rows", self.write)

    return Patched


# What it means.


@pytest.mark.parametrize("name", FAMILIES)
def test_a_written_cache_is_a_recording_of_the_mixed_values(name: str, mixed: type[Mixed]) -> None:
    """Three requests of different sizes over four steps; others that record or not share them."""
    case, denoiser, pool = ZOO[name], denoiser_of(name), RollingPool(BYTES)
    sizes = [case.sizes[i % len(case.sizes)] for i in range(3)]
    denoiser.record(**case.inputs(sizes[0], 0))
    [program] = denoiser.programs.values()
    twin, caches = mixed(program), []
    for seed, size in enumerate(sizes):
        kept = denoiser.record(**case.inputs(size, seed))[1]
        caches.append(pool.start(program, kept))
        twin.parts[id(caches[-1])] = twin.recorded.pop()
    guest = denoiser.record(**case.inputs(sizes[0], 9))[1]
    for cache in caches:
        for source in program.interface.inputs.values():
            if isinstance(source, RestSum):
                cache.total_of(source.tap)
    count = len(denoiser.stretches)
    for step in range(4):
        asked, wanted = [], []
        for seed, (size, cache) in enumerate(zip(sizes, caches, strict=True)):
            mask = masks.random(case.mask_shape(size), 7 * step + seed, 0.4)
            wide = anywhere(count, mask, 11 * step + seed)
            if step == 2 and seed == 0:  # all sites: nothing is read
                mask, wide = mask | True, {n: mask | True for n in range(1, count + 1)}
            inputs = other_inputs(name, size, 20 + 10 * step + seed, seed)
            asked.append(maskfx.EditStep(inputs, mask, cache, wide=wide, record=True))
            plain = twin.cache(cache)
            wanted.append(maskfx.EditStep(inputs, mask, plain, any_step=True, wide=wide))
        expected = denoiser.edit(wanted)
        others: list[Any] = []
        if step % 2:
            others = [
                maskfx.EditStep(case.inputs(sizes[0], 9), asked[0].mask, guest),
                maskfx.DenseStep(case.inputs(sizes[0], 5)),
            ]
        found = denoiser.step([others[0], *asked, *others[1:]] if others else asked)
        for cache, one, other in zip(caches, found[bool(others) :], expected, strict=False):
            assert_near(one, other)
            for kept, new in zip(cache.output, tensors(one), strict=True):
                assert torch.equal(kept, new)
        for cache in caches:
            assert_holds(cache, twin.cache(cache))


@pytest.mark.parametrize("name", FAMILIES)
def test_steps_of_equal_inputs_repeat_the_dense_run(name: str) -> None:
    case, denoiser, pool = ZOO[name], denoiser_of(name), RollingPool(BYTES)
    size = case.sizes[0]
    inputs = [case.inputs(size, seed) for seed in range(2)]
    caches = []
    for own in inputs:
        kept = denoiser.record(**own)[1]
        caches.append(pool.start(program_of(denoiser, kept), kept))
    for step in range(3):
        asked = []
        for seed, (own, cache) in enumerate(zip(inputs, caches, strict=True)):
            mask = masks.random(case.mask_shape(size), 5 * step + seed, 0.3)
            wide = anywhere(len(denoiser.stretches), mask, 3 * step + seed)
            asked.append(maskfx.EditStep(own, mask, cache, wide=wide, record=True))
        for own, output in zip(inputs, denoiser.edit(asked), strict=True):
            assert_near(output, module_of(name)(**own))


def test_a_step_without_masked_sites_still_writes_its_stretches() -> None:
    denoiser, pool = maskfx.compile(Layers(3), stretches=True), RollingPool(BYTES)
    output, kept = denoiser.record(**layer_inputs())
    cache = pool.start(program_of(denoiser, kept), kept)
    inputs = {**layer_inputs(), "hidden_states": layer_inputs(5)["hidden_states"]}
    nothing = torch.zeros(20, dtype=torch.bool)
    step = maskfx.EditStep(inputs, nothing, cache, record=True)
    assert torch.equal(denoiser.edit([step])[0], output)
    assert pool.written == 0
    [found] = denoiser.edit([dataclasses.replace(step, wide={1: ~nothing})])
    assert torch.equal(found, output)
    assert pool.written > 0


# What it copies and holds.


class Copies(TorchDispatchMode):
    """Counts operators, and the bytes of rows that they copy."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()
        self.nbytes: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = func.__name__.split(".")[0]
        written = {"index_copy_": 3, "put_all": 2}.get(name)
        copied = out if written is None else args[written]
        rows = copied if isinstance(copied, list) else [copied]
        if all(isinstance(own, Tensor) and own.is_floating_point() for own in rows):
            self.calls[name] += 1
            self.nbytes[name] += sum(own.nbytes for own in rows)
        return out


@pytest.mark.parametrize("name", slow_unet(NAMES))
def test_a_batch_writes_all_taps_together_and_only_what_it_computed(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(SWITCH, "0")  # operators can be counted, C functions can't
    case, denoiser, pool = ZOO[name], denoiser_of(name), RollingPool(BYTES)
    copies, counted = Copies(), [0]

    def write(layout: Any, caches: Any, emitted: Sequence[Tensor]) -> None:
        counted[0] = sum(
            part.nbytes
            for tap, rows in zip(program.interface.taps.values(), emitted, strict=True)
            if not tap.stats
            for number in range(4)
            for part in tap_parts(tap, rows, layout, number)
        )
        with copies:
            write_rows(layout, caches, emitted)

    monkeypatch.setattr(executor, "write_rows", write)
    asked, size = [], case.sizes[0]
    for seed in range(4):
        kept = denoiser.record(**case.inputs(size, seed))[1]
        program = program_of(denoiser, kept)
        cache = pool.start(program, kept)
        mask = masks.random(case.mask_shape(size), seed, 0.1)
        wide = anywhere(len(denoiser.stretches), mask, seed)
        inputs = case.inputs(size, seed)
        asked.append(maskfx.EditStep(inputs, mask, cache, wide=wide, record=True))
    denoiser.edit(asked)
    stats = len({(t.segments, t.stats) for t in program.interface.taps.values() if t.stats})
    assert copies.calls["put_all"] == 1
    assert copies.calls["index_copy_"] == stats
    written = pool.written if not stats else None
    if written is not None:
        assert copies.nbytes["put_all"] == written == counted[0]
        assert set(copies.calls) <= {"put_all", "slice", "view", "_unsafe_view"}
    assert counted[0] < 0.8 * sum(sum(t.nbytes for t in s.cache.rows.values()) for s in asked)


def test_a_batch_reads_each_tap_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SWITCH, "0")
    denoiser, pool = maskfx.compile(Layers(3), stretches=True), RollingPool(BYTES)
    kept = [denoiser.record(**layer_inputs(seed, wide=seed % 2 == 1))[1] for seed in range(4)]
    program = program_of(denoiser, kept[0])
    steps = [
        maskfx.EditStep(
            layer_inputs(seed, wide=seed % 2 == 1),
            masks.random((own.sizes["tokens"],), seed),
            own,
        )
        for seed, own in enumerate(kept)
    ]
    rolling = [dataclasses.replace(s, cache=pool.start(program, s.cache)) for s in steps]
    calls = []
    for asked in (steps, rolling):
        [(_, frame, members)] = denoiser.batches(asked)
        fetch = frame.fetch(members)
        taps = [n for n, s in program.interface.inputs.items() if isinstance(s, Rest | Loaded)]
        with Copies() as copies:
            found = [fetch(name) for name in taps]
        calls.append((copies.calls["index_select"], copies.calls["cat"], found))
    (single, cats, wanted), (merged, joined, found) = calls
    read = sum(len(rows) > 0 for rows in wanted)
    assert (merged, joined) == (read, 0)
    assert (single, cats) == (sum(own.sizes["batch"] for own in kept) * read, read)
    for one, other in zip(found, wanted, strict=True):
        assert torch.equal(one, other)


def test_bytes_of_a_request_are_bounded_by_stretches_in_full() -> None:
    name = NAMES[0]
    case, denoiser = ZOO[name], denoiser_of(name)
    size = case.sizes[0]
    inputs, others = case.inputs(size, 0), other_inputs(name, size, 10, 0)
    kept = denoiser.record(**inputs)[1]
    program, count = program_of(denoiser, kept), len(denoiser.stretches)
    mask = masks.random(case.mask_shape(size), 3)
    narrow = {n: mask & False for n in range(1, count + 1)}
    full = RollingPool(BYTES).start(program, kept)
    total, seen = full.nbytes(), set()
    for share in (1.0, 0.7, 0.4, 0.2):
        limit = int(total * share)
        cache = RollingPool(BYTES).start(program, kept, limit)
        assert cache.nbytes() <= limit
        seen.add(len(cache.in_full))
        sources = [s for s in program.interface.inputs.values() if isinstance(s, Loaded)]
        region = program.interface.pyramid.region_in
        for source in sources:  # kept where the stretch before may lack rows
            assert (source.tap in cache.rows) == (region(source.before) not in cache.in_full)
        wide = narrow | {n: mask | True for n in cache.in_full}
        wanted = maskfx.EditStep(others, mask, kept, wide=wide)
        asked = maskfx.EditStep(others, mask, cache, wide=narrow, record=True)
        found, expected = denoiser.edit([asked, wanted])
        assert_near(found, expected)
        assert cache.nbytes() <= limit
    assert min(seen) == 0
    assert len(seen) >= 3
    with pytest.raises(CacheError, match=f"even if all of its {count} stretches compute all"):
        RollingPool(BYTES).start(program, kept, 100)


def test_requests_that_join_and_leave_leave_nothing_behind() -> None:
    """Freed rows become NaN; each step gives what an edit of the recording gives by itself."""
    denoiser = maskfx.compile(Layers(3), stretches=True)
    recordings = [denoiser.record(**layer_inputs(seed, wide=seed % 2 == 1))[1] for seed in range(4)]
    program = program_of(denoiser, recordings[0])
    unit = RollingPool(BYTES, 1).start(program, max(recordings, key=StepCache.nbytes)).nbytes()
    pool = RollingPool(12 * unit, requests=4)
    draw = torch.Generator().manual_seed(0)
    held: list[RollingCache] = []
    chosen_of: dict[int, int] = {}
    most = poisoned = 0
    for turn in range(60):
        if len(held) < 4:
            chosen = int(torch.randint(4, (1,), generator=draw))
            held.append(pool.start(program, recordings[chosen]))
            chosen_of[id(held[-1])] = chosen
            for tap, rows in recordings[chosen].rows.items():
                assert torch.equal(held[-1].rows[tap], rows)  # type: ignore[arg-type]
        # the inputs are those of the recording, so that rows stay as they are, up to rounding
        seeds = [chosen_of[id(cache)] for cache in held]
        asked = [layer_inputs(seed, wide=seed % 2 == 1) for seed in seeds]
        masks_ = [masks.random((cache.sizes["tokens"],), turn) for cache in held]
        steps = [
            maskfx.EditStep(inputs, mask, cache, record=True)
            for inputs, mask, cache in zip(asked, masks_, held, strict=True)
        ]
        for inputs, output in zip(asked, denoiser.edit(steps) if steps else (), strict=True):
            assert_near(output, denoiser.module(**inputs))
        del steps
        leaving = int(torch.randint(6, (1,), generator=draw))
        if leaving < len(held):
            cache = held.pop(leaving)
            if leaving % 2:
                cache.close()
            del cache
        poisoned += poison(pool)
        most = max(most, pool.nbytes())
    assert most <= pool.limit
    assert poisoned > 0

    def fill() -> None:
        while True:
            held.append(pool.start(program, recordings[1]))

    with pytest.raises(CacheError, match="doesn't fit"):
        fill()
    assert pool.nbytes() <= pool.limit
    held.clear()
    gc.collect()
    pool.nbytes()
    assert all(block.unused and not block.own for block in pool._all())


def test_rows_of_requests_that_ended_are_free_after_their_steps() -> None:
    denoiser, pool = maskfx.compile(Layers(3), stretches=True), RollingPool(BYTES)
    inputs, mask = layer_inputs(), torch.arange(20) < 3
    kept = denoiser.record(**inputs)[1]
    caches = [pool.start(program_of(denoiser, kept), kept) for _ in range(2)]
    for _ in range(2):
        denoiser.edit([maskfx.EditStep(inputs, mask, cache, record=True) for cache in caches])
    [block] = pool._all()
    assert not block.unused
    caches.clear()
    gc.collect()
    pool.nbytes()
    assert block.unused


def test_free_ranges_are_joined_again() -> None:
    free = FreeRanges([(0, 10)])
    starts = [free.take(3) for _ in range(4)]
    assert starts == [0, 3, 6, None]
    for start in (0, 6, 3):
        free.give(start, 3)
    assert free.ranges == [(0, 10)]


def test_a_copy_stays_as_it_is() -> None:
    denoiser, pool = maskfx.compile(Layers(2), stretches=True), RollingPool(BYTES)
    kept = denoiser.record(**layer_inputs())[1]
    cache = pool.start(program_of(denoiser, kept), kept)
    inputs = {**layer_inputs(), "hidden_states": layer_inputs(5)["hidden_states"]}
    mask = torch.arange(20) < 7
    before = cache.copy()
    assert type(before) is type(cache.of_elements([0])) is StepCache
    denoiser.edit([maskfx.EditStep(inputs, mask, cache, record=True)])
    changed = [tap for tap, rows in before.rows.items() if not torch.equal(rows, cache.rows[tap])]  # type: ignore[arg-type]
    assert changed
    assert all(torch.equal(rows, kept.rows[tap]) for tap, rows in before.rows.items())  # type: ignore[arg-type]


# What it refuses.


def test_refuses_caches_that_it_cannot_write() -> None:
    denoiser, pool = maskfx.compile(Layers(2), stretches=True), RollingPool(BYTES)
    inputs, mask = layer_inputs(), torch.arange(20) < 3
    kept = denoiser.record(**inputs)[1]
    program = program_of(denoiser, kept)
    cache = pool.start(program, kept)
    step = maskfx.EditStep(inputs, mask, cache, record=True)
    with pytest.raises(CacheError, match="which doesn't change"):
        denoiser.edit([dataclasses.replace(step, cache=kept)])
    with pytest.raises(CacheError, match="two members .* write one RollingCache; start one for"):
        denoiser.edit([step, dataclasses.replace(step, mask=~mask)])
    with pytest.raises(CacheError, match="another program .*; record it again"):
        pool.start(program, dataclasses.replace(kept, program="other"))
    cache.close()
    with pytest.raises(CacheError, match="was closed"):
        denoiser.edit([step])
