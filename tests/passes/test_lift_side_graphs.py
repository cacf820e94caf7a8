"""lift_side_graphs: what isn't computed on rows gets graphs of its own."""

import torch
from torch import Tensor, nn

from maskfx.ir.programs.sources import Given
from maskfx.passes.lift_side_graphs import lift_side_graphs
from tests.passes.tools import check_values, joint, picture, run_pass, shared, tokens


class Text(nn.Module):
    """The text is projected and pooled, the picture is shifted by it."""

    def __init__(self) -> None:
        super().__init__()
        self.text = nn.Linear(8, 8)
        self.image = nn.Linear(8, 8)

    def forward(self, hidden_states: Tensor, encoder_hidden_states: Tensor) -> Tensor:
        text = torch.sigmoid(self.text(encoder_hidden_states)).mean(1, keepdim=True)
        return self.image(hidden_states) + text


class Flips(nn.Module):
    """No rule narrows a flip: it runs in full, from the argument on."""

    def forward(self, sample: Tensor) -> Tensor:
        return torch.tanh(sample) + torch.sigmoid(sample).flip(3)


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, hidden_states: Tensor) -> Tensor:
        return torch.tanh(self.linear(hidden_states))


def test_lifts_what_belongs_to_the_request() -> None:
    module = shared(Text)
    run = run_pass(lift_side_graphs, module, joint)
    assert run.rewrites == 1
    assert (run.before["linear"], run.after["linear"]) == (2, 1)
    assert run.gained("sigmoid") == run.gained("mean") == -1
    assert run.ctx.sides["request"].nodes == 3
    assert run.ctx.sides["dense"].nodes == 0
    origins = [s.origin for s in run.ctx.interface.inputs.values() if isinstance(s, Given)]
    assert origins == ["step", "request"]
    check_values(module, joint)


def test_lifts_what_runs_in_full() -> None:
    module = shared(Flips)
    run = run_pass(lift_side_graphs, module, picture)
    assert run.rewrites == 1
    assert (run.before["flip"], run.after["flip"]) == (1, 0)
    assert (run.before["sigmoid"], run.after["sigmoid"]) == (1, 0)
    assert run.after["tanh"] == run.after["add"] == 1
    assert run.ctx.sides["dense"].nodes == 2
    check_values(module, picture, dense=1, oracle=False)  # the twin knows no flip


def test_keeps_weights_and_the_step() -> None:
    run = run_pass(lift_side_graphs, shared(Plain), tokens)
    assert run.unchanged
    assert run.ctx.sides["request"].lanes == run.ctx.sides["dense"].lanes == []


def test_second_run_rewrites_nothing() -> None:
    assert run_pass(lift_side_graphs, shared(Text), joint).second_run_is_idle()


def test_second_run_keeps_the_interface() -> None:
    run = run_pass(lift_side_graphs, shared(Text), joint)
    inputs, sides = dict(run.ctx.interface.inputs), dict(run.ctx.sides)
    assert run.second_run_is_idle()
    assert run.ctx.interface.inputs == inputs
    assert run.ctx.sides == sides
