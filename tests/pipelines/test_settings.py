"""Settings of a denoiser: what of its plain values stands in the code that computes it."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from maskfx.ir.module_settings import is_plain, settings_of


class Processor:
    """What attention calls, and no module."""

    def __init__(self, scale: float) -> None:
        self.scale, self.seen = scale, torch.ones(1)

    def __call__(self, x: Tensor) -> Tensor:
        return self.scale * x


def test_settings_are_the_plain_values_of_all_parts():
    module: Any = nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.1))
    before = settings_of(module)
    module[0].weight.data.add_(1)
    assert settings_of(module) == before
    module[1].p = 0.2
    assert settings_of(module) != before
    before = settings_of(module)
    module[1]._disable_adapters = False
    switched = settings_of(module)
    module[1]._disable_adapters = True
    assert before != switched != settings_of(module)
    module[1]._active_adapter = ["one"]
    before = settings_of(module)
    module[1]._active_adapter = ["other"]
    assert settings_of(module) != before
    before = settings_of(module)
    module[1]._calls, module[1]._kept = 7, {"a": 1}  # bookkeeping
    assert settings_of(module) == before
    assert is_plain({"default": 0.5})
    assert not is_plain({"default": torch.ones(1)})


def test_what_parts_call_counts_among_their_settings():
    module: Any = nn.Sequential(nn.Linear(2, 2))
    found = []
    for called in (Processor(1.0), Processor(2.0), functional.relu, functional.gelu):
        module[0].processor = called
        found.append(settings_of(module))
    assert len(set(found)) == 4
    module[0].processor = table = Processor(1.0)
    table.seen = None  # type: ignore[assignment]
    assert settings_of(module) == found[0]
