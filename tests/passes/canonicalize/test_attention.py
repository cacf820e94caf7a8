"""canonicalize_attention: two products and a softmax are attention."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import maskfx
from maskfx.passes.canonicalize.attention import canonicalize_attention
from tests.passes.tools import (
    TOLERANCE,
    a_mask,
    check_values,
    denoiser_of,
    error,
    joint,
    run_pass,
    shared,
    tokens,
)

NAME = "scaled_dot_product_attention"


def plain(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """As a matrix product of four axes."""
    weights = (q @ k.transpose(-2, -1) / 3 * 0.9).float().softmax(-1)
    return weights.to(q.dtype) @ v


def batched(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """As diffusers' plain processor does it: heads beside the batch, scores into an empty."""
    flat = [x.flatten(0, 1) for x in (q, k, v)]
    empty = torch.empty(flat[0].shape[0], q.shape[2], k.shape[2], dtype=q.dtype)
    scores = torch.baddbmm(empty, flat[0], flat[1].transpose(-1, -2), beta=0, alpha=0.3)
    return torch.bmm(scores.softmax(dim=-1), flat[2]).unflatten(0, (q.shape[0], -1))


def spelled(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, scale=0.3)


def observed(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Its weights are used twice."""
    weights = (q @ k.transpose(-2, -1)).softmax(-1)
    return weights @ v + weights.amax(-1, keepdim=True)


def masked(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = q @ k.transpose(-2, -1)
    return (scores + torch.ones_like(scores).tril()).softmax(-1) @ v


def across(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Its softmax runs along the queries."""
    return (q @ k.transpose(-2, -1)).softmax(-2) @ v


def lent(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Every head has the same keys."""
    return (q @ k[:, :1].transpose(-2, -1)).softmax(-1) @ v


def weakened(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """What its mask puts in place of scores isn't low enough to be added to them instead."""
    scores = q @ k.transpose(-2, -1)
    return scores.masked_fill(torch.ones(1, 1, 1, 1, dtype=torch.bool), -1e4).softmax(-1) @ v


def multiplied(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """A value of the module multiplies the bias too."""
    flat = [x.flatten(0, 1) for x in (q, k, v)]
    bias = torch.ones(flat[0].shape[0], q.shape[2], k.shape[2])
    scores = torch.baddbmm(bias, flat[0], flat[1].transpose(-1, -2)) * q.abs().amax()[None, None]
    return torch.bmm(scores.softmax(-1), flat[2]).unflatten(0, (q.shape[0], -1))


class Attends(nn.Module):
    """Tokens that attend to each other, and to those of a text if there is one."""

    def __init__(self, attend: Any = plain) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.q, self.kv, self.out = nn.Linear(8, 8), nn.Linear(8, 16), nn.Linear(8, 8)
        self.attend = attend

    def forward(self, hidden_states: Tensor, encoder_hidden_states: Tensor | None = None) -> Tensor:
        source = hidden_states if encoder_hidden_states is None else encoder_hidden_states
        k, v = self.kv(source).chunk(2, -1)
        q, k, v = (x.unflatten(-1, (2, 4)).transpose(1, 2) for x in (self.q(hidden_states), k, v))
        return hidden_states + self.out(self.attend(q, k, v).transpose(1, 2).flatten(2))


@pytest.mark.parametrize("attend", [plain, batched])
@pytest.mark.parametrize("make", [tokens, joint])
def test_spells_attention_in_steps(attend: Any, make: Any) -> None:
    module = Attends(attend)
    run = run_pass(canonicalize_attention, module, make)
    assert run.rewrites == run.after[NAME] == 1
    assert run.after["softmax"] == run.after["baddbmm"] == run.after["bmm"] == 0
    check_values(module, make, oracle=False)  # the twin doesn't know this spelling


@pytest.mark.parametrize("attend", [plain, batched])
def test_edits_as_the_one_operator_does(attend: Any) -> None:
    first, changed, found = tokens(0), tokens(2), []
    for module in (Attends(attend), Attends(spelled)):
        denoiser = denoiser_of(module, tokens)
        kept = denoiser.record(**first)[1]
        step = maskfx.EditStep(changed, a_mask(first), kept, any_step=True)
        found.append(denoiser.edit([step])[0])
    assert error(*found) < TOLERANCE


@pytest.mark.parametrize("attend", [observed, masked, across, lent, weakened, multiplied])
def test_keeps_what_the_one_operator_cannot_do(attend: Any) -> None:
    run = run_pass(canonicalize_attention, Attends(attend), joint)
    assert run.before["softmax"] == 1
    assert run.unchanged


def test_second_run_rewrites_nothing() -> None:
    assert run_pass(canonicalize_attention, shared(Attends), tokens).second_run_is_idle()


class OneKey(nn.Module):
    """Sites that attend to one token: its value is the result, whatever the scores."""

    def forward(self, hidden_states: Tensor, encoder_hidden_states: Tensor) -> Tensor:
        many = encoder_hidden_states[:, None]
        few = many.mean(2, keepdim=True)
        one = F.scaled_dot_product_attention(hidden_states[:, None], few, few.sin())
        two = F.scaled_dot_product_attention(hidden_states[:, None], many, many)
        return hidden_states + one[:, 0] + two[:, 0]


def test_attention_to_one_key_is_its_value() -> None:
    module = shared(OneKey)
    run = run_pass(canonicalize_attention, module, joint)
    assert run.before[NAME] == 2
    assert run.after[NAME] == 1
    check_values(module, joint)
