"""canonicalize_composites: operators without rules of their own are expressed by others."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from maskfx.passes.canonicalize.composites import canonicalize_composites
from tests.passes.tools import check_values, picture, run_pass


class Between(nn.Module):
    """An operator between two functions of the features."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, sample: Tensor) -> Tensor:
        return self.function(sample.tanh()).exp()


SLOPES = torch.linspace(0.1, 0.4, 4)
MATRIX = torch.linspace(-1, 1, 16).reshape(4, 4)


def by_matrix(x: Tensor, product: Callable[[Tensor], Tensor]) -> Tensor:
    """A product of flat rows."""
    rows = x.permute(0, 2, 3, 1)
    return product(rows.reshape(-1, 4)).reshape(rows.shape).permute(0, 3, 1, 2)


CASES: dict[str, tuple[str, Callable[[Tensor], Tensor]]] = {
    "glu": ("glu", lambda x: F.glu(torch.cat([x, 2 * x], 1), 1)),
    "slopes": ("prelu", lambda x: F.prelu(x, SLOPES)),
    "leaky": ("rrelu", lambda x: F.rrelu(x, 0.1, 0.4)),
    "similarity": ("cosine_similarity", lambda x: x * F.cosine_similarity(x, x.cos(), 1)[:, None]),
    "difference": ("diff", lambda x: F.pad(x.diff(dim=1), (0, 0, 0, 0, 0, 1))),
    "shuffled": ("channel_shuffle", lambda x: F.channel_shuffle(x, 2)),
    "vector": ("matmul", lambda x: x * (x.permute(0, 2, 3, 1) @ SLOPES)[:, None]),
    "mm": ("mm", lambda x: by_matrix(x, lambda rows: torch.mm(rows, MATRIX))),
    "addmm": ("addmm", lambda x: by_matrix(x, lambda rows: torch.addmm(SLOPES, rows, MATRIX))),
    "picked": ("index", lambda x: x[:, [3, 1, 0, 0]]),
    "one picked": ("index", lambda x: x * x[:, [2]]),
    "looked up": ("index", lambda x: x + MATRIX[x.argmax(1)].movedim(-1, 1)),
    "looked up from behind": ("index", lambda x: x + MATRIX[x.argmax(1) - 4].movedim(-1, 1)),
    "hot": ("one_hot", lambda x: x + F.one_hot(x.argmax(1), 4).movedim(-1, 1)),
    "sorted": ("sort", lambda x: x.sort(1, descending=True).values + x.sort(1).indices),
    "greatest": ("max", lambda x: x * x.max(1, keepdim=True)[0] + x.max(1, True).indices),
    "least": ("min", lambda x: x + x.min(1)[1][:, None] * x.min(dim=1).values[:, None]),
    "median": ("median", lambda x: x - x.median(1, True)[0] + x.mT.median(dim=1)[1].mT[:, None]),
    "third": ("kthvalue", lambda x: x - x.kthvalue(3, 1, True)[0] + x.kthvalue(1, 1)[1][:, None]),
    "quantile": ("quantile", lambda x: x - x.quantile(0.3, 1, True) - x.quantile(1.0, 1)[:, None]),
    "zeros": ("new_zeros", lambda x: x + (x.new_zeros(1, 4, 1, 1) + x.new_ones(1)).cumsum(1)),
    "number": ("new_full", lambda x: x * x.new_full((4, 1, 1), 0.5)),
    "order": ("argsort", lambda x: x.mT.movedim(1, -1).argsort().movedim(-1, 1).mT + x),
}


@pytest.mark.parametrize("case", CASES)
def test_it_runs_on_rows(case: str) -> None:
    name, function = CASES[case]
    module = Between(function)
    run = run_pass(canonicalize_composites, module, picture)
    assert run.rewrites
    assert run.after[name] == (case == "order")  # its axis is named
    check_values(module, picture, oracle=False)  # none of them mixes sites


def test_second_run_rewrites_nothing() -> None:
    module = Between(
        lambda x: F.glu(by_matrix(x.sort(1).values, lambda rows: rows.mm(MATRIX)), 1).repeat(
            1, 2, 1, 1
        )
    )
    assert run_pass(canonicalize_composites, module, picture).second_run_is_idle()


KEPT: list[Callable[[Tensor], Tensor]] = [
    lambda x: x.diff(n=2, dim=1),
    lambda x: F.prelu(x, SLOPES[:1]),
    lambda x: torch.sort(x, stable=True, dim=1).values,
    lambda x: torch.argsort(x, stable=True, dim=1) + x,
    lambda x: x.flatten(2).median(2)[0] + x.flatten(2).quantile(0.3, 2, interpolation="lower"),
    lambda x: x[:, torch.tensor([[0, 1], [2, 3]])].flatten(1, 2),
    lambda x: x.flatten(2) @ x.flatten(2).mT,
]


@pytest.mark.parametrize("number", range(len(KEPT)))
def test_keeps_others(number: int) -> None:
    class Sum(Between):
        def forward(self, sample: Tensor) -> Tensor:
            return sample + super().forward(sample).sum()

    assert run_pass(canonicalize_composites, Sum(KEPT[number]), picture).unchanged
