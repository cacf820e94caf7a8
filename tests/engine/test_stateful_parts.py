"""Modules that keep state while they run are called by one thread at a time, others by several."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor, nn

from maskfx.engine.processes.stateful_parts import StatefulParts


class Frames(nn.Module):
    """Sums the frames so far, which it keeps among its attributes, as autoencoders of videos do."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Identity()

    def encode(self, frames: Tensor) -> Tensor:
        self.kept = []
        for frame in frames:
            time.sleep(0.002)
            self.kept.append(self.layer(frame))
        return torch.stack(self.kept).sum(0)


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.both = threading.Barrier(2)

    def encode(self, frames: Tensor) -> Tensor:
        return frames.sum(0)

    def meet(self) -> Tensor:
        self.both.wait(10)
        return torch.ones(1)


def test_calls_that_keep_state_wait_for_each_other() -> None:
    part, parts = Frames(), StatefulParts()

    def one(number: int) -> float:
        with parts.calling(part, "encode"):
            return float(part.encode(torch.full((5, 1), float(number))))

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(one, range(8))) == [5.0 * number for number in range(8)]


def test_calls_without_state_run_side_by_side() -> None:
    part, parts = Plain(), StatefulParts()
    with parts.calling(part, "meet"):  # the first call shows that it keeps nothing
        pass

    def one(_: int) -> float:
        with parts.calling(part, "meet"):
            return float(part.meet())

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(one, range(2))) == [1.0, 1.0]


def test_methods_of_one_module_are_known_apart() -> None:
    part, parts = Frames(), StatefulParts()
    part.forward = lambda value: value
    for method, value in (("forward", torch.ones(1)), ("encode", torch.ones(2, 1))):
        with parts.calling(part, method):
            getattr(part, method)(value)
    entered = threading.Event()

    def waits() -> None:
        with parts.calling(part, "encode"):
            entered.set()

    with parts.calling(part, "encode"):
        thread = threading.Thread(target=waits)
        thread.start()
        with parts.calling(part, "forward"):
            assert not entered.wait(0.05)
    thread.join(10)
    assert entered.is_set()
