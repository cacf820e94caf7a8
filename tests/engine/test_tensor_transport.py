"""Values between processes: equal on the other side, through shared memory or beside it."""

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing.shared_memory import SharedMemory
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from maskfx.engine.helper_processes import HelperProcess, HelperProcesses
from maskfx.engine.tensor_transport import TensorChannel
from maskfx.errors import Closed, InputError


@pytest.fixture
def pair() -> Iterator[tuple[TensorChannel, TensorChannel]]:
    one, two = multiprocessing.Pipe()
    blocks = [SharedMemory(create=True, size=1 << 20) for _ in range(2)]
    yield TensorChannel(one, blocks[0], blocks[1]), TensorChannel(two, blocks[1], blocks[0])
    for block in blocks:
        block.close()
        block.unlink()


@pytest.mark.parametrize(
    "value",
    [
        torch.randn(1, 4, 32, 32),
        torch.randn(300, 300, dtype=torch.float64),  # more than half the block
        torch.randn(3, 64, 64),
        torch.randn(3, 0, 4),
        torch.randn(2, 3).to(torch.bfloat16),
        torch.empty(0, 5),
        torch.tensor(3),
        torch.randn(8, 6, 4).transpose(0, 2),
        torch.rand(40, 40) > 0.5,
    ],
)
def test_tensors_arrive_equal(
    pair: tuple[TensorChannel, TensorChannel], value: torch.Tensor
) -> None:
    pair[0].send({"a": [value, 1], "b": "text"})
    found = pair[1].receive()
    assert (found["b"], found["a"][1]) == ("text", 1)
    assert found["a"][0].dtype == value.dtype
    assert torch.equal(found["a"][0], value)


@pytest.mark.parametrize("kind", [torch.from_numpy, np.array])
def test_the_next_message_leaves_the_last_one_alone(
    pair: tuple[TensorChannel, TensorChannel], kind: Callable[[Any], Any]
) -> None:
    first, second = (np.random.default_rng(n).random((64, 64)) for n in range(2))
    pair[0].send(kind(first))
    kept = pair[1].receive()
    pair[0].send(kind(second))
    assert (np.asarray(pair[1].receive()) == second).all()
    assert (np.asarray(kept) == first).all()
    kept += 1  # what was received can be written to


def test_many_tensors_in_one_message(pair: tuple[TensorChannel, TensorChannel]) -> None:
    values = [torch.randn(n, 100) for n in range(1, 60)] + [np.arange(5000)]
    pair[0].send(values)
    for one, two in zip(pair[1].receive(), values, strict=True):
        assert (np.asarray(one) == np.asarray(two)).all()


def test_what_the_block_has_no_room_for_goes_with_the_message(
    pair: tuple[TensorChannel, TensorChannel],
) -> None:
    values = [torch.randn(400, 400), torch.randn(400, 400)]  # 640 kB each, the block has 1 MiB
    sender = threading.Thread(target=pair[0].send, args=(values,))
    sender.start()
    found = pair[1].receive()
    sender.join()
    assert all(torch.equal(a, b) for a, b in zip(found, values, strict=True))


class Doubler(nn.Module):
    """A part that a helper process can run."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        if value.shape[0] == 13:
            raise ValueError("13 rows")
        return value * self.scale

    def encode(self, value: torch.Tensor) -> list[Any]:
        return [value + 1, os.getpid()]

    def decode(self, change: Any, value: torch.Tensor) -> Any:
        return (lambda: os.getpid()) if change is None else [change(value), os.getpid()]


class Threads:
    """A part that tells how many threads it computes with."""

    def encode(self) -> int:
        return torch.get_num_threads()


class Loop:
    """As much of an engine as `HelperProcesses` asks."""

    busy = False

    def stepping(self) -> bool:
        return self.busy


@pytest.fixture
def helpers() -> Iterator[HelperProcesses]:
    processes = HelperProcesses(1)
    processes.start(None)
    yield processes
    processes.stop()


def test_a_helper_runs_parts_and_survives_their_errors(helpers: HelperProcesses) -> None:
    part, value = Doubler(), torch.randn(4, 5)
    helpers.register(part)
    with torch.no_grad():
        wanted = part(value)
    assert torch.equal(helpers.run(part, "__call__", (value,), {}), wanted)
    with pytest.raises(ValueError, match="13 rows"):
        helpers.run(part, "__call__", (torch.zeros(13),), {})
    found, pid = helpers.run(part, "encode", (value,), {})
    assert torch.equal(found, value + 1)
    assert pid != os.getpid()
    with torch.no_grad():
        part.scale.fill_(3.0)  # weights are shared: a change in place is seen there
        assert torch.equal(helpers.run(part, "__call__", (value,), {}), part(value))


def test_what_cant_be_sent_runs_here_and_the_helper_goes_on(helpers: HelperProcesses) -> None:
    part, value = Doubler(), torch.randn(100, 50)
    helpers.register(part)
    found, where = helpers.run(part, "decode", (lambda x: x * 3, value), {})
    assert torch.equal(found, value * 3)
    assert where == os.getpid()
    assert helpers.run(part, "decode", (None, value), {})() == os.getpid()
    found, where = helpers.run(part, "encode", (value,), {})
    assert torch.equal(found, value + 1)
    assert where != os.getpid()
    assert helpers.restarts == 0


def test_a_helper_that_dies_loses_no_call(helpers: HelperProcesses) -> None:
    part, value = Doubler(), torch.randn(4, 5)
    helpers.register(part)
    _, pid = helpers.run(part, "encode", (value,), {})
    os.kill(pid, signal.SIGKILL)
    found, where = helpers.run(part, "encode", (value,), {})
    assert torch.equal(found, value + 1)
    assert (where, helpers.restarts) == (os.getpid(), 1)
    _, again = helpers.run(part, "encode", (value,), {})
    assert again not in (pid, os.getpid())


def test_calls_leave_the_cores_to_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """All threads while no request is among its steps, one else; or as many as was said."""
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    loop, part = Loop(), Threads()
    found = []
    for threads in (None, 2):
        processes = HelperProcesses(1, threads)
        processes.start(loop)
        processes.register(part)
        for loop.busy in (False, True):
            found.append(processes.run(part, "encode", (), {}))
        processes.stop()
    assert found == [3, 1, 2, 2]


@pytest.mark.parametrize("threads", [0, 1.0, "2"])
def test_threads_are_a_number(threads: Any) -> None:
    with pytest.raises(InputError, match="threads"):
        HelperProcesses(1, threads)


class Unmade(nn.Module):
    """A part that can be sent, and made in this process only."""

    def __init__(self) -> None:
        super().__init__()
        self.home = os.getpid()

    def __setstate__(self, state: Any) -> None:
        if state["home"] != os.getpid():
            raise RuntimeError("not here")
        super().__setstate__(state)

    def encode(self) -> int:
        return os.getpid()


def test_a_part_that_a_helper_cant_make_runs_here(helpers: HelperProcesses) -> None:
    part, other = Unmade(), Doubler()
    helpers.register(part)
    helpers.register(other)
    assert helpers.run(part, "encode", (), {}) == os.getpid()
    assert helpers.run(other, "encode", (torch.ones(1),), {})[1] != os.getpid()
    assert helpers.restarts == 0


def test_without_a_helper_calls_run_here_until_one_starts(
    helpers: HelperProcesses, monkeypatch: pytest.MonkeyPatch
) -> None:
    part, value = Doubler(), torch.ones(2)
    helpers.register(part)
    os.kill(helpers.run(part, "encode", (value,), {})[1], signal.SIGKILL)
    assert helpers.run(part, "encode", (value,), {})[1] == os.getpid()
    with monkeypatch.context() as patch:
        patch.setattr("maskfx.engine.helper_processes.HelperProcess", refused)
        for _ in range(2):  # the place isn't lost
            assert helpers.run(part, "encode", (value,), {})[1] == os.getpid()
    assert helpers.run(part, "encode", (value,), {})[1] != os.getpid()


def refused() -> Any:
    raise OSError("no more processes")


def test_a_start_that_fails_leaves_no_helper(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[HelperProcess] = []

    def second_fails() -> HelperProcess:
        if made:
            refused()
        made.append(HelperProcess())
        return made[0]

    monkeypatch.setattr("maskfx.engine.helper_processes.HelperProcess", second_fails)
    with pytest.raises(OSError, match="no more"):
        HelperProcesses(2).start(None)
    assert not made[0].process.is_alive()


class Slow:
    """A part that takes its time."""

    def encode(self) -> None:
        time.sleep(60)


def test_stop_ends_calls_under_way_and_those_that_wait(helpers: HelperProcesses) -> None:
    part, errors = Slow(), list[BaseException]()
    helpers.register(part)

    def call() -> None:
        try:
            helpers.run(part, "encode", (), {})
        except Closed as error:
            errors.append(error)

    callers = [threading.Thread(target=call, daemon=True) for _ in range(3)]
    for caller in callers:
        caller.start()
    while not helpers._busy:
        time.sleep(0.01)
    helpers.stop()
    for caller in callers:
        caller.join(20)
    assert len(errors) == 3


class Scaled:
    """A processor without a config."""

    def __init__(self, scale: int) -> None:
        self.scale = scale

    def encode(self) -> list[int]:
        return [self.scale, os.getpid()]


def test_processors_are_told_apart_by_what_they_hold(helpers: HelperProcesses) -> None:
    parts = [Scaled(1), Scaled(2), Scaled(1)]
    keys = [helpers.register(part) for part in parts]
    assert keys[0] == keys[2] != keys[1]
    found = [helpers.run(part, "encode", (), {}) for part in parts]
    assert [scale for scale, _ in found] == [1, 2, 1]
    assert os.getpid() not in [where for _, where in found]
