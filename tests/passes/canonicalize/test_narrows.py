"""canonicalize_narrows: a part of an axis by its first place and length is a slice."""

import pytest
import torch
from torch import Tensor, nn

import maskfx
from maskfx.passes.canonicalize.narrows import canonicalize_narrows
from tests.passes.tools import check_values, error, picture, run_pass, shared


class Narrows(nn.Module):
    """Parts of features and of the picture, by numbers and by its size."""

    def forward(self, sample: Tensor) -> Tensor:
        height, width = sample.shape[-2:]
        inner = sample.tanh().narrow(3, 1, width - 1).narrow(2, 0, height - 1)
        some = torch.cat([sample.narrow(1, 1, 2), sample.narrow(1, 0, 2)], 1)
        return some.sin() + nn.functional.pad(inner, (1, 0, 0, 1))


class FromTheEnd(nn.Module):
    """A part that begins at a place counted from the end."""

    def forward(self, sample: Tensor) -> Tensor:
        return sample + sample.tanh().narrow(1, -2, 1)


def test_spells_parts_as_slices() -> None:
    module = shared(Narrows)
    run = run_pass(canonicalize_narrows, module, picture)
    assert run.rewrites == run.before["narrow"] == run.gained("slice") == 4
    assert run.after["narrow"] == 0
    check_values(module, picture)


def test_parts_counted_from_the_end() -> None:
    run = run_pass(canonicalize_narrows, shared(FromTheEnd), picture)
    assert run.rewrites == run.before["narrow"] == run.gained("slice") == 1
    assert not run.after["narrow"]
    check_values(shared(FromTheEnd), picture)


def test_keeps_slices() -> None:
    class Slices(nn.Module):
        def forward(self, sample: Tensor) -> Tensor:
            return sample + sample.tanh()[:, 1:2]

    run = run_pass(canonicalize_narrows, shared(Slices), picture)
    assert run.before["slice"]
    assert run.unchanged


def test_second_run_rewrites_nothing() -> None:
    assert run_pass(canonicalize_narrows, shared(Narrows), picture).second_run_is_idle()


@pytest.mark.parametrize("size", [(8, 8), (7, 10)])
def test_edits_of_parts_of_the_picture_compute_rows(size: tuple[int, int]) -> None:
    torch.manual_seed(0)
    denoiser = maskfx.compile(shared(Narrows))
    sample = torch.randn(1, 4, *size)
    wanted, cache = denoiser.record(sample=sample)
    mask = torch.zeros(size, dtype=torch.bool)
    mask[2:5, 3:6] = True
    [found] = denoiser.edit([maskfx.EditStep({"sample": sample}, mask, cache)])
    assert error(found, wanted) < 1e-4
    assert "Nothing runs in full" in denoiser.explain()
