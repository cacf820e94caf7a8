"""Which results a call reads one step late, without a pipeline."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from maskfx.pipelines.deferred import Deferred, Ledger, deferred_like, force_all, pending_sources
from maskfx.pipelines.runs.late_results import LateResults


@dataclass(eq=False)
class Call:
    """A call of a network, whose result is a number."""

    name: str
    step: int
    result: float = 0.0
    inputs: dict[str, object] = field(default_factory=dict)
    shape: Any = ("", ())
    steps: int | None = None
    branch: str = "0"
    values: Sequence[Any] | None = None
    late: bool = False

    def sources(self) -> Sequence[Any]:
        return pending_sources(self.inputs)

    def wait(self) -> None:
        pass


class Run:
    """Steps of networks `a` and `b`, and of a denoiser that reads their sum."""

    def __init__(self, steps: int | None = None) -> None:
        self.late, self.steps = LateResults(), steps
        self.ledger = Ledger(self._resolve)

    def _resolve(self, calls: list[Any]) -> None:
        spare = self.late.spare(calls)
        self.spared = len(spare)
        for call in calls:
            call.values = [torch.tensor([call.result])]

    def call(self, call: Call) -> Any:
        call.steps = self.steps
        self.late.add(call)
        self.late.exchange(call)
        self.ledger.calls.append(call)
        return deferred_like(torch.empty(1, device="meta"), torch.device("cpu"), self.ledger, call)

    def step(self, number: int, *nets: Call) -> float:
        """Return what the denoiser reads."""
        results = [self.call(net) for net in nets]
        total: Tensor = sum(results[1:], results[0]) * 2
        assert isinstance(total, Deferred)
        reader = Call("main", number, inputs={"residual": total})
        self.call(reader)
        self.ledger.settle()
        return float(force_all(reader.inputs)["residual"])


def test_operations_on_late_results_are_late() -> None:
    run = Run()
    read = [run.step(n, Call("a", n, n + 1), Call("b", n, 10 * (n + 1))) for n in range(4)]
    assert read == [22, 22, 44, 66]
    assert run.late.read == 6


def test_results_of_other_shapes_are_read_in_time() -> None:
    """Guidance ends at step 2."""
    run = Run()
    shapes = [("", (2,)), ("", (2,)), ("", (1,)), ("", (1,))]
    read = [run.step(n, Call("a", n, n + 1, shape=shape)) for n, shape in enumerate(shapes)]
    assert read == [2, 2, 6, 6]


def test_a_network_that_was_absent_for_a_step_is_read_in_time() -> None:
    run = Run()
    both = [lambda n: [Call("a", n, n + 1), Call("b", n, 10)], lambda n: [Call("b", n, 10)]]
    read = [run.step(n, *both[n == 1](n)) for n in range(4)]
    assert read == [22, 20, 26, 26]


def test_all_calls_of_a_step_can_be_let_read_in_time() -> None:
    run = Run()
    read = []
    for n in range(4):
        if n == 2:
            run.late.read_in_time(2)
        read.append(run.step(n, Call("a", n, n + 1)))
    assert read == [2, 2, 6, 6]


def test_what_stands_for_a_result_at_a_step_that_is_not_computed() -> None:
    run = Run()
    known = Call("a", 0, 1)
    run.step(0, known)
    assert run.late.held(Call("a", 1)) is known
    assert run.late.held(Call("main", 1)) is None, "its output is extrapolated"
    assert run.late.held(Call("a", 1, shape=("", (1,)))) is None
    assert run.step(5, Call("a", 5, 6)) == 2, "the computed step before"


def test_only_what_the_last_step_alone_would_read_is_spare() -> None:
    run = Run(steps=3)
    spared = []
    for n in range(3):
        run.step(n, Call("a", n, n + 1))
        spared.append(run.spared)
    assert spared == [0, 0, 1]


def test_calls_hold_no_chain_of_earlier_ones() -> None:
    run, calls = Run(), [Call("a", n, n) for n in range(4)]
    for n, call in enumerate(calls):
        call.inputs = {"latents": torch.ones(1)}
        run.step(n, call)
    assert [bool(call.inputs) for call in calls] == [False, False, False, True]
