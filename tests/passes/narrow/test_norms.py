"""narrow_norms: over features as they are, over sites with the statistics of the rest."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from maskfx.ir.programs.sources import RestStats
from maskfx.passes.narrow.norms import narrow_norms
from tests.passes.tools import check_values, joint, picture, run_pass, shared, timed, tokens


class OverFeatures(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.rms = nn.LayerNorm(8), nn.RMSNorm(8)

    def forward(self, hidden_states: Tensor) -> Tensor:
        return torch.softmax(self.rms(self.layer(hidden_states).tanh()), -1)


class OverSites(nn.Module):
    """Group norms with and without weights, and a batch norm."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.GroupNorm(2, 4), nn.GroupNorm(4, 4, affine=False)

    def forward(self, sample: Tensor) -> Tensor:
        return self.second(self.first(sample).tanh())


class BatchNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(4).eval()
        assert self.norm.running_mean is not None
        assert self.norm.running_var is not None
        self.norm.running_mean.add_(0.5)
        self.norm.running_var.mul_(2)

    def forward(self, sample: Tensor) -> Tensor:
        return self.norm(sample.tanh())


class Channels(nn.Module):
    """A softmax along the channels of a picture, in the middle of its axes."""

    def forward(self, sample: Tensor) -> Tensor:
        products, sums = torch.cumprod(sample, 1), torch.logcumsumexp(sample, 1)
        return torch.softmax(sample, 1) + torch.cumsum(sample, 1) + products * sums


class Routed(nn.Module):
    """Two of five weights of each token are kept, and one number is added to a feature."""

    def forward(self, hidden_states: Tensor) -> Tensor:
        best, places = hidden_states[..., :5].softmax(-1).topk(2, -1)
        kept = torch.zeros_like(hidden_states).scatter(-1, places, best)
        more = hidden_states.scatter_add(2, places[..., :1] + 1, best[..., 1:])
        return more.sin() * kept.scatter(-1, places[..., :1], 0.5)


class Times(nn.Module):
    """Norms of the time embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.group = nn.LayerNorm(4), nn.GroupNorm(2, 4)

    def forward(self, sample: Tensor, timestep: Tensor) -> Tensor:
        embedded = timestep[:, None] * torch.arange(4.0)
        embedded = F.softmax(self.group(self.layer(embedded).exp()), -1)
        return sample * embedded[:, :, None, None]


def test_norms_over_features_run_on_rows() -> None:
    module = shared(OverFeatures)
    run = run_pass(narrow_norms, module, tokens)
    assert run.rewrites == 3
    for name in ("layer_norm", "rms_norm", "softmax"):
        assert run.before[name] == run.after[name] == 1
    check_values(module, tokens)


def test_norms_over_sites_use_the_rest() -> None:
    module = shared(OverSites)
    run = run_pass(narrow_norms, module, picture)
    assert run.rewrites == 2
    assert run.gained("group_scale") == run.gained("scale_shift") == 2
    assert run.after["group_norm"] == 0
    stats = [s for s in run.ctx.interface.inputs.values() if isinstance(s, RestStats)]
    assert [run.ctx.interface.taps[s.tap].stats for s in stats] == [2, 4]
    check_values(module, picture)


def test_batch_norm_is_a_product_and_a_sum() -> None:
    module = shared(BatchNorm)
    run = run_pass(narrow_norms, module, picture)
    assert run.rewrites == run.before["batch_norm"] == 1
    assert run.after["batch_norm"] == 0
    check_values(module, picture)


def test_softmax_along_channels() -> None:
    assert run_pass(narrow_norms, shared(Channels), picture).rewrites == 4
    check_values(shared(Channels), picture, oracle=False)  # the twin knows no cumsum


def test_writes_to_features_that_values_number() -> None:
    run = run_pass(narrow_norms, shared(Routed), tokens)
    assert run.before["scatter"] + run.before["scatter_add"] == 3
    assert run.rewrites == 4  # the softmax, too
    check_values(shared(Routed), tokens, oracle=False)  # the twin knows no scatter


def test_keeps_norms_without_sites() -> None:
    module = shared(Times)
    run = run_pass(narrow_norms, module, timed)
    assert run.before["layer_norm"] == run.before["group_norm"] == run.before["softmax"] == 1
    assert run.unchanged
    check_values(module, timed, oracle=False)


def test_second_run_rewrites_nothing() -> None:
    assert run_pass(narrow_norms, shared(OverSites), picture).second_run_is_idle()
    assert run_pass(narrow_norms, shared(OverFeatures), tokens).second_run_is_idle()


def test_norms_over_image_and_text_use_the_rest_of_the_image() -> None:
    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.GroupNorm(2, 8)

        def forward(self, hidden_states: Tensor, encoder_hidden_states: Tensor) -> Tensor:
            both = torch.cat([encoder_hidden_states, hidden_states], 1)
            mixed = self.norm(both.transpose(1, 2)).transpose(1, 2)
            return mixed[:, encoder_hidden_states.shape[1] :]

    module = Both()
    assert run_pass(narrow_norms, module, joint).rewrites == 1
    check_values(module, joint, oracle=False)
