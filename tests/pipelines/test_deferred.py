"""Deferred tensors: the cheap stays deferred, what needs numbers settles all that is pending."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from maskfx.pipelines.deferred import Deferred, Ledger, deferred_like, force_all, is_ready


class Call:
    """A call that gives these values when it is resolved."""

    def __init__(self, *values: Tensor) -> None:
        self.given = values
        self.values: Sequence[Any] | None = None


class Desk:
    """A ledger, and how often it was asked to resolve what."""

    def __init__(self) -> None:
        self.settled: list[int] = []
        self.ledger = Ledger(self.resolve)

    def resolve(self, calls: list[Call]) -> None:
        self.settled.append(len(calls))
        for call in calls:
            call.values = list(call.given)

    def defer(self, *values: Tensor) -> Any:
        call = Call(*values)
        self.ledger.calls.append(call)
        shapes = tuple(v.to("meta") for v in values)
        found = deferred_like(shapes, values[0].device, self.ledger, call)
        return found[0] if len(values) == 1 else found


@pytest.fixture
def context() -> Desk:
    return Desk()


class Exporting(Desk):
    """A ledger whose calls are exported when they are resolved."""

    def resolve(self, calls: list[Call]) -> None:
        super().resolve(calls)
        with torch.no_grad():
            program = torch.export.export(torch.nn.Linear(2, 2), (torch.ones(3, 2),), strict=False)
        self.exported = [node.op for node in program.graph.nodes]


def test_a_call_may_be_exported_within_the_operation_that_needs_it() -> None:
    desk = Exporting()
    with torch.no_grad():
        value = desk.defer(torch.ones(2, 2))
        assert float(torch.norm(value)) == 2.0
    assert "call_function" in desk.exported


def test_shapes_are_known_before_numbers(context: Desk) -> None:
    value = context.defer(torch.randn(2, 4, 8, 8))
    assert isinstance(value, Deferred)
    assert value.shape == (2, 4, 8, 8)
    assert value.dtype == torch.float32
    assert value.device.type == "cpu"
    assert not context.settled


@pytest.mark.parametrize(
    "use",
    [
        lambda x: x[:, :3],
        lambda x: x.chunk(2),
        lambda x: x[0] + 2 * x[1],
        lambda x: torch.cat([torch.zeros_like(x), x]),
        lambda x: (x / 2).unsqueeze(0).squeeze(0),
        lambda x: torch.stack(x.unbind(0)),
        lambda x: x.view(2, -1),
    ],
)
def test_what_is_cheap_stays_deferred(context: Desk, use: Any) -> None:
    value = torch.randn(2, 4, 6)
    found = use(context.defer(value))
    leaves = pytree.tree_leaves(found)
    assert all(isinstance(leaf, Deferred) for leaf in leaves)
    assert not context.settled, "a cheap operation asked for numbers"
    for one, wanted in zip(leaves, pytree.tree_leaves(use(value)), strict=True):
        assert one.shape == wanted.shape
        assert torch.equal(one.force(), wanted)
    assert context.settled == [1]


@pytest.mark.parametrize(
    "use",
    [
        lambda x: x.sum().item(),
        lambda x: x.numpy().tolist(),
        lambda x: x.tolist(),
        lambda x: torch.nn.functional.gelu(x).tolist(),
        lambda x: bool((x > 0).any()),
        lambda x: (x @ x.mT).tolist(),
        lambda x: x.to(torch.float64).tolist(),
    ],
)
def test_what_needs_numbers_settles(context: Desk, use: Any) -> None:
    value = torch.randn(3, 5)
    assert use(context.defer(value)) == use(value)
    assert context.settled == [1]


def test_all_that_is_pending_settles_at_once(context: Desk) -> None:
    one, two = torch.randn(3), torch.randn(3)
    first, second = context.defer(one), context.defer(two)
    guided = first + 5 * (second - first)
    assert torch.equal(guided.exp(), (one + 5 * (two - one)).exp())
    assert context.settled == [2]


def test_a_value_that_waits_for_a_call_is_not_ready(context: Desk) -> None:
    value = context.defer(torch.randn(3))
    later = value * 2
    assert not is_ready(value)
    assert not is_ready(later)
    value.force()
    assert is_ready(later)


def test_in_place_changes_come_after_what_was_derived(context: Desk) -> None:
    given = torch.ones(3)
    value = context.defer(given)
    doubled = value * 2
    value.add_(10)
    assert doubled.tolist() == [2, 2, 2]
    assert value.tolist() == [11, 11, 11]


def test_forced_replaces_them_anywhere(context: Desk) -> None:
    pair = context.defer(torch.ones(2), torch.zeros(2))
    found = force_all({"a": [pair[0]], "b": (pair[1], "text")})
    assert type(found["a"][0]) is Tensor
    assert found["b"][1] == "text"
    assert context.settled == [1]


def test_shapes_are_those_of_an_operation_with_its_own_arguments(context: Desk) -> None:
    """Results of equal operations on equal shapes have one shape, found once; others their own."""
    whole = torch.arange(6).reshape(2, 3)
    value, turned = context.defer(whole), context.defer(whole.t().contiguous().t())
    changes: list[Callable[[Any], Any]] = [
        lambda x: x * 1,
        lambda x: x * 1.0,
        lambda x: x[:1],
        lambda x: x[:, :1],
        lambda x: x + torch.ones(4, 2, 3),
        lambda x: x + torch.ones(4, 1, 1, dtype=torch.float64),
        lambda x: torch.cat([x, x]),
        lambda x: torch.cat([x, x, x]),
    ]
    for made, own in ((value, whole), (turned, whole.t().contiguous().t())):
        for change in changes:
            seen, real = change(made), change(own)
            assert seen.shape == real.shape
            assert seen.dtype == real.dtype
            assert seen.stride() == real.stride()
            assert change(made).pending
    known = len(context.ledger.shapes)
    assert (value * 1).pending
    assert len(context.ledger.shapes) == known
    assert torch.equal(force_all(value * 1.0), whole * 1.0)
