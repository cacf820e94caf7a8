"""The loader: in order, ahead, within its buffer, at its bandwidth; and edits that read from it."""

import copy
import threading
import time
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor

import maskfx
from maskfx.errors import CacheError, InputError
from maskfx.runtime.batch.rows import index_rows, take_rows
from maskfx.runtime.cache.loader import Loader, LoadJob
from maskfx.runtime.execution.prefetch import AHEAD
from tests.factories import masks
from tests.factories.planned import compiled, loader_of
from tests.factories.zoo import ZOO, slow_unet
from tests.passes.tools import error
from tests.runtime.planner.test_plans import members, plans_of

CASES = ("UNet2DConditionModel-sd15", "FluxTransformer2DModel")


def job(name: str, value: Tensor, note: Callable[[str], None] = lambda name: None) -> LoadJob:
    def pick() -> Tensor:
        note(name)
        return value.clone()

    return LoadJob(name, value.nbytes, pick)


def until(true: Callable[[], bool]) -> None:
    """Wait for another thread; fails after a while."""
    end = time.monotonic() + 5
    while not true():
        assert time.monotonic() < end, "it never came true"
        time.sleep(0.001)


def test_gives_what_was_picked_in_the_order_it_was_asked_for() -> None:
    loader, seen = Loader(), list[str]()
    values = {str(i): torch.full((4,), float(i)) for i in range(5)}
    first = loader.begin([job(n, v, seen.append) for n, v in values.items()])
    second = loader.begin([job("0", torch.zeros(4), seen.append)])
    assert torch.equal(second.take("0"), torch.zeros(4))
    for name in ("0", "3", "1"):
        assert torch.equal(first.take(name), values[name])
    assert seen == ["0", "1", "2", "3", "4", "0"]
    assert "3" not in first
    assert "4" in first
    loader.close()


def test_reads_of_stores_go_on_while_rows_are_picked() -> None:
    """Of the next steps' loads too, and no further than a few of them."""
    loader, fetched, value = Loader(), list[str](), torch.ones(1)
    queued, wait = threading.Event(), threading.Event()

    def after(event: threading.Event) -> Callable[[], Tensor]:
        return lambda: value.clone() if event.wait(5) else torch.zeros(1)

    def stored(name: str, pick: Callable[[], Tensor] = value.clone) -> LoadJob:
        return LoadJob(name, value.nbytes, pick, (partial(fetched.append, name),))

    first = loader.begin(
        [LoadJob("0", value.nbytes, after(queued)), stored("1", after(wait)), stored("2")]
    )
    second = loader.begin([stored(name) for name in "3456"])
    queued.set()
    until(lambda: fetched == ["1", "2", "3"])
    time.sleep(0.02)
    assert fetched == ["1", "2", "3"]
    wait.set()
    for loading, names in ((first, "012"), (second, "3456")):
        for name in names:
            assert torch.equal(loading.take(name), value)
    until(lambda: fetched == list("123456"))
    loader.close()


def test_without_overlap_nothing_is_read_ahead() -> None:
    loader, fetched = Loader(overlap=False), list[str]()
    jobs = [
        LoadJob(name, 4, lambda: torch.ones(1), (partial(fetched.append, name),)) for name in "01"
    ]
    loading = loader.begin(jobs)
    assert torch.equal(loading.take("0"), torch.ones(1))
    time.sleep(0.02)
    assert not fetched
    loader.close()


def test_runs_ahead_as_far_as_the_buffer_allows() -> None:
    value = torch.zeros(256)
    loader, seen = Loader(staging_bytes=3 * value.nbytes), list[str]()
    loading = loader.begin([job(str(i), value, seen.append) for i in range(8)])
    until(lambda: len(seen) == 3)
    time.sleep(0.02)
    assert len(seen) == 3
    assert loader.staged == 3 * value.nbytes
    held = [loading.take("0"), loading.take("1")]
    time.sleep(0.02)
    assert len(seen) == 3, "taken isn't let go"
    del held
    until(lambda: len(seen) == 5)
    loading.cancel()
    until(lambda: loader.staged == 0)
    assert loader.overruns == 0
    loader.close()


def test_serves_a_reader_that_waits_however_small_the_buffer() -> None:
    value = torch.arange(256.0)
    loader = Loader(staging_bytes=value.nbytes)
    loading = loader.begin([job(str(i), value + i) for i in range(4)])
    held = [loading.take(str(i)) for i in range(4)]  # all at once: four times the buffer
    assert all(torch.equal(rows, value + i) for i, rows in enumerate(held))
    assert loader.overruns == 3
    loader.close()


@pytest.mark.timeout(30)
def test_waits_for_more_than_the_buffer_holds() -> None:
    value = torch.arange(256.0)
    loader = Loader(staging_bytes=2 * value.nbytes)
    loading = loader.begin([job(str(i), value + i) for i in range(5)])
    loading.wait()
    assert loader.staged == 5 * value.nbytes
    assert loader.overruns == 3
    assert torch.equal(loading.take("4"), value + 4)
    loader.close()


@pytest.mark.timeout(30)
def test_serves_who_waits_behind_what_nobody_reads() -> None:
    value = torch.arange(256.0)
    loader = Loader(staging_bytes=2 * value.nbytes)
    unread = loader.begin([job(str(i), value) for i in range(4)])
    behind = loader.begin([job("0", value + 1)])
    assert torch.equal(behind.take("0"), value + 1)
    assert torch.equal(unread.take("3"), value)
    loader.close()


@pytest.mark.timeout(30)
def test_who_waits_for_what_was_given_up_moves_nothing() -> None:
    value = torch.arange(256.0)
    loader, seen = Loader(staging_bytes=2 * value.nbytes), list[str]()
    unread = loader.begin([job(str(i), value, seen.append) for i in range(4)])
    until(lambda: len(seen) == 2)
    behind = loader.begin([job("0", value)])
    behind.cancel()
    behind.wait()
    time.sleep(0.02)
    assert len(seen) == 2
    assert loader.overruns == 0
    assert torch.equal(unread.take("0"), value)
    loader.close()


def test_takes_as_long_as_its_bandwidth_says() -> None:
    now, slept = [0.0], list[float]()

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        now[0] += seconds

    loader = Loader(bandwidth=1000.0, clock=lambda: now[0], sleep=sleep)
    loading = loader.begin([job(str(i), torch.zeros(250)) for i in range(4)])
    loading.wait()
    assert slept == [1.0] * 4
    assert loader.loaded_bytes == 4000
    now[0] += 5  # a link that stood idle owes nothing
    loader.begin([job("later", torch.zeros(250))]).wait()
    assert slept == [1.0] * 5
    loader.close()


def test_a_failed_load_fails_its_reader_only() -> None:
    def fail() -> Tensor:
        raise MemoryError("no room")

    loader = Loader()
    loading = loader.begin([LoadJob("bad", 8, fail), job("good", torch.ones(2))])
    assert torch.equal(loading.take("good"), torch.ones(2))
    with pytest.raises(MemoryError, match="no room"):
        loading.take("bad")
    until(lambda: loader.staged == 0)
    loader.close()


def test_closing_fails_those_who_wait() -> None:
    stop = threading.Event()

    def slow() -> Tensor:
        stop.wait()
        return torch.ones(1)

    loader = Loader()
    loading = loader.begin([LoadJob("slow", 4, slow), job("never", torch.ones(1))])
    closer = threading.Thread(target=loader.close)
    closer.start()
    until(lambda: loader._closed)
    stop.set()
    closer.join()
    with pytest.raises(Exception, match="closed"):
        loading.take("never")
    with pytest.raises(InputError, match="make another one"):
        loader.begin([])


@pytest.mark.parametrize("values", [{"bandwidth": 0}, {"bandwidth": -1}, {"staging_bytes": -1}])
def test_refuses_what_it_cannot_be(values: dict[str, float]) -> None:
    with pytest.raises(InputError, match=r"give bytes( per second, above 0|, 0 or more)"):
        Loader(**values)  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int8])
def test_rows_picked_on_one_thread_are_the_same(dtype: torch.dtype) -> None:
    rows = torch.randn(40, 3, 8).to(dtype)
    for index in (torch.tensor([3, 3, 39, 0]), torch.tensor([], dtype=torch.long)):
        assert torch.equal(take_rows(rows, index), index_rows(rows, index))
    turned = rows.transpose(0, 1)
    assert torch.equal(take_rows(turned, torch.tensor([1])), index_rows(turned, torch.tensor([1])))


def test_without_overlap_it_loads_what_is_asked_for() -> None:
    value = torch.arange(8.0)
    loader, seen = Loader(overlap=False), list[str]()
    loading = loader.begin([job(str(i), value + i, seen.append) for i in range(4)])
    time.sleep(0.02)
    assert not seen
    assert torch.equal(loading.take("1"), value + 1)
    time.sleep(0.02)
    assert seen == ["0", "1"]
    assert loading.pending() == {"2": value.nbytes, "3": value.nbytes}
    loading.cancel()
    behind = loader.begin([job("0", value)])
    assert torch.equal(behind.take("0"), value), "what is given up blocks nothing"
    loader.close()


def test_its_buffer_is_a_quarter_of_the_free_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("maskfx.runtime.cache.loader.free_memory", lambda device: 4096.0)
    value = torch.zeros(128)  # half of the buffer
    loader, seen = Loader(), list[str]()
    loading = loader.begin([job(str(i), value, seen.append) for i in range(4)])
    until(lambda: len(seen) == 2)
    time.sleep(0.02)
    assert len(seen) == 2
    assert loader.room(torch.device("cpu")) == 1024
    assert Loader(staging_bytes=7).room(torch.device("cpu")) == 7
    loading.cancel()
    loader.close()


def test_a_link_is_what_a_cpu_lacks() -> None:
    cpu, cuda = torch.device("cpu"), torch.device("cuda:0")
    assert not Loader().has_link(cpu)
    assert Loader().has_link(cuda)
    assert Loader(bandwidth=1e9).has_link(cpu)


# Edits.


@pytest.mark.parametrize("plans", [False, True])
@pytest.mark.parametrize("name", slow_unet(CASES))
def test_edits_read_what_was_loaded(name: str, plans: bool) -> None:
    case, plain = compiled(name, plans)
    loaded, loader = compiled(name, plans, loading=True)[1], loader_of(name, plans)
    wanted = plain.edit(members(case, plain, changed=True, planned=plans))
    steps = members(case, loaded, changed=True, planned=plans)
    before = loader.loaded_bytes
    found = loaded.edit(steps)
    assert error(found, wanted) < 1e-6
    once = loader.loaded_bytes - before
    assert once > 0
    assert loaded.ahead(steps)
    assert error(loaded.edit(steps), wanted) < 1e-6
    assert loader.loaded_bytes - before == 2 * once, "loaded ahead is loaded once"
    del found
    until(lambda: loader.staged == 0)


def test_what_is_loaded_ahead_for_another_step_is_given_up() -> None:
    case, loader = ZOO["FluxTransformer2DModel"], Loader()
    denoiser = maskfx.compile(case.build(), plans=True, loader=loader)
    size = case.sizes[0]
    inputs = case.inputs(size, 0)
    _, cache = denoiser.record(**inputs)
    one, other = (masks.random(case.mask_shape(size), seed) for seed in (0, 1))
    wanted = denoiser.edit([maskfx.EditStep(inputs, one, cache)])
    [loading] = denoiser.ahead([maskfx.EditStep(inputs, other, cache)])
    found = denoiser.edit([maskfx.EditStep(inputs, one, cache)])
    assert error(found, wanted) == 0
    denoiser.ahead([], only=True)
    assert loading.cancelled
    plan = plans_of(len(denoiser.regions), one, 0)
    [loading] = denoiser.ahead([maskfx.EditStep(inputs, one, cache, plan=plan)])
    assert error(denoiser.edit([maskfx.EditStep(inputs, one, cache)]), wanted) == 0
    assert not loading.cancelled, "another plan's loads are not this step's"
    [again] = denoiser.ahead([maskfx.EditStep(inputs, one, cache, plan=plan)])
    assert again is loading, "begun once"
    for _ in range(AHEAD):
        denoiser.ahead([maskfx.EditStep(inputs, one, copy.copy(cache))])
    assert loading.cancelled, "the oldest makes room"
    loader.close()


@pytest.mark.parametrize("name", slow_unet(CASES))
def test_loads_serve_a_step_that_others_join_and_leave(name: str) -> None:
    case, plain = compiled(name)
    denoiser, loader = compiled(name, loading=True)[1], loader_of(name, True)
    wanted = plain.edit(members(case, plain, changed=True, planned=True))
    steps = members(case, denoiser, changed=True, planned=True)
    assert len(steps) > 2
    before = loader.loaded_bytes
    denoiser.ahead(steps[:2])
    last = [steps[-1], *steps[1:-1]]  # the first one has left, the last one joins
    found = denoiser.edit(last)
    assert error(found, [wanted[-1], *wanted[1:-1]]) < 1e-6
    together = loader.loaded_bytes - before
    denoiser.ahead([], only=True)
    before = loader.loaded_bytes
    denoiser.edit(last)
    denoiser.edit(steps[:1])
    assert together <= loader.loaded_bytes - before, "what was loaded isn't loaded again"


def test_two_requests_that_read_the_same_rows_one_step_apart_load_them_each() -> None:
    """What the next step takes isn't there for the one after it."""
    case, loader = ZOO["FluxTransformer2DModel"], Loader()
    denoiser = maskfx.compile(case.build(), loader=loader)
    size = case.sizes[0]
    inputs = case.inputs(size, 0)
    _, cache = denoiser.record(**inputs)
    step = maskfx.EditStep(inputs, masks.random(case.mask_shape(size), 0), cache)
    [own] = denoiser.ahead([step], only=True)
    [later] = denoiser.ahead([step])
    assert later is not own
    denoiser.edit([step])
    assert denoiser.ahead([step], only=True) == [later], "what was loaded ahead serves"
    loader.close()


def test_a_step_that_fails_lets_go_what_it_loaded() -> None:
    case, loader = ZOO["FluxTransformer2DModel"], Loader()
    denoiser = maskfx.compile(case.build(), loader=loader)
    size = case.sizes[0]
    inputs = case.inputs(size, 0)
    _, cache = denoiser.record(**inputs)
    step = maskfx.EditStep(inputs, masks.random(case.mask_shape(size), 0), cache)
    wanted = denoiser.edit([step])
    [(key, runner)] = [item for item in denoiser._executor.graphs.runners.items() if not item[0][1]]

    def fails(fetch: Callable[[str], Tensor]) -> None:
        raise RuntimeError("in the middle of a step")

    denoiser._executor.graphs.runners[key] = fails
    with pytest.raises(RuntimeError, match="in the middle"):
        denoiser.edit([step])
    until(lambda: loader.staged == 0)
    denoiser._executor.graphs.runners[key] = runner
    assert error(denoiser.edit([step]), wanted) == 0
    cache.rows.popitem()
    with pytest.raises(CacheError, match="record the step again"):
        denoiser.edit([step])
    until(lambda: loader.staged == 0)
    loader.close()
