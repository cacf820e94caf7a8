"""FLOPs of captured graphs, where a size depends on what a tensor holds."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from maskfx.runtime.batch.flops import graph_flops


class Kept(nn.Module):
    """A linear over the tokens that a mask keeps, and one over all."""

    def __init__(self) -> None:
        super().__init__()
        self.some, self.all = nn.Linear(4, 8), nn.Linear(4, 8)

    def forward(self, text: Tensor, mask: Tensor) -> Tensor:
        return self.some(text[mask]).sum(0) + self.all(text).sum((0, 1))


def test_a_number_of_kept_tokens_counts_as_one() -> None:
    inputs = torch.zeros(2, 5, 4), torch.ones(2, 5, dtype=torch.bool)
    graph = torch.export.export(Kept(), inputs).module().graph
    assert sorted(graph_flops(graph).values()) == [2 * 4 * 8, 2 * 4 * 8 * 2 * 5]
