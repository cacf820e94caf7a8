"""drop_identity_ops: operators that return their input go."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from maskfx.passes.drop_identity_ops import drop_identity_ops, is_identity
from tests.passes.tools import check_values, picture, run_pass, shared

aten = torch.ops.aten


class Function(nn.Module):
    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, sample: Tensor) -> Tensor:
        return self.function(sample)


class Identities(nn.Module):
    def forward(self, sample: Tensor) -> Tensor:
        x = aten.alias(sample) * 1 + 0
        x = F.dropout(x, 0.5, training=False).contiguous().detach()
        return torch.tanh(x.expand(sample.shape)[:, :] / 1 - 0)


def test_drops_identities() -> None:
    module = shared(Identities)
    run = run_pass(drop_identity_ops, module, picture)
    assert run.rewrites >= 8
    assert set(run.after) - {"sym_size"} == {"tanh"}, run.after
    check_values(module, picture)


def test_drops_copies() -> None:
    module = Function(lambda x: torch.tanh(aten.copy(x, x.sin())))
    run = run_pass(drop_identity_ops, module, picture)
    assert (run.rewrites, run.after["copy"], run.after["sin"]) == (1, 0, 1)
    check_values(module, picture)


def test_drops_the_only_part_of_a_split() -> None:
    module = Function(lambda x: torch.tanh(x.split([x.shape[2]], 2)[0]))
    run = run_pass(drop_identity_ops, module, picture)
    assert (run.rewrites, run.after["split_with_sizes"], run.after["tanh"]) == (1, 0, 1)
    check_values(module, picture)


@pytest.mark.parametrize(
    "function",
    [
        lambda x: torch.tanh(x.split([1, 3], 1)[0]),
        lambda x: aten.alias(torch.tanh(x)),  # feeds the output
        lambda x: torch.tanh(x * 2 + 1),
        lambda x: torch.tanh(aten.copy(x, aten.slice(x, 1, 0, 1).sin())),
        lambda x: torch.tanh(aten.slice(x, 1, 0, 2)),
        lambda x: torch.tanh(aten.slice(x, 1, 0, 1).expand(-1, 4, -1, -1)),
        lambda x: torch.tanh(x.view(x.shape[0], 4, -1)),
        lambda x: torch.tanh(x.reshape(x.shape[0], 2, 2, x.shape[2], x.shape[3])),
    ],
)
def test_keeps_what_changes_something(function: Callable[[Tensor], Tensor]) -> None:
    assert run_pass(drop_identity_ops, Function(function), picture).unchanged


def test_keeps_a_cast() -> None:
    run = run_pass(drop_identity_ops, Function(lambda x: torch.tanh(x.double())), picture)
    assert run.rewrites == 0


@pytest.mark.parametrize("mode", ["floor", "trunc"])
def test_keeps_a_division_that_rounds(mode: str) -> None:
    """x / 1 rounded isn't x."""
    module = Function(lambda x: torch.tanh(torch.div(x, 1, rounding_mode=mode)))
    assert run_pass(drop_identity_ops, module, picture).unchanged


@pytest.mark.parametrize("op", [aten.dropout.default, aten.feature_dropout.default])
@pytest.mark.parametrize("train", [False, True])
def test_dropout_is_an_identity_unless_it_trains(op: object, train: bool) -> None:
    graph = fx.Graph()
    node = graph.call_function(op, (graph.placeholder("x"), 0.5, train))  # type: ignore[arg-type]
    assert is_identity(node) is not train


def test_second_run_rewrites_nothing() -> None:
    assert run_pass(drop_identity_ops, shared(Identities), picture).second_run_is_idle()
