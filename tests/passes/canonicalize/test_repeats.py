"""canonicalize_repeats: places that are repeated one by one are a view of repeated values."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import maskfx
from maskfx.passes.canonicalize.repeats import canonicalize_repeats
from tests.passes.tools import check_values, error, picture, run_pass, shared


class Repeats(nn.Module):
    """A picture made finer again, and features that are repeated."""

    def forward(self, sample: Tensor) -> Tensor:
        coarse = F.avg_pool2d(sample, 2).tanh()
        finer = coarse.repeat_interleave(2, 2).repeat_interleave(2, dim=-1)
        few, _ = sample.chunk(2, dim=1)
        return sample + finer * few.sin().repeat_interleave(2, 1)


class Tiled(nn.Module):
    """A table of each window, in a row for all samples."""

    def forward(self, sample: Tensor) -> Tensor:
        b, c, h, w = sample.shape
        x = sample.view(b, c, h // 2, 2, w // 2, 2).permute(0, 2, 4, 3, 5, 1).reshape(-1, 4, c)
        table = torch.arange(h // 2 * (w // 2) * 4).view(-1, 4, 1).cos()
        x = (x * table.repeat(b, 1, 1)).view(b, h // 2, w // 2, 2, 2, c)
        return x.permute(0, 5, 1, 3, 2, 4).reshape(b, c, h, w)


class InARow(nn.Module):
    """All places in a row, and repeats that a value counts."""

    def forward(self, sample: Tensor) -> Tensor:
        few = torch.tensor([1.0, 2.0]).repeat_interleave(2)
        counted = torch.tensor([1.0, 2.0]).repeat_interleave(torch.tensor([1, 3]))
        return sample * (few + counted)[:, None, None]


def test_spells_repeats_as_views() -> None:
    module = shared(Repeats)
    run = run_pass(canonicalize_repeats, module, picture)
    assert run.rewrites == run.before["repeat_interleave"] == run.gained("expand") == 3
    assert run.after["repeat_interleave"] == 0
    check_values(module, picture)


def test_spells_repeats_in_a_row_as_views() -> None:
    run = run_pass(canonicalize_repeats, shared(Tiled), picture)
    assert (run.rewrites, run.after["repeat"], run.gained("expand")) == (1, 0, 1)
    check_values(shared(Tiled), picture)


def test_keeps_counted_repeats_and_those_in_a_row() -> None:
    run = run_pass(canonicalize_repeats, shared(InARow), picture)
    assert run.before["repeat_interleave"]
    assert run.unchanged


def test_second_run_rewrites_nothing() -> None:
    assert run_pass(canonicalize_repeats, shared(Repeats), picture).second_run_is_idle()


def test_an_edit_computes_rows() -> None:
    torch.manual_seed(0)
    denoiser = maskfx.compile(shared(Repeats))
    sample = torch.randn(2, 4, 8, 12)
    wanted, cache = denoiser.record(sample=sample)
    mask = torch.zeros(8, 12, dtype=torch.bool)
    mask[2:5, 3:6] = True
    [found] = denoiser.edit([maskfx.EditStep({"sample": sample}, mask, cache)])
    assert error(found, wanted) < 1e-4
    assert "Nothing runs in full" in denoiser.explain()
