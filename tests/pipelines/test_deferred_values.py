"""Deferred results: shapes now, numbers when they are needed, as the same tensors would have."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from maskfx.pipelines.deferred import (
    Deferred,
    Ledger,
    deferred_like,
    force_all,
    hold,
    is_ready,
)


@dataclass
class Source:
    """A call that was not answered yet."""

    value: Tensor
    values: Sequence[Any] | None = None


def pending(*values: Tensor) -> tuple[list[Any], list[int]]:
    """Deferred tensors of these values, and a list that grows when they are settled."""
    settled: list[int] = []

    def resolve(calls: list[Any]) -> None:
        settled.append(len(calls))
        for call in calls:
            call.values = [call.value]

    ledger = Ledger(resolve)
    made = []
    for value in values:
        source = Source(value)
        ledger.calls.append(source)
        made.append(deferred_like(value.to("meta"), value.device, ledger, source))
    return made, settled


def test_nothing_is_settled_by_shapes_slices_and_sums():
    one, other = torch.randn(4, 3, 6), torch.randn(4, 3, 6)
    (a, b), settled = pending(one, other)
    assert (a.shape, a.dtype, a.device) == (one.shape, one.dtype, one.device)
    free, bound = a.chunk(2)
    guided = free + 3.0 * (bound - free)
    kept = torch.cat([torch.zeros_like(b), b])[:, :2] - 1
    assert settled == []
    assert type(guided) is Deferred
    f, c = one.chunk(2)
    assert torch.equal(force_all(guided), f + 3.0 * (c - f))
    assert settled == [2]
    assert torch.equal(force_all(kept), torch.cat([torch.zeros_like(other), other])[:, :2] - 1)
    assert settled == [2]


@pytest.mark.parametrize(
    "use",
    [
        lambda t: t.sum().item(),
        lambda t: t.numpy().sum(),
        lambda t: t.tolist(),
        lambda t: torch.norm(t, dim=-1),
        lambda t: t.float() @ torch.ones(6, 2),
        lambda t: torch.nn.functional.silu(t),
        lambda t: bool((t == t).all()),
        lambda t: torch.where(t > 0, t, torch.zeros(())),
        lambda t: t.exp_(),
    ],
)
def test_the_first_use_of_numbers_settles(use: Any):
    value = torch.randn(4, 6)
    wanted = use(value.clone())
    [deferred], settled = pending(value.clone())
    found = use(deferred)
    assert settled == [1]
    assert is_ready(found)
    same = torch.equal(found, wanted) if isinstance(found, Tensor) else found == wanted
    assert same


def test_a_result_changed_in_place_stays_changed():
    value = torch.randn(3, 4)
    [deferred], _ = pending(value.clone())
    part = deferred[:, :2]
    deferred.add_(1)
    assert torch.equal(force_all(deferred), value + 1)
    assert torch.equal(force_all(part), value[:, :2] + 1)  # a view, as of any tensor


def test_structures_are_forced_throughout():
    one, other = torch.randn(2), torch.randn(3)
    (a, b), _ = pending(one, other)
    assert not is_ready(a)
    found = force_all({"x": [a, 1], "y": (b, "text")})
    assert torch.equal(found["x"][0], one)
    assert torch.equal(found["y"][0], other)
    assert is_ready(a)


def test_sums_in_place_stay_deferred():
    """As several ControlNets' residuals are summed."""
    values = [torch.randn(2, 3) for _ in range(3)]
    made, settled = pending(*values)
    total = made[0]
    total += made[1]
    total += made[2] * 2
    assert settled == []
    assert type(total) is Deferred
    assert torch.equal(force_all(total), values[0] + values[1] + values[2] * 2)
    assert settled == [3]
    assert torch.equal(force_all(made[1]), values[1])


@pytest.mark.parametrize("held", ["operation", "view", "call"])
def test_a_change_in_place_settles_what_others_hold(held: str):
    """The others see what they would see of a real tensor."""
    one, other = torch.randn(4, 3), torch.randn(4, 3)
    (a, b), settled = pending(one.clone(), other)
    match held:
        case "operation":
            seen, wanted = a - 1, one - 1
        case "view":
            a, seen = a[1:], a
            wanted = one.clone()
            wanted[1:] += other[1:]
            b = b[1:]
        case "call":
            hold({"sample": a})
            seen, wanted = b, other
    a += b
    assert settled == [2]
    start = 1 if held == "view" else 0
    assert torch.equal(force_all(a), one[start:] + other[start:])
    assert torch.equal(force_all(seen), wanted)
