"""canonicalize_weights: attention with sums or multiples of softmaxes is several attentions."""

import torch
from torch import Tensor, nn

from maskfx.passes.canonicalize.weights import canonicalize_weights
from tests.passes.tools import check_values, run_pass, shared, tokens


class Heads(nn.Module):
    """Tokens in two heads."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.gate = nn.Linear(8, 24), nn.Parameter(torch.ones(2, 1, 1))

    def parts(self, x: Tensor) -> list[Tensor]:
        return list(self.qkv(x).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4))


class Differences(Heads):
    """One softmax less a share of another; gates of heads and of queries; values first."""

    def forward(self, hidden_states: Tensor) -> Tensor:
        q, k, v = self.parts(hidden_states)
        one, two = (a @ b.mT for a, b in zip(q.chunk(2, -1), k.chunk(2, -1), strict=True))
        weights = one.softmax(-1) - two.softmax(-1) * self.gate.sigmoid()
        scores = (k @ q.mT).softmax(-2) / (1 + q[..., :1].mT.square())
        return (weights @ v + (v.mT @ scores).mT).transpose(1, 2).flatten(2)


class Others(Heads):
    """A factor of each key, a bias behind the softmax, and weights that two softmaxes multiply."""

    def forward(self, hidden_states: Tensor) -> Tensor:
        q, k, v = self.parts(hidden_states)
        soft = (q @ k.mT).softmax(-1)
        out = (soft * k[..., :1].mT) @ v + (soft + torch.ones_like(soft).tril()) @ v
        return (out + (soft * (k @ q.mT).softmax(-1)) @ v).transpose(1, 2).flatten(2)


def test_takes_sums_and_multiples_apart() -> None:
    run = run_pass(canonicalize_weights, shared(Differences), tokens)
    assert run.rewrites == 3
    assert run.gained("matmul") == 1
    check_values(shared(Differences), tokens, oracle=False)  # the twin has no such attention


def test_keeps_what_is_no_sum_of_softmaxes() -> None:
    assert run_pass(canonicalize_weights, shared(Others), tokens).unchanged


def test_second_run_rewrites_nothing() -> None:
    assert run_pass(canonicalize_weights, shared(Differences), tokens).second_run_is_idle()
