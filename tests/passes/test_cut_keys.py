"""cut_keys: keys and values of an attention get a row set of their own."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from maskfx.passes.context import enter_rows
from maskfx.passes.cut_keys import cut_keys
from tests.passes.tools import picture, run_pass


class Block(nn.Module):
    """Self-attention whose keys and values come from a normed and modulated input."""

    def __init__(self, grouped: bool = False) -> None:
        super().__init__()
        inner = 2 if grouped else 8
        self.q, self.k, self.v = nn.Linear(8, 8), nn.Linear(8, inner), nn.Linear(8, inner)
        self.shift = nn.Linear(4, 8)

    def forward(self, hidden_states: Tensor, timestep: Tensor) -> Tensor:
        when = torch.sin(timestep[:, None] * torch.arange(1.0, 5.0))
        normed = F.layer_norm(hidden_states, (8,)) + self.shift(when)[:, None]
        q, k, v = self.q(normed), self.k(normed), self.v(normed)
        q, k, v = (x.unflatten(2, (-1, 2)).transpose(1, 2) for x in (q, k, v))
        grouped = k.shape[1] != q.shape[1]
        mixed = F.scaled_dot_product_attention(q, k, v, enable_gqa=grouped)
        return hidden_states + mixed.transpose(1, 2).flatten(2)


def block_inputs(seed: int = 0) -> dict[str, Tensor]:
    torch.manual_seed(seed)
    return {"hidden_states": torch.randn(2, 12, 8), "timestep": torch.tensor([3.0, 5.0])}


def make_inputs(seed: int = 0, wide: bool = False) -> dict[str, Tensor]:
    return block_inputs(seed)


def test_cuts_behind_the_modulation() -> None:
    run = run_pass(cut_keys, Block(), make_inputs, plans=True)
    assert run.rewrites == 1
    [entry] = [n for n in run.graph.nodes if n.target is enter_rows]
    assert len(entry.users) == 2  # both projections; the modulation stays before the cut
    assert all("linear" in str(u.target) for u in entry.users)
    assert [r.kind for r in run.ctx.interface.regions] == ["keys"]


def test_keeps_keys_that_are_smaller_than_their_input() -> None:
    run = run_pass(cut_keys, Block(grouped=True), make_inputs, plans=True)
    assert run.unchanged
    assert run.ctx.interface.regions == []


class Windows(nn.Module):
    """Each patch of 2 x 2 sites attends to its own sites."""

    def __init__(self) -> None:
        super().__init__()
        self.k = nn.Linear(4, 4)

    def forward(self, sample: Tensor) -> Tensor:
        b, c, h, w = sample.shape
        x = sample.view(b, c, h // 2, 2, w // 2, 2).permute(0, 2, 4, 3, 5, 1)
        x = F.layer_norm(x.reshape(b, (h // 2) * (w // 2), 4, c), (4,))
        x = F.scaled_dot_product_attention(x, self.k(x), self.k(x).tanh())
        x = x.view(b, h // 2, w // 2, 2, 2, c).permute(0, 5, 1, 3, 2, 4)
        return sample + x.reshape(b, c, h, w)


def test_keeps_rows_that_attend_to_themselves() -> None:
    assert run_pass(cut_keys, Windows(), picture, plans=True).unchanged


def test_keeps_everything_unless_asked() -> None:
    assert run_pass(cut_keys, Block(), make_inputs).unchanged


def test_second_run_rewrites_nothing() -> None:
    assert run_pass(cut_keys, Block(), make_inputs, plans=True).second_run_is_idle()
