"""canonicalize_pairs: attention without a softmax is one operator, or products in another order."""

from collections.abc import Callable
from functools import cache

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from maskfx.passes.canonicalize.pairs import canonicalize_pairs
from tests.passes.tools import Run, check_values, nodes_of, run_pass, tokens

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


def sigmoid(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.sigmoid(q @ k.mT * 0.5 - 1) @ v


def turned(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Keys first, values last but one."""
    return (v.mT @ F.relu(k @ q.mT).square()).mT


def shared_steps(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """What all keys share is multiplied and added before the function, and divided after it."""
    scores = q @ k.mT * q.mean(-1, keepdim=True).exp() - k.shape[2]
    return (F.silu(scores + q[..., :1]) / (q.square().sum(-1, keepdim=True) + 1)) @ v


def normalised(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    weights = F.relu(q @ k.mT)
    return (weights / (weights.sum(-1, keepdim=True) + 1)) @ v + weights.mean(3)[..., None]


def linear(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.mT / q.shape[2]) @ v


def batched(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    a, b, c = (t.flatten(0, 1) for t in (q, k, v))
    scores = torch.baddbmm(a.new_zeros(1), a, b.mT, beta=0, alpha=0.3)
    return torch.bmm(torch.tanh(scores), c).unflatten(0, q.shape[:2])


def mixed(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """A value is added between two functions."""
    return F.relu(torch.tanh(q @ k.mT) + q[..., :1]) @ v


def by_key(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Each key has a factor."""
    return (torch.sigmoid(q @ k.mT) * k[..., :1].mT) @ v


def over_sites(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return v @ torch.sigmoid(q.mT @ k)


def soft(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.tanh((q @ k.mT).softmax(-2)) @ v


def capped(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (20 * torch.tanh(q @ k.mT / 20)).softmax(-1) @ v


def hardly_capped(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Scores whose exponentials may be too large."""
    return (200 * torch.tanh(q @ k.mT / 200)).softmax(-1) @ v


class Attends(nn.Module):
    """Tokens in two heads, attended to in one way."""

    def __init__(self, attend: Attend) -> None:
        super().__init__()
        self.attend, self.qkv = attend, nn.Linear(8, 24)

    def forward(self, hidden_states: Tensor) -> Tensor:
        q, k, v = self.qkv(hidden_states).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4)
        return hidden_states + self.attend(q, k, v).transpose(1, 2).flatten(2)


@cache
def module_of(attend: Attend) -> nn.Module:
    """The module that attends in this way, made once, so that it is captured once."""
    return Attends(attend)


STEPS: dict[Attend, list[str]] = {
    sigmoid: ["mul 0.5, sub 1.0, sigmoid"],
    turned: ["relu, square"],
    shared_steps: ["silu"],
    normalised: ["relu", "relu", "relu"],
    batched: ["mul 0.3, tanh"],
    capped: ["div 20.0, tanh, mul 20.0, exp"],
}
KEPT = (mixed, by_key, over_sites, soft, hardly_capped)


def run_of(attend: Attend) -> Run:
    return run_pass(canonicalize_pairs, module_of(attend), tokens)


@pytest.mark.parametrize("attend", STEPS, ids=lambda f: f.__name__)
def test_rewrites_functions_of_scores(attend: Attend) -> None:
    run = run_of(attend)
    assert run.rewrites == run.gained("pair_sum") == len(STEPS[attend])
    assert [node.args[3] for node in nodes_of(run.graph, "pair_sum")] == STEPS[attend]
    assert run.after["matmul"] == run.after["bmm"] == 0
    check_values(module_of(attend), tokens, oracle=False)  # the twin has none spelled out


def test_multiplies_keys_by_values_first_without_a_function() -> None:
    run = run_of(linear)
    assert (run.rewrites, run.gained("pair_sum")) == (1, 0)
    first, second = nodes_of(run.graph, "matmul")
    assert second.args[1] is first
    check_values(module_of(linear), tokens, oracle=False)


@pytest.mark.parametrize("attend", KEPT, ids=lambda f: f.__name__)
def test_keeps_weights_of_more_than_a_score(attend: Attend) -> None:
    assert run_of(attend).unchanged


@pytest.mark.parametrize("attend", [*STEPS, linear], ids=lambda f: f.__name__)
def test_second_run_rewrites_nothing(attend: Attend) -> None:
    assert run_of(attend).second_run_is_idle()
