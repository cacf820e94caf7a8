"""canonicalize_spreads: what meets a value repeated for each site meets the value itself."""

import torch
from torch import Tensor, nn

import maskfx
from maskfx.passes.canonicalize.spreads import canonicalize_spreads
from tests.passes.tools import check_values, error, run_pass, shared, timed


class Spreads(nn.Module):
    """Features of each place, moved by the timestep, which is repeated for each of them."""

    def __init__(self) -> None:
        super().__init__()
        self.time, self.table = nn.Linear(1, 8), nn.Parameter(torch.randn(2, 4))

    def forward(self, sample: Tensor, timestep: Tensor) -> Tensor:
        b, c, h, w = sample.shape
        rows = sample.permute(0, 2, 3, 1).reshape(b * h * w, 1, c)
        both = self.time(timestep[:, None]).repeat_interleave(h * w, dim=0).view(-1, 8)
        scale, shift = (self.table[None] + both.reshape(-1, 2, 4)).chunk(2, dim=1)
        out = rows * (1 + scale) + shift.sin()
        return out.view(b, h, w, c).permute(0, 3, 1, 2)


class Kept(nn.Module):
    """Values repeated a fixed number of times, and a repeated value that is averaged."""

    def forward(self, sample: Tensor, timestep: Tensor) -> Tensor:
        twice = timestep.repeat_interleave(2, dim=0).view(-1, 2)
        many = timestep.repeat_interleave(sample.shape[2] * sample.shape[3], dim=0)
        return sample * twice.mean() + many.cumsum(0).mean()


def test_meets_the_value_itself() -> None:
    module = shared(Spreads)
    run = run_pass(canonicalize_spreads, module, timed)
    assert run.rewrites == 2
    assert run.after["repeat_interleave"] == 0
    check_values(module, timed)


def test_keeps_fixed_repeats_and_what_is_no_broadcast() -> None:
    run = run_pass(canonicalize_spreads, shared(Kept), timed)
    assert run.before["repeat_interleave"]
    assert run.unchanged


def test_second_run_rewrites_nothing() -> None:
    assert run_pass(canonicalize_spreads, shared(Spreads), timed).second_run_is_idle()


def test_an_edit_computes_rows() -> None:
    denoiser = maskfx.compile(shared(Spreads))
    given = timed()
    wanted, cache = denoiser.record(**given)
    mask = torch.zeros(8, 12, dtype=torch.bool)
    mask[2:5, 3:6] = True
    [found] = denoiser.edit([maskfx.EditStep(given, mask, cache)])
    assert error(found, wanted) < 1e-4
    assert "Nothing runs in full" in denoiser.explain()
