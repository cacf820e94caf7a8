"""canonicalize_selects: what selects from an axis of size one is a view."""

from torch import Tensor, nn

from maskfx.passes.canonicalize.selects import canonicalize_selects
from tests.passes.tools import check_values, picture, run_pass, shared


class Selects(nn.Module):
    """The only channel of a mean: taken, taken apart, and written."""

    def forward(self, sample: Tensor) -> Tensor:
        mean = sample.mean(1, keepdim=True)
        (only,) = mean.exp().unbind(1)
        filled = mean.tanh()
        filled[:, 0] = mean.select(1, 0) * only
        return sample + filled


class Passes(nn.Module):
    """An axis that is inserted and selected from."""

    def forward(self, sample: Tensor) -> Tensor:
        return sample.tanh().unsqueeze(2).select(2, 0).sin()


class Wide(nn.Module):
    """Axes of other sizes, and a write that changes the type."""

    def forward(self, sample: Tensor) -> Tensor:
        first, *_ = sample.tanh().unbind(1)
        return sample + (first * sample.select(1, 2))[:, None]


def test_spells_selections_as_views() -> None:
    module = shared(Selects)
    run = run_pass(canonicalize_selects, module, picture)
    assert run.rewrites >= 3
    assert run.gained("squeeze") >= 2
    assert run.gained("unsqueeze") >= 1
    assert run.after["select"] == run.after["select_scatter"] == run.after["unbind"] == 0
    check_values(module, picture)


def test_an_inserted_axis_vanishes() -> None:
    module = shared(Passes)
    run = run_pass(canonicalize_selects, module, picture)
    assert run.rewrites == run.before["select"] == 1
    assert run.after["select"] == run.after["unsqueeze"] == run.after["squeeze"] == 0
    check_values(module, picture)


def test_keeps_axes_of_other_sizes() -> None:
    run = run_pass(canonicalize_selects, shared(Wide), picture)
    assert run.before["select"]
    assert run.before["unbind"]
    assert run.unchanged


def test_second_run_rewrites_nothing() -> None:
    assert run_pass(canonicalize_selects, shared(Selects), picture).second_run_is_idle()
