"""Values between processes, equal on the other side; and helper processes that take them."""

import os
import signal
import socket
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from maskfx.engine.processes.helper_processes import HelperProcess, HelperProcesses
from maskfx.errors import Closed, InputError
from maskfx.runtime.processes.channel import Channel
from maskfx.runtime.transport import sendable
from maskfx.runtime.transport.tensor_transport import Unsendable, pack, unpack

Ends = tuple[Channel, Channel]


@pytest.fixture
def ends() -> Iterator[Ends]:
    one, two = (Channel(line) for line in socket.socketpair())
    yield one, two
    one.close()
    two.close()


def sent(ends: Ends, value: Any) -> Any:
    sender = threading.Thread(target=lambda: ends[0].send(*pack(value)))
    sender.start()
    found = unpack(ends[1].receive())
    sender.join()
    return found


@pytest.mark.parametrize(
    "value",
    [
        torch.randn(1, 4, 32, 32),
        torch.randn(300, 300, dtype=torch.float64),
        torch.randn(3, 64, 64),
        torch.randn(3, 0, 4),
        torch.randn(2, 3).to(torch.bfloat16),
        torch.empty(0, 5),
        torch.tensor(3),
        torch.randn(8, 6, 4).transpose(0, 2),
        torch.rand(40, 40) > 0.5,
        torch.tensor(3.0).expand(1),  # a timestep of one sample
        torch.tensor(3.0).expand(4),
        torch.randn(5, 3)[2:3, 1],
    ],
)
def test_tensors_arrive_equal(ends: Ends, value: torch.Tensor) -> None:
    found = sent(ends, {"a": [value, 1], "b": "text"})
    assert (found["b"], found["a"][1]) == ("text", 1)
    assert found["a"][0].dtype == value.dtype
    assert torch.equal(found["a"][0], value)


@pytest.mark.parametrize("kind", [torch.from_numpy, np.array])
def test_the_next_message_leaves_the_last_one_alone(ends: Ends, kind: Callable[[Any], Any]) -> None:
    first, second = (np.random.default_rng(n).random((64, 64)) for n in range(2))
    kept = sent(ends, kind(first))
    assert (np.asarray(sent(ends, kind(second))) == second).all()
    assert (np.asarray(kept) == first).all()
    kept += 1  # what was received can be written to


def test_many_tensors_in_one_message(ends: Ends) -> None:
    values = [torch.randn(n, 100) for n in range(1, 60)] + [np.arange(5000)]
    for one, two in zip(sent(ends, values), values, strict=True):
        assert (np.asarray(one) == np.asarray(two)).all()


def test_what_cant_be_pickled_or_unpickled_is_unsendable() -> None:
    with pytest.raises(Unsendable, match="lambda"):
        pack([lambda: 0])
    with pytest.raises(Unsendable, match="no value"):
        unpack([bytearray(part) for part in pack(Refusing())])


class Refusing:
    """A value that can be pickled and not unpickled."""

    def __reduce__(self) -> Any:
        return refuse, ()


def refuse() -> None:
    raise RuntimeError("no value")


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
    """A part that reports how many threads it computes with."""

    def encode(self) -> int:
        return torch.get_num_threads()


class Loop:
    """As much of an engine as `HelperProcesses` asks."""

    busy = False

    def stepping(self) -> bool:
        return self.busy

    def errand(self, work: Callable[[], None]) -> None:
        raise AssertionError("helpers have no errands")


@pytest.fixture
def helpers() -> Iterator[HelperProcesses]:
    processes = HelperProcesses(1)
    processes.start(Loop())
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
    """All threads while no request is among its steps, one else; or as many as was set."""
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


def test_weights_without_room_in_shared_memory_stay(
    helpers: HelperProcesses, monkeypatch: pytest.MonkeyPatch
) -> None:
    part = torch.nn.Linear(64, 64)
    monkeypatch.setattr(sendable, "SPARE", 1 << 60)
    assert helpers.register(part) is None
    assert not part.weight.is_shared()
    monkeypatch.setattr(sendable, "SPARE", 0)
    assert helpers.register(torch.nn.Linear(64, 64)) is not None
    monkeypatch.setattr(sendable, "SHARED", "/nowhere")
    assert helpers.register(torch.nn.Linear(64, 64)) is not None


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
        patch.setattr("maskfx.engine.processes.helper_processes.HelperProcess", refused)
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

    monkeypatch.setattr("maskfx.engine.processes.helper_processes.HelperProcess", second_fails)
    with pytest.raises(OSError, match="no more"):
        HelperProcesses(2).start(Loop())
    assert made[0].child.exited()


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


def test_a_component_whose_weights_were_replaced_isnt_computed_with_the_old_ones(
    helpers: HelperProcesses,
) -> None:
    part, value = Doubler(), torch.ones(3)
    assert helpers.register(part) is not None
    assert helpers.run(part, "encode", (value,), {})[1] != os.getpid()
    part.scale = nn.Parameter(torch.tensor(5.0))
    assert torch.equal(helpers.run(part, "__call__", (value,), {}), 5 * value)
    assert helpers.run(part, "encode", (value,), {})[1] == os.getpid()
    assert helpers.register(part) is None


def test_an_answer_that_was_not_waited_for_is_nobody_elses(
    helpers: HelperProcesses, monkeypatch: pytest.MonkeyPatch
) -> None:
    part = Doubler()
    helpers.register(part)
    _, pid = helpers.run(part, "encode", (torch.zeros(1),), {})

    def interrupted(_: Channel) -> Any:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Channel, "receive", interrupted)
        with pytest.raises(KeyboardInterrupt):
            helpers.run(part, "encode", (torch.zeros(1),), {})
    found, where = helpers.run(part, "encode", (torch.ones(1),), {})
    assert found == 2
    assert where not in (pid, os.getpid())


def test_a_component_that_no_helper_can_make_is_sent_once(
    helpers: HelperProcesses, monkeypatch: pytest.MonkeyPatch
) -> None:
    part, sent = Unmade(), list[Any]()
    give = HelperProcess.give

    def counted(helper: HelperProcess, *given: Any) -> None:
        sent.append(given)
        give(helper, *given)

    monkeypatch.setattr(HelperProcess, "give", counted)
    for _ in range(3):
        assert helpers.run(part, "encode", (), {}) == os.getpid()
    assert len(sent) == 1


def test_arguments_that_a_helper_cant_unpickle_cost_no_helper(helpers: HelperProcesses) -> None:
    part = Doubler()
    _, pid = helpers.run(part, "encode", (torch.ones(1),), {})
    with pytest.raises(TypeError):  # here the call itself fails
        helpers.run(part, "encode", (Refusing(),), {})
    assert helpers.run(part, "encode", (torch.ones(1),), {})[1] == pid
    assert helpers.restarts == 0


class Offline:
    """A component that raises the error of a connection."""

    def encode(self) -> None:
        raise ConnectionError("the encoder's service is down")


def test_a_components_error_isnt_a_death(helpers: HelperProcesses) -> None:
    with pytest.raises(ConnectionError, match="service"):
        helpers.run(Offline(), "encode", (), {})
    assert helpers.restarts == 0


def test_the_identity_of_a_component_isnt_used_again(helpers: HelperProcesses) -> None:
    part = nn.Linear(1, 1, device="meta")
    assert helpers.register(part) is None
    kept = weakref.ref(part)
    del part
    assert kept() is not None
