"""canonicalize_joins: stacks of matrices are joins, and nothing empty is joined."""

import torch
from torch import Tensor, nn

from maskfx.passes.canonicalize.joins import canonicalize_joins
from tests.passes.tools import check_values, run_pass, shared, tokens


class Stacks(nn.Module):
    """Tokens of one sample, stacked with an empty matrix, and features side by side."""

    def forward(self, hidden_states: Tensor) -> Tensor:
        flat = torch.tanh(hidden_states.flatten(0, 1))
        flat = torch.vstack([flat, flat.new_zeros(0, 8)]) * 2
        wide = torch.hstack([flat, flat.new_zeros(flat.shape[0], 0), torch.sin(flat)])
        return wide.view(*hidden_states.shape[:2], 16) + 1


class Plain(nn.Module):
    """A join without an empty part, and a stack of vectors."""

    def forward(self, hidden_states: Tensor) -> Tensor:
        both = torch.cat([hidden_states, torch.sin(hidden_states)], -1)
        row = torch.hstack([torch.arange(8.0), torch.ones(8)])
        return both * row


def test_drops_what_is_empty() -> None:
    run = run_pass(canonicalize_joins, shared(Stacks), tokens)
    assert run.rewrites == run.before["vstack"] + run.before["hstack"] == 2
    assert run.after["vstack"] == run.after["hstack"] == 0
    assert run.after["cat"] == 1
    check_values(shared(Stacks), tokens)


def test_keeps_joins_without_an_empty_part() -> None:
    assert run_pass(canonicalize_joins, shared(Plain), tokens).unchanged
    check_values(shared(Plain), tokens)


def test_second_run_rewrites_nothing() -> None:
    assert run_pass(canonicalize_joins, shared(Stacks), tokens).second_run_is_idle()
