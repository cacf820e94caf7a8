"""Adapters of a denoiser: an edit is right with them, without them, and at another strength."""

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor, nn
from transformers import CLIPImageProcessor, CLIPVisionConfig, CLIPVisionModelWithProjection

import maskfx
from maskfx.compiler.capture.capture import capture
from maskfx.runtime.programs import program_cache
from tests.factories.pipelines import (
    PIPES,
    Steps,
    call_of,
    distance,
    latents,
    pipe_of,
    square,
    white,
)
from tests.factories.small_unets import sd

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
    pipe, original = maskfx.compile(PIPES[NAME].build(), quality="all-steps"), PIPES[NAME].build()
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
    pipe, original = maskfx.compile(PIPES[NAME].build(), quality="all-steps"), PIPES[NAME].build()
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


def told_of_pictures(pipe: Any, adapters: int) -> Any:
    """With IP-Adapters, whose keys and values of a picture stand beside the text's."""
    draw = torch.Generator().manual_seed(3)

    def values(*shape: int) -> Tensor:
        return 0.3 * torch.randn(*shape, generator=draw)

    width = pipe.unet.config.cross_attention_dim
    crossing = [n for n in pipe.unet.attn_processors if not n.endswith("attn1.processor")]
    own = {}
    for i, name in enumerate(crossing):
        size = pipe.unet.get_submodule(name.removesuffix(".processor")).to_q.out_features
        for kind in "kv":
            own[f"{2 * i + 1}.to_{kind}_ip.weight"] = values(size, width)
    projection = {
        "proj.weight": values(4 * width, 6),
        "proj.bias": values(4 * width),
        "norm.weight": torch.ones(width),
        "norm.bias": torch.zeros(width),
    }
    states = [{"image_proj": projection, "ip_adapter": own}] * adapters
    pipe.unet._load_ip_adapter_weights(states, low_cpu_mem_usage=False)
    pipe.unet.eval()
    pipe.register_modules(image_encoder=encoder(), feature_extractor=CLIPImageProcessor())
    return pipe


def encoder() -> CLIPVisionModelWithProjection:
    torch.manual_seed(4)
    config = CLIPVisionConfig(
        hidden_size=8,
        intermediate_size=8,
        projection_dim=6,
        num_hidden_layers=1,
        num_attention_heads=1,
        patch_size=56,
    )
    return CLIPVisionModelWithProjection(config).eval()


def test_a_scale_that_changes_again_needs_no_capture(monkeypatch: pytest.MonkeyPatch):
    def build() -> Any:
        return told_of_pictures(pipe_of("StableDiffusionPipeline", sd), 1)

    original, pipe = build(), maskfx.compile(build(), quality="all-steps")
    captures: list[int] = []

    def counted(*given: Any, **named: Any) -> Any:
        captures.append(1)
        return capture(*given, **named)

    monkeypatch.setattr(program_cache, "capture", counted)
    shown = {name: [value] for name, value in of_states(1).items()}
    kind, found, seen = PIPES["StableDiffusionPipeline"], [], []
    for scale in (0.2, 0.5, 0.9, 0.3):
        for one in (pipe, original):
            one.set_ip_adapter_scale(scale)
        captures.clear()
        template = pipe(**call_of(kind, 0), **shown, record=True).template
        edited = latents(pipe, **call_of(kind, 0, square()), **shown, template=template)
        wanted = latents(original, **call_of(kind, 0), **shown)
        assert distance(edited, wanted) < 1e-4
        found.append(wanted)
        seen.append(bool(captures))
    assert seen == [True, True, False, False]
    assert all(distance(a, b) > 1e-3 for a, b in pairwise(found))
    assert "processor.scale[0]" in maskfx.explain(pipe)


def of_states(seed: int) -> dict[str, Any]:
    """What is known of a picture: without it and with it."""
    draw = torch.Generator().manual_seed(seed)
    return {"ip_adapter_image_embeds": torch.randn(2, 1, 6, generator=draw)}


def of_picture(seed: int) -> dict[str, Any]:
    """The picture itself, as large as it happens to be."""
    draw = np.random.default_rng(seed)
    pixels = draw.integers(0, 255, (40 + seed, 50, 3), dtype=np.uint8)
    return {"ip_adapter_image": Image.fromarray(pixels)}


@pytest.mark.parametrize("adapters", [1, 2])
@pytest.mark.parametrize("of", [of_states, of_picture])
@pytest.mark.parametrize(
    "name", ["StableDiffusionInpaintPipeline", "StableDiffusionXLInpaintPipeline"]
)
def test_adapters_that_are_told_of_a_picture(
    name: str, of: Callable[[int], Any], adapters: int, monkeypatch: pytest.MonkeyPatch
):
    def told(seed: int) -> dict[str, Any]:
        return {key: [value] * adapters for key, value in of(seed).items()}

    kind = PIPES[name]
    original = told_of_pictures(kind.build(), adapters)
    pipe = maskfx.compile(told_of_pictures(kind.build(), adapters), quality="all-steps")
    found = []
    for seed, scale in ((1, 1.0), (2, 1.0), (2, 0.4)):
        for one in (pipe, original):
            one.set_ip_adapter_scale([scale] * adapters)
        given = told(seed)
        wanted = latents(original, **call_of(kind, 0, white()), **given)
        assert distance(latents(pipe, **call_of(kind, 0, white()), **given), wanted) < 1e-4
        found.append(wanted)
    assert all(distance(a, b) > 1e-3 for a, b in pairwise(found))
    steps = Steps(monkeypatch)
    for seed in (1, 2):  # one template for all pictures of the adapter
        latents(pipe, **call_of(kind, 0, square()), **told(seed))
        assert steps.kinds() == {"EditStep"}
