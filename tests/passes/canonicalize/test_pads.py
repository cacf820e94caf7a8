"""canonicalize_pads: axes of size one are widened by a choice, as zeros between sites are."""

from collections.abc import Callable

import pytest
import torch.nn.functional as F
from torch import Tensor, nn

from maskfx.passes.canonicalize.pads import canonicalize_pads
from tests.passes.tools import check_values, picture, run_pass, shared


class Inserted(nn.Module):
    """Zeros behind each row and column, a filter, and every second site again."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Conv2d(4, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1)

    def wide(self, x: Tensor) -> Tensor:
        b, c, h, w = x.shape
        apart = F.pad(x.reshape(b * c, h, 1, w, 1, 1), [0, 0, 0, 1, 0, 0, 0, 1])
        return apart.reshape(b, c, 2 * h, 2 * w)

    def forward(self, sample: Tensor) -> Tensor:
        return sample + self.last(self.wide(self.first(sample)))[:, :, ::2, ::2]


class Before(Inserted):
    """A number other than zero before each row and behind each column."""

    def wide(self, x: Tensor) -> Tensor:
        apart = F.pad(x[:, :, :, None, :, None], [0, 1, 0, 0, 1, 0], value=0.5)
        return apart.reshape(*x.shape[:2], 2 * x.shape[2], 2 * x.shape[3])


class Others(nn.Module):
    """Pads of larger axes, by nothing, of another mode, of truth values, and cuts."""

    def forward(self, sample: Tensor) -> Tensor:
        a = F.pad(sample, [1, 1, 1, 1])[:, :, 1:-1, 1:-1]
        b = F.pad(sample[:, :1], [0, 0, 0, 0])
        c = F.pad(sample, [1, 1, 1, 1], mode="replicate")[:, :, 1:-1, 1:-1]
        d = F.pad(sample[:, :2, ..., None] > 0, [0, 1]).sum(-1)[:, :1]
        e = F.pad(sample[:, :1, ..., None].expand(-1, -1, -1, -1, 2), [0, -1])[..., 0]
        return a + b + c + d + e


class MoreKeys(nn.Module):
    """Keys and values before and behind the sites, in attention written out."""

    def forward(self, sample: Tensor) -> Tensor:
        q = sample.flatten(2).mT[:, None]
        k, v = F.pad(q.cos(), [0, 0, 1, 2]), F.pad(q.sin(), [0, 0, 1, 2], value=0.5)
        mixed = (q @ k.mT).softmax(-1) @ v
        return sample + mixed[:, 0].mT.reshape(sample.shape)


@pytest.mark.parametrize("kind", [Inserted, Before])
def test_widens_axes_of_one_by_a_choice(kind: Callable[[], nn.Module]) -> None:
    module = shared(kind)
    run = run_pass(canonicalize_pads, module, picture)
    assert run.rewrites == run.gained("where") == -run.gained("pad") == 1
    check_values(module, picture, oracle=False)  # the twin knows no zeros between sites


def test_pads_of_keys_are_joins() -> None:
    module = shared(MoreKeys)
    run = run_pass(canonicalize_pads, module, picture)
    assert run.rewrites == run.gained("cat") == -run.gained("pad") == 2
    check_values(module, picture)


def test_keeps_other_pads() -> None:
    assert run_pass(canonicalize_pads, shared(Others), picture).unchanged


def test_second_run_rewrites_nothing() -> None:
    assert run_pass(canonicalize_pads, shared(Inserted), picture).second_run_is_idle()
