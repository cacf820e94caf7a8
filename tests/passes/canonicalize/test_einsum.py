"""canonicalize_einsum: an einsum is permutes, sums and one product."""

import pytest
import torch
from torch import Tensor, nn

from maskfx.passes.canonicalize.einsum import canonicalize_einsum
from tests.passes.tools import Inputs, check_values, error, picture, run_pass, shared


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


def square(seed: int = 0, wide: bool = False) -> Inputs:
    """A picture whose height is its number of channels."""
    value: Tensor = picture(seed, wide)["sample"]
    return {"sample": value[:, :, :4].contiguous()}


def test_spells_a_permute() -> None:
    module = shared(Unpatch)
    run = run_pass(canonicalize_einsum, module, picture)
    assert run.rewrites == 1
    assert (run.before["einsum"], run.after["einsum"]) == (1, 0)
    assert run.gained("permute") == 1
    check_values(module, picture)


@pytest.mark.parametrize(
    ("equation", "weight", "operator"),
    [
        ("bchw,cd->bdhw", torch.randn(4, 3), "matmul"),  # a weight
        ("bchw,cde->behwd", torch.randn(4, 3, 2), "matmul"),
        ("bchw,c->bhw", torch.randn(4), "matmul"),  # a vector
        ("bchw,c->bhwc", torch.randn(4), "mul"),  # nothing is summed
        ("b c h w, o c -> b h w", torch.randn(3, 4), "matmul"),  # one operand is summed first
        ("bchw,ca->bhw", torch.randn(4, 1), "matmul"),  # an axis of size one
        ("bchw->bch", None, "sum"),
        ("...w->w...", None, "permute"),
        ("b...w,bcd->...d", torch.randn(2, 4, 5), "matmul"),
    ],
)
def test_spells_products_and_sums(equation: str, weight: Tensor | None, operator: str) -> None:
    module = Equation(equation, weight)
    run = run_pass(canonicalize_einsum, module, picture)
    assert (run.rewrites, run.after["einsum"]) == (1, 0)
    assert run.after[operator]
    inputs = picture()
    found = run.module(*inputs.values())
    assert error(found, module(**inputs)) < 1e-5


@pytest.mark.parametrize(
    ("equation", "weight"),
    [
        ("bchw,ch", torch.randn(4, 4)),  # doesn't name its result
        ("bccw->bw", None),  # a diagonal
    ],
)
def test_keeps_an_einsum_that_is_not_a_product(equation: str, weight: Tensor | None) -> None:
    run = run_pass(canonicalize_einsum, Equation(equation, weight), square)
    assert run.before["einsum"] == 1
    assert run.unchanged


class Three(nn.Module):
    """Three operands: linear attention with the inverse of its weights' sum."""

    def forward(self, sample: Tensor) -> Tensor:
        keys = sample.sigmoid().flatten(2)
        context = torch.einsum("bdn,ben->bde", keys, keys)
        total = 1 / torch.einsum("bdn,bd->bn", keys, keys.sum(-1))
        mixed = torch.einsum("bdn,bde,bn->ben", keys, context, total)
        return sample + mixed.unflatten(2, sample.shape[2:])


def test_multiplies_three_operands_in_turn() -> None:
    run = run_pass(canonicalize_einsum, shared(Three), picture)
    assert (run.rewrites, run.after["einsum"]) == (3, 0)
    assert run.gained("matmul") == 3
    inputs = picture()
    assert error(run.module(*inputs.values()), shared(Three)(**inputs)) < 1e-5
    check_values(shared(Three), picture, oracle=False)  # the twin knows no einsum


def test_second_run_rewrites_nothing() -> None:
    assert run_pass(canonicalize_einsum, shared(Unpatch), picture).second_run_is_idle()
