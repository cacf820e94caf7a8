"""Ranks read the rows of a request's next step from a store while they compute this one."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from maskfx import CompiledDenoiser, EditStep
from maskfx.distributed import sent_steps
from maskfx.distributed.division.partition import Partition
from maskfx.distributed.rank_group import RankGroup
from maskfx.distributed.samples import StepSamples
from maskfx.runtime.cache import stored_steps
from maskfx.runtime.cache.serialize import LENGTH, encode
from maskfx.runtime.cache.step_cache import StepCache, has_unread
from maskfx.runtime.cache.stored_steps import decode_parts
from maskfx.runtime.cache.stores.filesystem import Disk
from maskfx.runtime.cache.stores.store import Store
from tests.distributed import tiny
from tests.distributed.test_ranks import BOUND, error
from tests.factories.masks import MASKS
from tests.factories.step_caches import key

HALVES = Partition(((1.0, 1.0),))


@dataclass(frozen=True)
class LoggedDisk(Disk):
    """Writes down which files are read, by any process."""

    log: Path

    def read_at(self, file: int, into: memoryview, offset: int) -> int:
        with self.log.open("a") as log:
            log.write(os.readlink(f"/proc/self/fd/{file}") + "\n")
        return super().read_at(file, into, offset)

    def reads(self, path: Path) -> int:
        return self.log.read_text().splitlines().count(str(path)) if self.log.exists() else 0

    def rest(self, path: Path) -> None:
        """Wait until a file was read, and isn't any more."""
        before, until = 0, time.monotonic() + 30
        while before == 0 or self.reads(path) != before:
            assert time.monotonic() < until, "it isn't read"
            before = self.reads(path)
            time.sleep(0.5)


@pytest.fixture(scope="module")
def denoiser() -> CompiledDenoiser:
    return tiny.compiled()


@pytest.fixture(scope="module")
def group(denoiser: CompiledDenoiser) -> Iterator[RankGroup]:
    made = RankGroup(denoiser, 2)
    yield made
    made.stop()


def opened(store: Store, number: int, cache: StepCache) -> tuple[StepCache, Path]:
    """The step with its rows in the store, and its file."""
    assert store.put(replace(key(), step=number), encode(cache))
    parts = store.parts(replace(key(), step=number))
    assert parts is not None
    found = decode_parts(parts)
    assert found is not None
    assert has_unread(found)
    (path,) = store.root.glob("*.maskfx")
    return found, path


@pytest.mark.slow
@pytest.mark.parametrize("way", ["whole", "gathered", "keys by rank", "heads"])
def test_the_next_step_reads_nothing(
    way: str,
    denoiser: CompiledDenoiser,
    group: RankGroup,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """Its file is removed before it runs: its rows are in the ranks' memory."""
    monkeypatch.setattr(sent_steps, "MAPPED", 0)
    monkeypatch.setattr(stored_steps, "BEGINNING", LENGTH.size)  # no rows are read with the header
    mask, edits, paths = MASKS["random"]((8, 8), 1), [], []
    disk = LoggedDisk(tmp_path / "log")
    for number in range(2):
        recording = denoiser.record(**tiny.inputs(number))[1]
        (tmp_path / str(number)).mkdir()
        store = Store(tmp_path / str(number), disk)
        cache, path = opened(store, number, recording)
        edits.append((EditStep(tiny.inputs(number + 5), mask, cache, any_step=True), recording))
        paths.append(path)
    wanted = [denoiser.step([replace(edit, cache=own)])[0] for edit, own in edits]
    (first, _), (second, _) = edits

    def run(step: EditStep) -> object:
        if way == "whole":
            return group.on((0,)).run(denoiser, [step])[0]
        return denoiser.step([step], group.on(2, HALVES, way))[0]  # type: ignore[arg-type]

    before = disk.reads(paths[1])
    assert error(run(replace(first, then=second.cache)), wanted[0]) < BOUND
    disk.rest(paths[1])
    assert disk.reads(paths[1]) > before, "ranks read it"
    paths[1].unlink()
    assert error(run(second), wanted[1]) < BOUND
    assert group.computed_here == group.failures == 0


def test_samples_read_their_parts_of_the_next_recording(denoiser: CompiledDenoiser) -> None:
    inputs, mask = tiny.inputs(1, batch=2), MASKS["random"]((8, 8), 1)
    now, then = (denoiser.record(**tiny.inputs(seed, batch=2))[1] for seed in (1, 2))
    samples = StepSamples(denoiser).of(EditStep(inputs, mask, now, any_step=True, then=then))
    assert len(samples) == 2
    for number, sample in enumerate(samples):
        assert isinstance(sample, EditStep)
        assert sample.then is not None
        wanted = then.of_elements([number])
        assert error(sample.then.output[0], wanted.output[0]) == 0
