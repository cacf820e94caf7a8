"""drop_guards: asserts of the export go."""

import torch
from torch import Tensor, fx, nn

from maskfx.passes.drop_guards import drop_guards
from tests.passes.tools import apply, check_values, picture, plain_context, run_pass, shared


class Casts(nn.Module):
    def forward(self, sample: Tensor) -> Tensor:
        return sample.to(torch.float64).relu().to(torch.float32) * 2


def test_drops_asserts() -> None:
    module = shared(Casts)
    run = run_pass(drop_guards, module, picture)
    assert run.before["_assert_tensor_metadata"] == run.rewrites > 0
    assert run.after["_assert_tensor_metadata"] == 0
    assert run.before - run.after == {"_assert_tensor_metadata": run.rewrites}
    check_values(module, picture)


def assert_positive(value: Tensor) -> Tensor:
    return value.abs()


def test_keeps_a_guard_whose_value_is_used() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    graph.output(graph.call_function(torch.relu, (graph.call_function(assert_positive, (x,)),)))
    assert apply(drop_guards, fx.GraphModule({}, graph), plain_context()).unchanged


def test_second_run_rewrites_nothing() -> None:
    assert run_pass(drop_guards, shared(Casts), picture).second_run_is_idle()
