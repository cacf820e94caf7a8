"""Captures hold writes to a diagonal."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from maskfx.compiler.capture.tracing.plain_writes import plain_writes
from tests.passes.tools import check_values, tokens


class Diagonal(nn.Module):
    """Tokens attend to themselves alone, by a mask whose diagonal is written."""

    def forward(self, hidden_states: Tensor) -> Tensor:
        many = hidden_states.shape[1]
        mask = torch.zeros(many, many)
        mask[:many, :many] = float("-inf")
        mask[:many, :many].fill_diagonal_(0)
        x = hidden_states[:, None]
        return F.scaled_dot_product_attention(x, x.sin(), x.tanh(), attn_mask=mask)[:, 0]


def test_a_diagonal_that_is_written_is_captured() -> None:
    check_values(Diagonal(), tokens, oracle=False)


def test_writes_as_torch_does() -> None:
    own = Tensor.fill_diagonal_
    for shape in ((3, 5), (5, 3), (4, 4)):
        wanted, found = torch.ones(shape), torch.ones(shape)
        wanted[:3, :2].fill_diagonal_(7)
        with plain_writes():
            found[:3, :2].fill_diagonal_(7)
            wide = torch.zeros(6, 2).fill_diagonal_(1, wrap=True)
        assert torch.equal(found, wanted)
        assert torch.equal(wide, torch.zeros(6, 2).fill_diagonal_(1, wrap=True))
    assert Tensor.fill_diagonal_ is own
