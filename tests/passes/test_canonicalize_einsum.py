"""canonicalize_einsum: an einsum that only permutes is a permute."""

import pytest
import torch
from torch import Tensor, nn

from maskfx.passes.canonicalize_einsum import canonicalize_einsum
from tests.passes.tools import check_values, picture, run_pass, shared


class Unpatch(nn.Module):
    """(b, c p q, h, w) to (b, c, h p, w q), spelled as DiT spells it."""

    def forward(self, sample: Tensor) -> Tensor:
        b, _, h, w = sample.shape
        wide = torch.einsum(
            "bpqhwc -> bchpwq",
            sample.permute(0, 2, 3, 1).reshape(b, h, w, 2, 2, 1).permute(0, 3, 4, 1, 2, 5),
        )
        back = wide.reshape(b, 1, h, 2, w, 2).permute(0, 1, 3, 5, 2, 4).reshape(b, 4, h, w)
        return torch.tanh(back)


class Equation(nn.Module):
    def __init__(self, equation: str, weight: Tensor | None = None) -> None:
        super().__init__()
        self.equation = equation
        self.weight = None if weight is None else nn.Parameter(weight)

    def forward(self, sample: Tensor) -> Tensor:
        others = [] if self.weight is None else [self.weight]
        mixed = torch.einsum(self.equation, sample, *others)
        return sample + mixed.mean()


def test_spells_a_permute() -> None:
    module = shared(Unpatch)
    run = run_pass(canonicalize_einsum, module, picture)
    assert run.rewrites == 1
    assert (run.before["einsum"], run.after["einsum"]) == (1, 0)
    assert run.gained("permute") == 1
    check_values(module, picture)


@pytest.mark.parametrize(
    ("equation", "weight"),
    [
        ("bchw,cd->bdhw", torch.eye(4)),  # multiplies
        ("bchw->bch", None),  # sums
        ("...w->w...", None),  # permutes, but doesn't say how many axes
    ],
)
def test_keeps_an_einsum_that_multiplies_or_sums(equation: str, weight: Tensor | None) -> None:
    run = run_pass(canonicalize_einsum, Equation(equation, weight), picture)
    assert run.before["einsum"] == 1
    assert run.unchanged


def test_second_run_rewrites_nothing() -> None:
    assert run_pass(canonicalize_einsum, shared(Unpatch), picture).second_run_is_idle()
