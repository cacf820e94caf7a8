"""inline_regions: the export's wrapped regions become plain nodes."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from maskfx.passes.inline_regions import inline_regions
from tests.passes.tools import Run, check_values, picture, run_pass, shared


class Region(nn.Module):
    """A part of the work in a region of its own, as rotary tables are computed in models."""

    def __init__(self, **autocast: Any) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.autocast: dict[str, Any] = {"device_type": "cpu", "enabled": False, **autocast}

    def forward(self, sample: Tensor) -> Tensor:
        with torch.autocast(**self.autocast):
            inner = torch.tanh(sample) * self.scale
            other = torch.sigmoid(sample)
        return inner + other


def wrapped(run: Run, when: str = "code") -> int:
    return getattr(run, when).count("= torch.ops.higher_order.wrap_with_autocast")


def test_inlines_a_region() -> None:
    module = shared(Region)
    run = run_pass(inline_regions, module, picture)
    assert run.rewrites == 1
    assert "wrap_with_autocast" in run.code_before
    assert "wrap_with_autocast" not in run.code
    assert run.gained("tanh") == run.gained("sigmoid") == run.gained("mul") == 1
    check_values(module, picture)


class Gradients(nn.Module):
    def forward(self, sample: Tensor) -> Tensor:
        with torch.enable_grad():
            inner = torch.tanh(sample)
        return inner + sample


def test_inlines_a_region_with_gradients() -> None:
    module = shared(Gradients)
    run = run_pass(inline_regions, module, picture)
    assert "wrap_with_set_grad_enabled" in run.code_before
    assert "wrap_with_set_grad_enabled" not in run.code
    assert run.rewrites == 1
    check_values(module, picture)


class Half(nn.Module):
    """A region whose autocast is on: inlined, it would run in another precision."""

    def __init__(self, **autocast: Any) -> None:
        super().__init__()
        self.linear = nn.Linear(12, 12)
        self.autocast: dict[str, Any] = {"device_type": "cpu", **autocast}

    def forward(self, sample: Tensor) -> Tensor:
        with torch.autocast(**self.autocast):
            inner = self.linear(sample)
        return inner.float() + sample


@pytest.mark.parametrize("dtype", [torch.bfloat16, None])
def test_keeps_a_region_in_another_precision(dtype: torch.dtype | None) -> None:
    """A capture has none: its casts are operators. So the graph is that of the export alone."""
    module = torch.export.export(Half(dtype=dtype), (torch.ones(1, 12),)).graph_module
    assert "wrap_with_autocast" in module.code
    context: Any = None
    assert inline_regions(module.graph, context) == 0
    run = run_pass(inline_regions, Half(dtype=dtype), picture)
    assert "wrap_with_autocast" not in run.code_before
    assert run.unchanged


def test_second_run_rewrites_nothing() -> None:
    assert run_pass(inline_regions, shared(Region), picture).second_run_is_idle()
