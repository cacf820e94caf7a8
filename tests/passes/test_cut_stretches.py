"""cut_stretches: stretches of blocks get row sets of their own."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from maskfx.ir.geometry.lanes import lane_of
from maskfx.passes.context import enter_rows
from maskfx.passes.cut_stretches import cut_stretches
from tests.passes.tools import Inputs, Run, nodes_of, numbers, picture, run_pass, tokens


class Layer(nn.Module):
    """Attention and two linear layers, each added to what comes in."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def attend(self, normed: Tensor) -> Tensor:
        q, k, v = (x.unflatten(2, (2, -1)).transpose(1, 2) for x in self.qkv(normed).chunk(3, 2))
        mixed = F.scaled_dot_product_attention(q, k, v)
        return self.out(mixed.transpose(1, 2).flatten(2))

    def mlp(self, hidden: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(F.layer_norm(hidden, hidden.shape[-1:]))))

    def forward(self, hidden: Tensor) -> Tensor:
        hidden = hidden + self.attend(F.layer_norm(hidden, hidden.shape[-1:]))
        return hidden + self.mlp(hidden)


class Layers(nn.Module):
    """Layers over packed tokens, turned by positions that belong to the request, and a head."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(count))
        self.head = nn.Linear(8, 2)

    def forward(self, hidden_states: Tensor, ids: Tensor) -> Tensor:
        for layer in self.layers:
            hidden_states = layer(hidden_states * torch.cos(ids)[..., None])
        return self.head(hidden_states)


class Hourglass(nn.Module):
    """Residual convolutions down and up again, with skips between them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Conv2d(4, 8, 3, padding=1), nn.Conv2d(24, 4, 3, padding=1)
        self.inner = nn.ModuleList(nn.Conv2d(8, 8, 3, padding=1) for _ in range(4))
        self.down = nn.Conv2d(8, 8, 3, stride=2, padding=1)

    def forward(self, sample: Tensor) -> Tensor:
        early = hidden = self.first(sample)
        skip = hidden = hidden + self.inner[1](F.silu(self.inner[0](hidden)))
        hidden = self.down(hidden)
        hidden = hidden + self.inner[3](F.silu(self.inner[2](hidden)))
        hidden = F.interpolate(hidden, scale_factor=2.0)
        return self.last(torch.cat([hidden, skip, early], 1))


def layer_inputs(seed: int = 0, wide: bool = False) -> Inputs:
    inputs = tokens(seed, wide)
    return {**inputs, "ids": numbers(*inputs["hidden_states"].shape[:2], seed=50)}


def places(run: Run) -> list[str]:
    return [region.place for region in run.ctx.interface.regions]


def test_cuts_behind_the_attention_of_every_layer() -> None:
    run = run_pass(cut_stretches, Layers(3), layer_inputs, stretches=True)
    assert places(run) == ["layers.0", "layers.1", "layers.2"]
    assert [r.kind for r in run.ctx.interface.regions] == ["stretch"] * 3
    entries = [n for n in run.graph.nodes if n.target is enter_rows]
    assert len(entries) == run.rewrites == 3  # the sum alone crosses
    found = [lane.segments for n in nodes_of(run.graph, "gelu") if (lane := lane_of(n))]
    assert found == [("image@2",), ("image@3",), ("image",)]
    [output] = [n for n in run.graph.nodes if n.op == "output"]
    assert all(lane_of(n).segments == ("image",) for n in output.all_input_nodes)  # type: ignore[union-attr]


def test_positions_are_given_to_every_stretch() -> None:
    run = run_pass(cut_stretches, Layers(3), layer_inputs, stretches=True)
    inputs = [n for n in run.graph.nodes if n.op == "placeholder" and n.users]
    lanes = sorted(lane.segments for n in inputs if (lane := lane_of(n)) and lane.has_sites)
    assert lanes == [("image@1",), ("image@1",), ("image@2",), ("image@3",)]


def test_skips_pass_by_and_branches_stay_whole() -> None:
    run = run_pass(cut_stretches, Hourglass(), picture, stretches=True)
    assert places(run) == ["first", "inner.1", "down", "inner.3", "last"]
    entries = [n for n in run.graph.nodes if n.target is enter_rows]
    assert len(entries) == 7, "one for each cut, and the skips"


def test_keeps_everything_unless_asked() -> None:
    assert run_pass(cut_stretches, Layers(1), layer_inputs).unchanged


def test_second_run_rewrites_nothing() -> None:
    run = run_pass(cut_stretches, Layers(2), layer_inputs, stretches=True)
    assert run.second_run_is_idle()
