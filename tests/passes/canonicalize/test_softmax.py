"""canonicalize_softmax: exponentials over their sum are a softmax."""

import torch
from torch import Tensor, nn

from maskfx.passes.canonicalize.softmax import canonicalize_softmax
from tests.passes.tools import check_values, nodes_of, run_pass, shared, tokens


class Written(nn.Module):
    """Over features, with their maximum subtracted; over sites; and divided after a product."""

    def forward(self, hidden_states: Tensor) -> Tensor:
        least = hidden_states.max(-1, keepdim=True).values
        e = (hidden_states - least).exp()
        x = e / e.sum(-1, keepdim=True)
        f = hidden_states.exp()
        y = f / f.sum(1, keepdim=True)
        scores = hidden_states @ hidden_states.mT
        g = (scores - scores.amax(-1, keepdim=True)).exp()
        return x + y + (g @ hidden_states) / g.sum(-1, keepdim=True)


class Others(nn.Module):
    """A sum with more in it, of other exponentials, over all, of what isn't exponentials."""

    def forward(self, hidden_states: Tensor) -> Tensor:
        e, f = hidden_states.exp(), hidden_states.sin().exp()
        a = e / (e.sum(-1, keepdim=True) + 1)
        b = e / f.sum(-1, keepdim=True)
        c = e / e.sum((1, 2), keepdim=True)
        return a + b + c + hidden_states / hidden_states.abs().sum(-1, keepdim=True)


class Shifted(nn.Module):
    """The maximum is subtracted before the operator, as old code does by itself."""

    def forward(self, hidden_states: Tensor) -> Tensor:
        heads = hidden_states.unflatten(2, (2, 4)).transpose(1, 2)
        scores = torch.einsum("bhid,bhjd->bhij", heads, heads)
        scores = scores - scores.amax(-1, keepdim=True).detach()
        found = torch.einsum("bhij,bhjd->bhid", scores.softmax(-1), heads)
        x = found.transpose(1, 2).flatten(2)
        return x + (x - x.max(-1, keepdim=True).values).log_softmax(-1)


class Moved(nn.Module):
    """What is subtracted differs along the axis."""

    def forward(self, hidden_states: Tensor) -> Tensor:
        x = (hidden_states - hidden_states.sin()).softmax(-1)
        return x + (hidden_states - hidden_states.mean(1, keepdim=True)).softmax(-1)


def test_drops_what_is_subtracted_from_all() -> None:
    run = run_pass(canonicalize_softmax, shared(Shifted), tokens)
    assert run.rewrites == -run.gained("sub") == 2
    check_values(shared(Shifted), tokens, oracle=False)


def test_keeps_other_differences() -> None:
    assert run_pass(canonicalize_softmax, shared(Moved), tokens).unchanged


def test_rewrites_exponentials_over_their_sum() -> None:
    run = run_pass(canonicalize_softmax, shared(Written), tokens)
    assert run.rewrites == run.gained("softmax") == 3
    assert run.after["exp"] == 0
    axes = [node.args[1] for node in nodes_of(run.graph, "softmax")]
    assert axes == [2, 1, 2]
    check_values(shared(Written), tokens, oracle=False)  # the twin has no attention spelled out


def test_keeps_other_quotients() -> None:
    assert run_pass(canonicalize_softmax, shared(Others), tokens).unchanged


def test_second_run_rewrites_nothing() -> None:
    assert run_pass(canonicalize_softmax, shared(Written), tokens).second_run_is_idle()
