"""Pictures generated with ControlNets, IP-Adapters and LoRAs are templates of edits like theirs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from maskfx.runtime.step_kinds import StepKind
from maskfx.serve.request import Pictures, Pixels
from tests.factories import edit_pipelines  # noqa: F401 - adds pipelines
from tests.factories.ip_adapters import save_ip_adapters
from tests.factories.served import SIDE, Served, build, job, picture, square

A, B = picture(5), picture(6)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model, an IP-Adapter for it and two LoRAs."""
    folder = tmp_path_factory.mktemp("saved")
    pipe = build("StableDiffusionInpaintPipeline")
    pipe.save_pretrained(folder / "model")
    save_ip_adapters(pipe.unet, folder, "face")
    (folder / "loras").mkdir()
    for seed, name in enumerate(("ink", "oil")):
        save_lora(pipe.unet, folder / "loras" / f"{name}.safetensors", seed)
    return folder


def save_lora(unet: Any, path: Path, seed: int) -> None:
    draw, tensors = torch.Generator().manual_seed(seed), {}
    for name, layer in unet.named_modules():
        if name.endswith(("attn1.to_q", "attn2.to_v")):
            for kind, shape in (("A", (2, layer.in_features)), ("B", (layer.out_features, 2))):
                values = 0.5 * torch.randn(*shape, generator=draw)
                tensors[f"unet.{name}.lora_{kind}.weight"] = values
    save_file(tensors, path)


@pytest.fixture(scope="module")
def adapted(saved: Path) -> Iterator[Served]:
    made = Served(
        None,
        model=str(saved / "model"),
        ip_adapters=[str(saved / "face.safetensors")],
        lora_dir=saved / "loras",
    )
    yield made
    made.model.close()


@pytest.fixture(scope="module")
def controlled() -> Iterator[Served]:
    made = Served(build("StableDiffusionControlNetInpaintPipeline"))
    yield made
    made.model.close()


def generated(served: Served, given: Pictures, **more: Any) -> Pixels:
    asked = job("g", "generate", seed=5, size=(SIDE, SIDE), **more)
    made = served.made(asked, given)
    assert made.template is not None
    assert made.pixels is not None
    return made.pixels


def edited(served: Served, pixels: Pixels, seed: int = 6, **more: Any) -> tuple[int, Pixels]:
    """The number of recorded steps, and the result."""
    pictures = {name: more.pop(name) for name in ("controls", "shown") if name in more}
    served.told.steps.clear()
    given = job("e", **{"seed": seed, "prompt": "a dog", **more})
    made = served.made(given, Pictures((pixels,), square(), **pictures))
    assert made.pixels is not None
    mask = square()
    assert np.array_equal(made.pixels[~mask], pixels[~mask])
    assert (made.pixels[mask] != pixels[mask]).any() or seed == 5
    kinds = [member.kind for step in served.told.steps for member in step.members]
    return kinds.count(StepKind.RECORD), made.pixels


def test_with_its_lora_an_edit_records_nothing(adapted: Served, saved: Path) -> None:
    pixels = generated(adapted, Pictures(), lora="ink:0.5")
    assert edited(adapted, pixels, lora="ink:0.5")[0] == 0
    assert edited(adapted, pixels, lora="ink:0.5,oil:0.0")[0] == 0, "oil has no effect"
    for other in ("ink", "oil:0.5", None):
        assert edited(adapted, pixels, lora=other)[0] > 0, other
    save_lora(adapted.model.family.main.pipe.unet, saved / "loras" / "ink.safetensors", 7)
    adapted.model.register_adapter("ink")
    assert edited(adapted, pixels, lora="ink:0.5")[0] > 0, "the file changed"


def test_templates_dont_depend_on_what_ip_adapters_are_shown(adapted: Served) -> None:
    pixels = generated(adapted, Pictures(shown=(A,)), ip_scale=[0.6])
    again = edited(adapted, pixels, 5, shown=(A,), ip_scale=[0.6], prompt="a cat")
    assert again[0] == 0
    assert np.abs(again[1].astype(int) - pixels).max() <= 1, "it is the picture again"
    assert edited(adapted, pixels, shown=(B,))[0] == 0
    assert edited(adapted, pixels)[0] == 0
    plain = generated(adapted, Pictures())
    assert edited(adapted, plain, shown=(A,))[0] == 0


@pytest.mark.slow
def test_with_its_control_images_and_scales_an_edit_records_nothing(controlled: Served) -> None:
    family = controlled.model.family
    assert family.generator is not family.editor
    pixels = generated(controlled, Pictures(controls=(A,)), control_scale=[0.5])
    again = edited(controlled, pixels, 5, controls=(A,), control_scale=[0.5], prompt="a cat")
    assert again[0] == 0
    assert np.abs(again[1].astype(int) - pixels).max() <= 1, "it is the picture again"
    assert edited(controlled, pixels, controls=(A,), control_scale=[0.5])[0] == 0
    others: list[dict[str, Any]] = [
        {"controls": (B,)},
        {"control_scale": None},
        {"control_end": 0.5},
        {"steps": 4},
        {"guidance": 1.0},
    ]
    for more in others:
        asked = {"controls": (A,), "control_scale": [0.5], **more}
        assert edited(controlled, pixels, **asked)[0] > 0, more
