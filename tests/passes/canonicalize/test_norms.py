"""canonicalize_norms: norms over all sites are group norms."""

import torch.nn.functional as F
from torch import Tensor, nn

from maskfx.passes.canonicalize.norms import canonicalize_norms
from tests.passes.tools import check_values, picture, run_pass, shared


class Normed(nn.Module):
    def __init__(self, tracked: bool = False) -> None:
        super().__init__()
        self.first = nn.Conv2d(4, 4, 3, padding=1)
        self.norm = nn.InstanceNorm2d(4, affine=True, track_running_stats=tracked).eval()

    def forward(self, sample: Tensor) -> Tensor:
        return sample + self.norm(self.first(sample))


class OverSamples(nn.Module):
    def forward(self, sample: Tensor) -> Tensor:
        return sample + F.layer_norm(sample.sin(), sample.shape[1:])


def test_rewrites_an_instance_norm() -> None:
    run = run_pass(canonicalize_norms, shared(Normed), picture)
    assert run.rewrites == run.before["instance_norm"] == run.gained("group_norm") == 1
    check_values(shared(Normed), picture, oracle=False)  # the twin has no instance norms


def test_rewrites_a_layer_norm_over_a_sample() -> None:
    module = OverSamples()
    run = run_pass(canonicalize_norms, module, picture)
    assert run.rewrites == run.before["layer_norm"] == run.gained("group_norm") == 1
    check_values(module, picture, oracle=False)


def test_keeps_running_statistics() -> None:
    assert run_pass(canonicalize_norms, Normed(tracked=True), picture).unchanged


def test_second_run_rewrites_nothing() -> None:
    assert run_pass(canonicalize_norms, shared(Normed), picture).second_run_is_idle()
