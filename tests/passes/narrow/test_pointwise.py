"""narrow_pointwise: elementwise on rows, a request's own value spread to its rows."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from maskfx.ir.programs.sources import Owner
from maskfx.passes.narrow.pointwise import narrow_pointwise
from tests.passes.tools import check_values, joint, numbers, picture, run_pass, shared, timed


class Shifts(nn.Module):
    """Rows with numbers, rows, a request's value and parameters of several shapes."""

    def __init__(self) -> None:
        super().__init__()
        self.each, self.row = nn.Parameter(numbers(4, 1, 1, seed=1)), nn.Parameter(torch.ones(1))

    def forward(self, sample: Tensor, timestep: Tensor) -> Tensor:
        x = sample * 2 + timestep[:, None, None, None]
        x = torch.where(x > 0, x, self.each * x).clamp(-3, 3) * self.row
        return x.tanh() + sample


class Positions(nn.Module):
    """A table for every site of the picture, another value for every site of a request."""

    def forward(self, hidden_states: Tensor, encoder_hidden_states: Tensor) -> Tensor:
        table = torch.arange(hidden_states.shape[1])[:, None] * torch.ones(8)
        return hidden_states.tanh() + table.cos() * encoder_hidden_states.mean(1, keepdim=True)


class Separable(nn.Module):
    """A table for the picture's rows and one for its columns."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(4, 4, 3, padding=1)

    def forward(self, sample: Tensor) -> Tensor:
        y, x = (torch.arange(n) / 7 for n in sample.shape[2:])
        wide = self.convolution(sample) * y.cos()[None, None, :, None] + x.sin()
        return self.convolution(wide + torch.arange(4.0).sin()[:, None, None] * y[:, None])


class Times(nn.Module):
    def forward(self, sample: Tensor, timestep: Tensor) -> Tensor:
        level = (timestep * 2).sin()
        return torch.relu(sample) if level is None else sample * level[:, None, None, None]


class Rarely(nn.Module):
    """Elementwise functions that few models use, each finite for these values."""

    def forward(self, sample: Tensor) -> Tensor:
        x, y = sample.tanh() / 2, sample.cos()
        out = torch.atan2(x, y) + torch.hypot(x, y) + torch.copysign(x, y) + torch.erfinv(x)
        out = out + torch.logaddexp(x, y) + F.logsigmoid(x) + torch.xlogy(y.exp(), y.exp())
        out = out + x.fmax(y) + torch.asinh(x) + torch.atanh(x) + torch.acosh(2 + x) + torch.sinc(x)
        out = (
            out
            + F.softshrink(x, 0.1)
            + F.hardshrink(y, 0.2)
            + x.fmax(y)
            + (3 * x).frac()
            + torch.erfc(x)
        )
        out = out + torch.logit(x.sigmoid()) + torch.log10(2 + x) + x.isfinite() + x.fmin(y)
        out = out + torch.lgamma(2 + x) + torch.digamma(2 + x) + torch.i0(x) + x.signbit()
        out = out + torch.deg2rad(x) + torch.rad2deg(x) / 9 + torch.logaddexp2(x, y)
        return out + torch.nextafter(x, y) + torch.special.expit(x) + torch.special.i0(y)


def test_functions_that_few_models_use_run_on_rows() -> None:
    run = run_pass(narrow_pointwise, Rarely(), picture)
    assert not run.ctx.dense
    check_values(Rarely(), picture)


def test_runs_on_rows() -> None:
    module = shared(Shifts)
    run = run_pass(narrow_pointwise, module, timed)
    assert run.rewrites >= 8
    assert run.gained("index_select") == 1  # the timestep, spread to its rows
    assert run.after["tanh"] == run.before["tanh"]
    assert sum(isinstance(s, Owner) for s in run.ctx.interface.inputs.values()) == 1
    check_values(module, timed)


def test_tables_become_rows() -> None:
    module = shared(Positions)
    run = run_pass(narrow_pointwise, module, joint)
    assert run.rewrites >= 2
    check_values(module, joint)


def test_tables_of_rows_and_columns_become_rows() -> None:
    module = Separable()
    run = run_pass(narrow_pointwise, module, picture)
    assert run.rewrites == 3
    check_values(module, picture)


def test_keeps_operators_without_sites() -> None:
    module = shared(Times)
    run = run_pass(narrow_pointwise, module, timed)
    assert run.rewrites == 1  # the last product alone
    assert "to_rows(sin" not in run.code
    again = run.code
    assert run.second_run_is_idle()
    assert run.code == again
    check_values(module, timed)


def test_keeps_a_graph_whose_only_products_have_no_sites() -> None:
    """Everything on sites here is done by other passes."""

    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.convolution = nn.Conv2d(4, 4, 1)

        def forward(self, sample: Tensor) -> Tensor:
            return self.convolution(sample)

    assert run_pass(narrow_pointwise, Scaled(), picture).unchanged


def test_second_run_rewrites_nothing() -> None:
    assert run_pass(narrow_pointwise, shared(Shifts), timed).second_run_is_idle()
