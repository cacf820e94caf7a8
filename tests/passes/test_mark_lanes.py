"""mark_lanes: what each axis of each value means; what no rule covers is to run in full."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from maskfx.ir.geometry.lanes import lane_of
from maskfx.passes.mark_lanes import mark_lanes
from tests.passes.tools import (
    Make,
    check_values,
    joint,
    nodes_of,
    picture,
    run_pass,
    shared,
    timed,
    tokens,
)


class Attends(nn.Module):
    """A convolution down, attention over its sites, and up again."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Conv2d(4, 6, 3, stride=2, padding=1)
        self.qkv = nn.Linear(6, 18)
        self.up = nn.Conv2d(6, 4, 3, padding=1)

    def forward(self, sample: Tensor, timestep: Tensor) -> Tensor:
        x = self.down(sample) + timestep[:, None, None, None]
        flat = x.flatten(2).transpose(1, 2)
        q, k, v = (
            part.unflatten(-1, (2, 3)).transpose(1, 2) for part in self.qkv(flat).chunk(3, -1)
        )
        mixed = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        x = mixed.transpose(1, 2).unflatten(2, x.shape[2:])
        return self.up(F.interpolate(x, scale_factor=2.0, mode="nearest"))


class Function(nn.Module):
    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, sample: Tensor) -> Tensor:
        return sample + self.function(sample)


def lanes(graph: torch.fx.Graph, name: str) -> list[str]:
    return [str(lane_of(n)) for n in nodes_of(graph, name)]


def test_marks_lanes() -> None:
    module = shared(Attends)
    run = run_pass(mark_lanes, module, timed)
    assert lanes(run.graph, "conv2d") == ["[batch, 6, y1, x1]", "[batch, 4, y0, x0]"]
    assert lanes(run.graph, "linear") == ["[batch, y1 x1, 18]"]
    assert lanes(run.graph, "scaled_dot_product_attention") == ["[batch, 2, y1 x1, 3]"]
    assert lanes(run.graph, "upsample_nearest2d") == ["[batch, 2 3, y0, x0]"]
    assert run.ctx.dense == {}
    assert run.unchanged  # it only annotates
    check_values(module, timed)


def test_a_table_lies_along_the_tokens_that_a_choice_by_it_meets() -> None:
    class Chosen(nn.Module):
        """A mask over tokens picks one of two scales of each sample."""

        odd: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("odd", torch.arange(25) % 2 == 1)

        def forward(self, hidden_states: Tensor, encoder_hidden_states: Tensor) -> Tensor:
            both = torch.cat([encoder_hidden_states, hidden_states], 1)
            means = hidden_states.mean(1, keepdim=True)
            scale = torch.where(self.odd[None, :, None], means, means.exp())
            return (both * (1 + scale))[:, encoder_hidden_states.shape[1] :]

    run = run_pass(mark_lanes, Chosen(), joint)
    assert lanes(run.graph, "where") == ["[batch, 5+image, 8]"] or lanes(run.graph, "where") == [
        "[batch, text:0+image, 8]"
    ]
    assert run.ctx.dense == {}


def test_marks_joint_tokens() -> None:
    class Joins(nn.Module):
        def forward(self, hidden_states: Tensor, encoder_hidden_states: Tensor) -> Tensor:
            both = torch.cat([encoder_hidden_states, hidden_states], 1)
            return torch.tanh(both)[:, encoder_hidden_states.shape[1] :]

    run = run_pass(mark_lanes, Joins(), joint)
    assert lanes(run.graph, "tanh") == ["[batch, text:0+image, 8]"]
    check_values(Joins(), joint)


@pytest.mark.parametrize(
    ("function", "make", "reason"),
    [
        (lambda x: x.sort(3).values, picture, "no rule covers"),
        (lambda x: x.flip(3), picture, "turns round"),
        (lambda x: x.softmax(3), picture, "site axis"),
        (lambda x: x.mean(0, keepdim=True), picture, "batch"),
        (lambda x: x.amax(3, True), picture, "site axis"),
        (lambda x: x.clamp(max=x.shape[2] / 4), picture, "size of the picture"),
        (lambda x: x.roll(x.shape[2] // 2 + 1, 2), picture, "no fixed part of the picture's size"),
        (lambda x: x[..., : x.shape[3] // 2].mean((2, 3), True), picture, "a part of its size"),
        (lambda x: (x @ x.transpose(1, 2)).sin() @ x, None, "multiplies"),
    ],
)
def test_keeps_what_mixes_sites_in_full(
    function: Callable[[Tensor], Tensor], make: Make | None, reason: str
) -> None:
    class Tokens(nn.Module):
        def forward(self, hidden_states: Tensor) -> Tensor:
            return hidden_states + function(hidden_states)

    module = Function(function) if make is not None else Tokens()
    run = run_pass(mark_lanes, module, make or tokens)
    assert run.unchanged
    assert any(reason in r for r in run.ctx.dense.values()), run.ctx.dense


def test_second_run_rewrites_nothing() -> None:
    run = run_pass(mark_lanes, shared(Attends), timed)
    found = [str(lane_of(n)) for n in run.graph.nodes]
    levels = list(run.ctx.pyramid.levels)
    assert run.second_run_is_idle()
    assert [str(lane_of(n)) for n in run.graph.nodes] == found
    assert run.ctx.pyramid.levels == levels
