"""canonicalize_pools: pools to one value are reductions."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from maskfx.passes.canonicalize.pools import canonicalize_pools
from tests.passes.tools import check_values, picture, run_pass, shared


class Pooled(nn.Module):
    def forward(self, sample: Tensor) -> Tensor:
        x = sample.tanh()
        gate = F.adaptive_avg_pool2d(x, 1) + F.adaptive_max_pool2d(x, 1)
        return x * gate


class Spread(nn.Module):
    def forward(self, sample: Tensor) -> Tensor:
        x = sample.tanh()
        variance, mean = torch.var_mean(x, dim=(2, 3), keepdim=True)
        deviation, middle = torch.std_mean(x, 1, unbiased=False, keepdim=True)
        return (x - mean) / (1 + variance) + (x - middle) * deviation


class Indexed(nn.Module):
    """The indices of its maxima count."""

    def forward(self, sample: Tensor) -> Tensor:
        values, indices = F.adaptive_max_pool2d(sample, 1, return_indices=True)
        return sample * values + indices


def test_rewrites_pools() -> None:
    run = run_pass(canonicalize_pools, shared(Pooled), picture)
    assert (run.rewrites, run.gained("mean"), run.gained("amax")) == (2, 1, 1)
    check_values(shared(Pooled), picture, oracle=False)  # the twin has no maxima over sites


def test_rewrites_spreads_with_means() -> None:
    run = run_pass(canonicalize_pools, shared(Spread), picture)
    assert (run.rewrites, run.gained("mean"), run.gained("var"), run.gained("std")) == (2, 2, 1, 1)
    check_values(shared(Spread), picture, oracle=False)


class InTurn(nn.Module):
    def forward(self, sample: Tensor) -> Tensor:
        x = sample.tanh()
        gate = x.mean(2, keepdim=True).mean(3, keepdim=True) + x.sum(-1).sum(-1)[..., None, None]
        return x * gate + x.mean([1, 3]).mean(1)[:, None, None, None]


class Parts(nn.Module):
    """Means of parts of the picture that don't meet between two sites."""

    def forward(self, sample: Tensor) -> Tensor:
        means = F.adaptive_avg_pool2d(sample.tanh(), (3, 5)).flatten(2)
        return sample.sin() * means.amax(-1)[..., None, None]


def test_rewrites_pools_to_a_few_parts() -> None:
    run = run_pass(canonicalize_pools, shared(Parts), picture)
    assert (run.rewrites, run.gained("matmul"), run.after["adaptive_avg_pool2d"]) == (1, 1, 0)
    check_values(shared(Parts), picture, oracle=False)


def test_joins_means_and_sums_in_turn() -> None:
    run = run_pass(canonicalize_pools, shared(InTurn), picture)
    assert (run.rewrites, run.after["mean"], run.after["sum"]) == (3, 2, 1)
    check_values(shared(InTurn), picture)


def test_keeps_means_in_turn_of_which_one_is_kept() -> None:
    class Kept(nn.Module):
        def forward(self, sample: Tensor) -> Tensor:
            lines = sample.mean(2, keepdim=True)
            return sample * lines.mean(3, keepdim=True) + lines

    assert run_pass(canonicalize_pools, Kept(), picture).unchanged


def test_keeps_maxima_whose_indices_are_used() -> None:
    assert run_pass(canonicalize_pools, Indexed(), picture).unchanged


def test_keeps_spreads_of_everything() -> None:
    class Whole(nn.Module):
        def forward(self, sample: Tensor) -> Tensor:
            variance, mean = torch.var_mean(sample, unbiased=False)
            return (sample - mean) / (1 + variance)

    assert run_pass(canonicalize_pools, Whole(), picture).unchanged


def test_second_run_rewrites_nothing() -> None:
    assert run_pass(canonicalize_pools, shared(Pooled), picture).second_run_is_idle()
