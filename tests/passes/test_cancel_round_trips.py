"""cancel_round_trips: marks vanish in pairs, the outer ones become inputs and outputs."""

import pytest
import torch
from torch import Tensor, fx, nn

from maskfx.ir.geometry.lanes import Batch, Feature, Lane, Tokens, set_lane
from maskfx.passes.cancel_round_trips import cancel_round_trips
from maskfx.passes.context import Unsupported, from_rows, to_rows
from tests.passes.tools import apply, check_values, plain_context, run_pass, shared, timed, tokens


class Two(nn.Module):
    """Two outputs, one of them an intermediate value, and one without sites."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        first = self.a(hidden_states)
        return first, self.b(first).tanh(), first.mean(1)


class Same(nn.Module):
    """One tap for two operators that read the same rows."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(4, 4, 3, padding=1), nn.Conv2d(4, 4, 5, padding=2)

    def forward(self, sample: Tensor, timestep: Tensor) -> Tensor:
        x = sample + timestep[:, None, None, None]
        return self.a(x.clone()) + self.b(x)


def test_lets_rows_flow() -> None:
    module = shared(Two)
    run = run_pass(cancel_round_trips, module, tokens)
    assert run.rewrites == run.before["to_rows"] + run.before["from_rows"] > 0
    assert run.after["to_rows"] == run.after["from_rows"] == 0
    assert [o.kind for o in run.ctx.interface.outputs if o] == ["rows", "rows", "sample"]
    check_values(module, tokens, oracle=False)  # the twin wants sites in every output


def test_taps_of_the_same_rows_are_one() -> None:
    module = shared(Same)
    run = run_pass(cancel_round_trips, module, timed)
    assert len(run.ctx.interface.taps) == 1
    check_values(module, timed)


def test_keeps_nothing_that_has_no_rule() -> None:
    """A full value that is still used is refused by name."""
    graph, lane = fx.Graph(), Lane(((Batch(),), (Tokens(("image",)),), (Feature(8),)))
    x = graph.placeholder("x")
    odd = graph.call_function(torch.flip, (x, [1]))
    rows = graph.call_function(to_rows, (odd,))
    full = graph.call_function(from_rows, (graph.call_function(torch.tanh, (rows,)),))
    for node in (x, odd, rows, full):
        set_lane(node, lane)
    graph.output(full)
    with pytest.raises(Unsupported, match=r"flip: no rule narrows") as refused:
        apply(cancel_round_trips, fx.GraphModule({}, graph), plain_context())
    assert refused.value.node is odd


def test_keeps_a_graph_without_marks() -> None:
    graph = fx.Graph()
    value = graph.call_function(torch.tanh, (graph.placeholder("x"),))
    set_lane(value, Lane(((Batch(),), (Feature(8),))))
    graph.output((value,))
    assert apply(cancel_round_trips, fx.GraphModule({}, graph), plain_context()).unchanged


def test_second_run_rewrites_nothing() -> None:
    run = run_pass(cancel_round_trips, shared(Two), tokens)
    outputs = list(run.ctx.interface.outputs)
    assert run.second_run_is_idle()
    assert run.ctx.interface.outputs == outputs
