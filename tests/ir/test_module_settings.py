"""Settings of a module: methods that a step lends to its parts aren't among them."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from maskfx.ir.modules.lent_methods import lent
from maskfx.ir.modules.module_settings import KnownSettings, settings_of
from maskfx.runtime.execution.constant_parts import ConstantParts


class Watched(nn.Module):
    """A module whose call notes its own settings, as another request's thread may read them."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.out, self.scale = nn.Linear(4, 4), nn.Linear(4, 4), 1.0
        self._known, self._noted = KnownSettings(self), set[str]()

    def forward(self, sample: Tensor, hint: Tensor) -> Tensor:
        self._noted |= {self._known.digest(), settings_of(self)}
        found: Tensor = self.out(sample) + self.embed(hint)
        return found


@torch.no_grad()
def test_results_kept_of_parts_dont_change_the_settings_meanwhile() -> None:
    net, hint = Watched().eval(), torch.randn(1, 4)
    parts = ConstantParts(net)
    for _ in range(6):
        sample = torch.randn(1, 4)
        with parts.over("kind", {id(sample): [sample], id(hint): [hint]}):
            net(sample, hint)
    assert parts.reused, "no method was lent"
    assert len(net._noted) == 1


def test_a_lent_method_stands_for_what_the_part_has_itself() -> None:
    layer = nn.Linear(4, 4)
    net = nn.Sequential(layer)
    layer.forward = lambda value: value  # type: ignore[method-assign,assignment]
    known = KnownSettings(net)
    before = known.digest()
    with lent(layer, lambda value: value + 1), lent(layer, lambda value: value + 2):
        assert net(torch.zeros(1)).item() == 2
        assert known.digest() == settings_of(net) == KnownSettings(net).digest() == before
        layer.in_features = 5
        assert known.digest() == settings_of(net) != before
        layer.in_features = 4
    assert net(torch.zeros(1)).item() == 0
    assert known.digest() == before
    layer.forward = lambda value: value + 1  # type: ignore[method-assign,assignment]
    assert known.digest() != before
