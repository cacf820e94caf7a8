"""mark_stages: what changes with the step, and what belongs to the request."""

import torch
from torch import Tensor, nn

from maskfx.passes.mark_stages import CONST, REQUEST, STEP, mark_stages, stage_of
from tests.passes.tools import check_values, joint, nodes_of, picture, run_pass, shared


class Stages(nn.Module):
    """One operator of each stage."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.ones(8))
        self.text = nn.Linear(8, 8)

    def forward(self, hidden_states: Tensor, encoder_hidden_states: Tensor) -> Tensor:
        constant = torch.exp(self.shift)
        text = torch.sigmoid(self.text(encoder_hidden_states)).mean(1, keepdim=True)
        return torch.tanh(hidden_states + text) * constant


class Positions(nn.Module):
    """A table made from the picture's size alone."""

    def forward(self, sample: Tensor) -> Tensor:
        rows = torch.arange(sample.shape[2], dtype=torch.float32)
        return sample + torch.cos(rows)[:, None]


def stage_of_only(run_graph: object, name: str) -> int:
    (node,) = nodes_of(run_graph, name)  # type: ignore[arg-type]
    return stage_of(node)


def test_marks_stages() -> None:
    module = shared(Stages)
    run = run_pass(mark_stages, module, joint)
    assert stage_of_only(run.graph, "exp") == CONST
    assert stage_of_only(run.graph, "sigmoid") == REQUEST
    assert stage_of_only(run.graph, "tanh") == STEP
    assert stage_of_only(run.graph, "mul") == STEP
    assert run.unchanged  # it only annotates
    check_values(module, joint)


def test_keeps_what_only_knows_the_size_out_of_the_step() -> None:
    module = shared(Positions)
    run = run_pass(mark_stages, module, picture)
    assert stage_of_only(run.graph, "cos") == REQUEST
    assert stage_of_only(run.graph, "add") == STEP
    assert run.unchanged


class Blank(nn.Module):
    """A blank picture of the sample's type, described by a few numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Conv2d(3, 4, 3, padding=1)

    def forward(self, sample: Tensor) -> Tensor:
        blank = sample.new_zeros(sample.shape[0], 3, *sample.shape[2:])
        return sample.tanh() + self.mix(blank).exp()


def test_a_blank_picture_belongs_to_the_request() -> None:
    module = shared(Blank)
    run = run_pass(mark_stages, module, picture)
    assert stage_of_only(run.graph, "conv2d") == stage_of_only(run.graph, "exp") == REQUEST
    assert stage_of_only(run.graph, "tanh") == STEP
    check_values(module, picture)


def test_a_table_of_rows_alone_has_a_program() -> None:
    check_values(shared(Positions), picture)


def test_second_run_rewrites_nothing() -> None:
    run = run_pass(mark_stages, shared(Stages), joint)
    stages = [stage_of(n) for n in run.graph.nodes]
    assert run.second_run_is_idle()
    assert [stage_of(n) for n in run.graph.nodes] == stages
