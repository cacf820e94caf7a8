"""What a link over torch.distributed does where the device orders exchanges, and copies for it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from maskfx.distributed.exchanges.staged_link import StagedLink
from maskfx.distributed.exchanges.torch_link import until_ended
from maskfx.distributed.exchanges.world import GLOO, World
from tests.factories import emulated
from tests.factories.thread_ranks import Boxes, Receipt, ThreadGroup

OWN = torch.device(emulated.NAME, 0)


@pytest.fixture
def begun() -> Any:
    """An exchange of rank 0 with rank 1, and what lets rank 1 take part in it."""
    store = torch._C._distributed_c10d.HashStore()
    groups: dict[int, Any] = {}

    def join(rank: int) -> None:
        limit = timedelta(seconds=20)
        groups[rank] = dist.ProcessGroupGloo(store, rank, 2, limit)

    threads = [threading.Thread(target=join, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    values = [torch.tensor([1.0]), torch.tensor([2.0])]

    def other() -> None:
        groups[1].allreduce([values[1]]).wait()

    found = groups[0].allreduce([values[0]]), other, values[0]
    yield found
    if values[0].item() != 3.0:
        other()


def world(folder: Path, seconds: float) -> World:
    return World(str(folder / "world"), 0, 2, GLOO, seconds)


def test_it_waits_until_the_exchange_has_ended(begun: Any, tmp_path: Path) -> None:
    work, other, value = begun
    thread = threading.Timer(0.2, other)
    thread.start()
    until_ended(work, [1], world(tmp_path, 10.0))
    assert value.item() == 3.0
    thread.join()


def test_an_exchange_that_doesnt_end_fails_in_time(begun: Any, tmp_path: Path) -> None:
    start = time.monotonic()
    with pytest.raises(RuntimeError, match="it didn't end in time"):
        until_ended(begun[0], [1], world(tmp_path, 0.3))
    assert 0.3 <= time.monotonic() - start < 5


def test_it_fails_at_once_when_another_rank_leaves(begun: Any, tmp_path: Path) -> None:
    """A rank that is no part of the exchange may leave."""
    own = world(tmp_path, 60.0)
    own.leave(2)
    thread = threading.Timer(0.2, own.leave, (1,))
    thread.start()
    start = time.monotonic()
    with pytest.raises(RuntimeError, match="rank 1 has left"):
        until_ended(begun[0], [1, 3], own)
    assert 0.2 <= time.monotonic() - start < 10
    thread.join()


class PlacedLink:
    """Threads that exchange tensors of one place, and refuse others."""

    def __init__(self, group: ThreadGroup, place: torch.device) -> None:
        self._group, self._place = group, place
        self.finished = 0

    def start(self, outgoing: Any, incoming: Any, number: int) -> Receipt:
        found = {value.device for values in (outgoing, incoming) for value in values.values()}
        assert found == {self._place}
        return self._group.start(outgoing, incoming, number)

    def finish(self) -> None:
        self.finished += 1

    def close(self) -> None:
        return None


@pytest.mark.parametrize("place", [torch.device("cpu"), OWN], ids=["host", "device"])
def test_tensors_are_copied_to_where_the_link_reads_them(place: torch.device) -> None:
    """Those of the device and of the host in one exchange; the host's can be read at once."""
    boxes = Boxes()
    inner = [PlacedLink(ThreadGroup(rank, boxes, 10.0), place) for rank in range(3)]
    links = [StagedLink(one, place) for one in inner]
    received: dict[int, dict[int, Tensor]] = {}

    def sent(rank: int, other: int) -> Tensor:
        value = torch.full((2, 3), 10.0 * rank + other)
        return value if {rank, other} == {0, 1} else value.to(OWN)  # sums, and rows

    def run(rank: int) -> None:
        others = [other for other in range(3) if other != rank]
        received[rank] = {other: torch.empty_like(sent(other, rank)) for other in others}
        transfer = links[rank].start({o: sent(rank, o) for o in others}, received[rank], 5)
        transfer.wait()

    together([lambda rank=rank: run(rank) for rank in range(3)])  # type: ignore[misc]
    for rank, values in received.items():
        for other, value in values.items():
            assert torch.equal(value, sent(other, rank))
    host_reads = [place == OWN, place == OWN, False]
    assert [one.finished > 0 for one in inner] == host_reads


def together(acts: list[Callable[[], None]]) -> None:
    threads = [threading.Thread(target=act) for act in acts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
