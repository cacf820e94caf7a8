"""What a graph reads later is picked while it waits for a late input."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from maskfx.runtime.execution.fetch_ahead import FetchAhead

ORDER = ["first", "late", "a", "other_late", "b", "c"]
LATE = ("late", "other_late")


class Inputs:
    """Inputs of which two arrive after a number of other ones have been fetched."""

    def __init__(self, after: int) -> None:
        self.after = after
        self.events: list[str] = []

    def waits(self, name: str) -> bool:
        return name in LATE and len(self.events) < self.after

    def fetch(self, name: str) -> Tensor:
        self.events.append(name)
        return torch.full((4,), float(ORDER.index(name)))


def run(inputs: Inputs, fetch: Callable[[str], Tensor]) -> list[float]:
    """Read the inputs as a graph does; note where the late one is read."""
    return [float(fetch(name)[0]) for name in ORDER]


def test_other_inputs_are_picked_in_their_order_during_the_wait() -> None:
    inputs = Inputs(after=100)
    found = run(inputs, FetchAhead(inputs.fetch, ORDER, inputs.waits))
    assert inputs.events == ["first", "a", "b", "c", "late", "other_late"]
    assert found == [0, 1, 2, 3, 4, 5]


def test_nothing_more_is_picked_once_the_input_has_arrived() -> None:
    inputs = Inputs(after=2)
    found = run(inputs, FetchAhead(inputs.fetch, ORDER, inputs.waits))
    assert inputs.events == ["first", "a", "late", "other_late", "b", "c"]
    assert found == [0, 1, 2, 3, 4, 5]


def test_without_a_wait_inputs_are_picked_where_they_are_read() -> None:
    inputs = Inputs(after=0)
    run(inputs, FetchAhead(inputs.fetch, ORDER, inputs.waits))
    assert inputs.events == ORDER


def test_the_bytes_that_are_held_are_limited() -> None:
    inputs = Inputs(after=100)
    size = inputs.fetch("first").nbytes
    inputs.events.clear()
    run(inputs, FetchAhead(inputs.fetch, ORDER, inputs.waits, most=2 * size))
    assert inputs.events == ["first", "a", "b", "late", "c", "other_late"], "a is read before c"


def test_an_input_that_is_read_twice_is_given_twice() -> None:
    inputs = Inputs(after=100)
    fetch = FetchAhead(inputs.fetch, ORDER, inputs.waits)
    run(inputs, fetch)
    assert torch.equal(fetch("c"), fetch("c"))
