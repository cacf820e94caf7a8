"""Adapters of a denoiser: an edit is right with them, without them, and at another strength."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import maskfx
from tests.pipes import PIPES, Steps, call_of, distance, latents, square, white

pytestmark = pytest.mark.slow

NAME = "FluxInpaintPipeline"


class Adapted(nn.Module):
    """A linear layer with a product of low rank beside it, as LoRAs are."""

    def __init__(self, base: nn.Linear, strength: float) -> None:
        super().__init__()
        draw = torch.Generator().manual_seed(5)
        self.base, self.strength = base, strength
        self._disable_adapters = False
        self.down = nn.Parameter(torch.randn(2, base.in_features, generator=draw))
        self.up = nn.Parameter(torch.randn(base.out_features, 2, generator=draw))

    def forward(self, x: Tensor) -> Tensor:
        if self._disable_adapters:
            return self.base(x)
        found: Tensor = self.base(x) + self.strength * (x @ self.down.T @ self.up.T)
        return found


def adapt(pipe: Any, strength: float) -> list[Adapted]:
    """Adapters on all queries."""
    made = []
    for part in list(pipe.transformer.modules()):
        if isinstance(getattr(part, "to_q", None), nn.Linear):
            part.to_q = Adapted(part.to_q, strength)
            made.append(part.to_q)
    return made


def check(pipe: Any, original: Any, **more: Any) -> Tensor:
    wanted = latents(original, **call_of(PIPES[NAME], 0, white()), **more)
    found = latents(pipe, **call_of(PIPES[NAME], 0, white()), **more)
    assert distance(found, wanted) < 1e-4
    # the recording belongs to these weights and this strength
    assert bool(latents(pipe, **call_of(PIPES[NAME], 1, square()), **more).isfinite().all())
    return found


def test_adapters_come_change_and_go(monkeypatch: pytest.MonkeyPatch):
    pipe, original = maskfx.compile(PIPES[NAME].build()), PIPES[NAME].build()
    without = check(pipe, original)
    steps = Steps(monkeypatch)
    ours, theirs = adapt(pipe, 0.3), adapt(original, 0.3)
    adapted = check(pipe, original)
    assert "RecordStep" in steps.kinds()
    assert distance(adapted, without) > 1e-2
    for layer in (*ours, *theirs):
        layer.strength = 0.6
    stronger = check(pipe, original)
    assert "RecordStep" in steps.kinds()
    assert distance(stronger, adapted) > 1e-2
    for layer in (*ours, *theirs):
        layer._disable_adapters = True
    off = check(pipe, original)
    assert "RecordStep" in steps.kinds()
    assert distance(off, without) < 1e-4


def test_adapters_of_peft():
    peft = pytest.importorskip("peft")
    pipe, original = maskfx.compile(PIPES[NAME].build()), PIPES[NAME].build()
    without = check(pipe, original)
    for one in (pipe, original):
        torch.manual_seed(0)
        config = peft.LoraConfig(
            r=2, lora_alpha=4, init_lora_weights=False, target_modules=["to_q"]
        )
        one.transformer.add_adapter(config, adapter_name="style")
    adapted = check(pipe, original)
    assert distance(adapted, without) > 1e-3
    for one in (pipe, original):
        one.transformer.set_adapters(["style"], [0.25])
    weaker = check(pipe, original)
    assert distance(weaker, adapted) > 1e-3
    for one in (pipe, original):
        one.transformer.disable_lora()
    assert distance(check(pipe, original), without) < 1e-4
    for one in (pipe, original):
        one.transformer.enable_lora()
        torch.manual_seed(1)
        one.transformer.add_adapter(config, adapter_name="other")
        one.transformer.set_adapters(["style"], [0.25])
    assert distance(check(pipe, original), weaker) < 1e-4
    for one in (pipe, original):
        one.transformer.set_adapters(["other"], [0.25])
    assert distance(check(pipe, original), weaker) > 1e-3
    for one in (pipe, original):
        one.transformer.set_adapters(["style"], [0.25])
        one.transformer.delete_adapters("other")
    for scale in (0.5, 2.0):
        check(pipe, original, joint_attention_kwargs={"scale": scale})
    for one in (pipe, original):
        one.transformer.delete_adapters("style")
    assert distance(check(pipe, original), without) < 1e-4
