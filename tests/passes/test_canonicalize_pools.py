"""canonicalize_pools: pools to one value and maxima without indices are reductions."""

import torch.nn.functional as F
from torch import Tensor, nn

from maskfx.passes.canonicalize_pools import canonicalize_pools
from tests.passes.tools import check_values, picture, run_pass, shared


class Pooled(nn.Module):
    def forward(self, sample: Tensor) -> Tensor:
        x = sample.tanh()
        gate = F.adaptive_avg_pool2d(x, 1) + F.adaptive_max_pool2d(x, 1)
        return x * gate + x.max(1, keepdim=True).values - x.min(dim=1)[0][:, None]


class Indexed(nn.Module):
    """The indices of its maxima count."""

    def forward(self, sample: Tensor) -> Tensor:
        values, indices = sample.max(1, keepdim=True)
        return sample * values + indices


def test_rewrites_pools_and_maxima() -> None:
    run = run_pass(canonicalize_pools, shared(Pooled), picture)
    assert run.rewrites == 4
    assert (run.gained("mean"), run.gained("amax"), run.gained("amin")) == (1, 2, 1)
    check_values(shared(Pooled), picture, oracle=False)  # the twin has no maxima over sites


def test_keeps_maxima_whose_indices_are_used() -> None:
    assert run_pass(canonicalize_pools, Indexed(), picture).unchanged


def test_second_run_rewrites_nothing() -> None:
    assert run_pass(canonicalize_pools, shared(Pooled), picture).second_run_is_idle()
