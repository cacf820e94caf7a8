"""Exchanges through rings in shared memory; threads stand for ranks, each with its own link."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor

from maskfx.distributed.exchanges import ring_link
from maskfx.distributed.exchanges.ring_link import RingLink, SharedMemory, rings_serve
from maskfx.ops.native import build

pytestmark = pytest.mark.skipif(not rings_serve(2), reason="needs Linux and a C compiler")
SECONDS = 20.0


def links_of(ranks: int, seconds: float = SECONDS) -> list[RingLink]:
    memory = SharedMemory.new(ranks)
    return [RingLink(memory, rank, seconds) for rank in range(ranks)]


def together(acts: list[Callable[[], object]]) -> list[object]:
    with ThreadPoolExecutor(len(acts)) as pool:
        return [future.result(timeout=60) for future in [pool.submit(act) for act in acts]]


def content(source: int, target: int, number: int, size: int) -> Tensor:
    made = torch.Generator().manual_seed(1000 * number + 10 * source + target)
    return torch.rand(size, generator=made)


@pytest.mark.parametrize("ranks", [2, 3, 5])
@pytest.mark.parametrize("capacity", [64, 1 << 12, 1 << 20])
def test_random_exchanges_arrive_as_they_were_sent(
    ranks: int, capacity: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also through rings that hold a part of a message, or one of several messages."""
    monkeypatch.setattr(ring_link, "CAPACITY", capacity)
    links, choose = links_of(ranks), random.Random(ranks)
    numbers = range(1, 20)
    sizes = {
        (number, source, target): choose.choice([0, 0, 1, 7, 100, 4000])
        for number in numbers
        for source in range(ranks)
        for target in range(ranks)
        if source != target
    }

    def run(rank: int) -> None:
        for number in numbers:
            others = [other for other in range(ranks) if other != rank]
            sent = {o: content(rank, o, number, sizes[number, rank, o]) for o in others}
            found = {o: torch.empty(sizes[number, o, rank]) for o in others}
            sent = {o: value for o, value in sent.items() if len(value)}
            found = {o: value for o, value in found.items() if len(value)}
            links[rank].start(sent, found, number).wait()
            for other, value in found.items():
                assert torch.equal(value, content(other, rank, number, len(value)))

    together([lambda rank=rank: run(rank) for rank in range(ranks)])  # type: ignore[misc]


@pytest.mark.parametrize(("capacity", "size"), [(64, 2000), (1 << 20, 300_000)])
def test_an_exchange_that_is_waited_for_later_lets_others_pass(
    capacity: int, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first one's rows are read after those of others, which the ring holds in parts."""
    monkeypatch.setattr(ring_link, "CAPACITY", capacity)
    links, numbers = links_of(2), range(1, 9)

    def run(rank: int) -> None:
        other = 1 - rank
        found = {n: torch.empty(size) for n in numbers}
        sent = {n: {other: content(rank, other, n, size)} for n in numbers}
        begun = {n: links[rank].start(sent[n], {other: found[n]}, n) for n in numbers}
        for n in reversed(numbers):
            begun[n].wait()
            assert torch.equal(found[n], content(other, rank, n, size))

    together([lambda rank=rank: run(rank) for rank in range(2)])  # type: ignore[misc]


def test_a_rank_that_leaves_is_not_waited_for() -> None:
    links, began = links_of(2), time.monotonic()
    threading.Timer(0.2, links[1].close).start()
    with pytest.raises(
        TimeoutError, match=r"exchange 7 of rank 0 with ranks \[1\].*rank 1 has left"
    ):
        links[0].start({}, {1: torch.empty(4)}, 7).wait()
    assert time.monotonic() - began < SECONDS / 4


def test_what_a_rank_sent_before_it_left_is_read() -> None:
    links = links_of(2)
    links[1].start({0: torch.ones(4)}, {}, 1).wait()
    links[1].close()
    found = torch.empty(4)
    links[0].start({}, {1: found}, 1).wait()
    assert found.tolist() == [1.0] * 4


def test_a_rank_that_sends_nothing_is_waited_for_so_long() -> None:
    links, began = links_of(2, seconds=0.3), time.monotonic()
    with pytest.raises(TimeoutError, match=r"took more than 0.3 s: rank 1 didn't send"):
        links[0].start({}, {1: torch.empty(4)}, 1).wait()
    assert 0.2 < time.monotonic() - began < 3.0


@pytest.mark.parametrize("other", [(2, 4), (1, 5)])
def test_another_message_than_the_expected_one_fails(other: tuple[int, int]) -> None:
    links = links_of(2)
    number, size = other
    links[1].start({0: torch.ones(size)}, {}, number).wait()
    with pytest.raises(TimeoutError, match="rank 1 sent another message"):
        links[0].start({}, {1: torch.empty(4)}, 1).wait()


def test_a_waiting_rank_hardly_uses_its_core() -> None:
    """So that a rank that hangs in an exchange isn't taken for one that computes."""
    links, used = links_of(2, seconds=1.0), time.thread_time()
    with pytest.raises(TimeoutError):
        links[0].start({}, {1: torch.empty(4)}, 1).wait()
    assert time.thread_time() - used < 0.2


@pytest.fixture
def no_compiler(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    build.c_functions.cache_clear()
    monkeypatch.setenv("CC", "no-such-compiler")
    yield
    build.c_functions.cache_clear()


def test_rings_serve_where_there_is_a_compiler(no_compiler: None) -> None:
    assert not rings_serve(2)
