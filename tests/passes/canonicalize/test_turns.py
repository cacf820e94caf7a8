"""canonicalize_turns: a convolution reads the picture as it lies, with its window turned."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from maskfx.passes.canonicalize.turns import canonicalize_turns
from tests.passes.tools import check_values, picture, run_pass

Around = Callable[["Convolved", Tensor], Tensor]


class Convolved(nn.Module):
    """Convolutions, with what is computed around them."""

    def __init__(self, around: Around) -> None:
        super().__init__()
        self.around, self.norm = around, nn.GroupNorm(2, 4)
        self.conv = nn.Conv2d(4, 4, 3, padding=1)
        self.tall = nn.Conv2d(4, 4, (5, 1), padding=(2, 0), groups=2)
        self.wide = nn.Conv2d(4, 4, 3, padding=(0, 2), dilation=(1, 2), bias=False)
        self.coarse = nn.Conv2d(4, 4, 3, padding=1, stride=2)
        self.same = nn.Conv2d(4, 4, (3, 2), padding="same")

    def forward(self, sample: Tensor) -> Tensor:
        return sample + self.around(self, sample)


def squared(x: Tensor) -> Tensor:
    return x * x


MOVED: dict[str, Around] = {
    "flip": lambda m, x: m.conv(x.flip(-1)).flip(3),
    "both flips": lambda m, x: m.tall(x.flip(-1).flip(2)).flip(2, 3),
    "norm": lambda m, x: F.silu(m.norm(m.conv(x.flip(2))) * 1.5).flip(2),
    "square": lambda m, x: (m.conv(x.flip(2)).exp() ** 2).mul(x.shape[3]).flip(2),
    "product": lambda m, x: squared(m.conv(x.flip(2))).flip(2),
    "scale": lambda m, x: (m.conv(x.flip(2)) * x.mean((2, 3), keepdim=True)).flip(2),
    "transpose": lambda m, x: m.tall(x.mT).transpose(2, 3),
    "windows": lambda m, x: F.pad(m.wide(x.permute(0, 1, 3, 2)), (0, 0, 1, 1)).mT,
    "same": lambda m, x: m.same(x.mT).mT,
    "coarse": lambda m, x: F.interpolate(m.coarse(x.mT).mT, scale_factor=2),
    "half turn": lambda m, x: torch.rot90(m.tall(torch.rot90(x, 2, [2, 3])), -2, [2, 3]),
    "quarter": lambda m, x: torch.rot90(m.tall(torch.rot90(x, 1, [2, 3])), -1, [2, 3]),
    "three quarters": lambda m, x: torch.rot90(m.conv(torch.rot90(x, 3, [2, 3])), 1, [2, 3]),
}


@pytest.mark.parametrize("case", MOVED)
def test_it_runs_on_rows(case: str) -> None:
    module = Convolved(MOVED[case])
    run = run_pass(canonicalize_turns, module, picture)
    assert run.rewrites
    assert not run.after["rot90"]
    check_values(module, picture, oracle=False)  # the twin knows no turned pictures


@pytest.mark.parametrize("case", MOVED)
def test_second_run_rewrites_nothing(case: str) -> None:
    run = run_pass(canonicalize_turns, Convolved(MOVED[case]), picture)
    assert run.second_run_is_idle()


KEPT: list[Around] = [
    lambda m, x: m.coarse(x.flip(3)).sum(),
    lambda m, x: m.same(x.flip(3)).flip(3),
    lambda m, x: m.conv(x.flip(1)).flip(1),
    lambda m, x: m.conv(x.flip(3) * x).flip(3),
    lambda m, x: m.conv(x.transpose(1, 2)[:, :4].sum(2, keepdim=True)),
]


@pytest.mark.parametrize("number", range(len(KEPT)))
def test_keeps_others(number: int) -> None:
    assert run_pass(canonicalize_turns, Convolved(KEPT[number]), picture).unchanged
