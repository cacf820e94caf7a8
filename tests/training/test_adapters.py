"""Examples of adapters, and that an untrained adapter changes nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

import maskfx
from maskfx.errors import InputError
from maskfx.shipped import FOLDER, lora, loras, reference
from training.adapter_edits import judge_edges, judge_styles
from training.adapters import (
    PAPER,
    STRENGTH,
    STYLES,
    LowRank,
    blueprint,
    crop_of,
    edges_of,
    make_control,
    sepia,
)
from training.build_adapters import lora_state, term_weights
from training.resume import resume_adapter
from training.style_probe import load_style_probe, style_of, styled
from training.train import RUNS


def test_a_crop_has_what_is_learnt_from() -> None:
    parts, text = crop_of(3)
    assert text
    assert parts["plain"].shape == parts["kept"].shape == (128, 128, 3)
    assert all(parts[name].shape == (128, 128, 3) for name in STYLES)
    assert parts["mask"].shape == (16, 16)
    assert parts["mask"].any()
    hidden = np.kron(parts["mask"], np.ones((8, 8))) > 0
    kept = (parts["kept"] == parts["plain"]).all(2)
    assert kept[~hidden].mean() > 0.9
    assert kept[hidden].mean() < 0.1


def test_styles_and_edges() -> None:
    pixels = np.zeros((32, 32, 3), np.uint8)
    pixels[:, 16:] = (0, 0, 255)
    brown = sepia(pixels)
    assert (brown[:, 16:, 0] > brown[:, 16:, 2]).all()
    drawn = blueprint(pixels)
    assert (drawn[:, 14:17] == PAPER["lines"]).all()
    assert (drawn[:, [*range(13), *range(18, 32)]] == PAPER["ground"]).all()
    edges = edges_of(pixels)
    assert (edges[:, 15] == 255).all()
    assert edges.sum() == 255 * 3 * 32


def test_adapters_begin_without_effect() -> None:
    weight = torch.randn(6, 4, 3, 3)
    term = LowRank(weight, 2)
    assert torch.equal(term(weight), weight)
    nn.init.ones_(term.up)
    assert not torch.equal(term(weight), weight)
    unet: Any = reference("unet").unet
    control: Any = make_control(unet)
    noisy, times = torch.randn(1, 4, 16, 16), torch.tensor([500])
    words = torch.randn(1, 8, unet.config.cross_attention_dim)
    with torch.no_grad():
        down, middle = control(noisy, times, words, torch.rand(1, 3, 128, 128), return_dict=False)
    assert not middle.any()
    assert not any(one.any() for one in down)
    assert torch.equal(control.conv_in.weight, unet.conv_in.weight[:, :4])


def test_a_trained_term_has_the_format_of_diffusers() -> None:
    """The product of what is written is the term that was trained."""
    linear, window = nn.Linear(6, 4), nn.Conv2d(3, 5, 3)
    weights: dict[str, torch.Tensor] = {}
    shapes: dict[str, torch.Size] = {}
    for name, layer in (("down_blocks.0.to_q", linear), ("mid_block.conv1", window)):
        term = LowRank(layer.weight, 2)
        nn.init.normal_(term.up)
        path = name.replace(".", "/")
        weights |= {f"{path}.down": term.down.data, f"{path}.up": term.up.data}
        shapes[name] = layer.weight.shape
        state = lora_state(weights, shapes)
        down = state[f"unet.{name}.lora_A.weight"].float()
        up = state[f"unet.{name}.lora_B.weight"].float()
        product = (up.flatten(1) @ down.flatten(1)).view(layer.weight.shape)
        wanted = term(torch.zeros_like(layer.weight))
        assert (product - wanted).norm() < 2e-3 * wanted.norm()
        assert up.dim() == down.dim() == layer.weight.dim()
        again = term_weights(state)
        assert all(again[key].allclose(weights[key], atol=2e-3) for key in again)
    assert set(again) == set(weights)


def test_the_style_probe_is_right_on_painted_scenes() -> None:
    probe, right = load_style_probe(), 0
    rng = np.random.default_rng(1)
    crops, wanted = styled("held-out", lambda: int(rng.integers(2**40)), rng)
    side = crops.shape[1]
    for crop, style in zip(crops, wanted, strict=True):
        right += style_of(probe, crop, side / 2, side / 2, side / 3) == ("plain", *STYLES)[style]
    assert right >= 0.95 * len(crops)


def test_what_ships_is_found_by_name() -> None:
    assert {path.stem for path in loras("unet").glob("*.safetensors")} == set(STYLES)
    assert lora("sepia").parent == loras("unet")
    with pytest.raises(InputError, match="'sepiaa'.*'blueprint', 'sepia'"):
        lora("sepiaa")
    with pytest.raises(InputError, match="'blur'.*'edges'"):
        reference("unet", controlnet="blur")
    size = sum(path.stat().st_size for path in (FOLDER / "unet" / "controlnets").rglob("*.*"))
    assert size < 15e6
    assert "training.build_adapters" in (FOLDER / "unet" / "ADAPTERS.md").read_text("utf-8")


@pytest.mark.parametrize("name", ["sepia", "edges"])
def test_a_training_goes_on_from_what_ships(name: str, tmp_path: Path) -> None:
    state = torch.load(resume_adapter(name, FOLDER, tmp_path), weights_only=True)
    assert state["step"] > 500
    if name == "edges":
        control: Any = make_control(reference("unet").unet)
        assert set(state["average"]) == {key for key, _ in control.named_parameters()}
        shipped = reference("unet", controlnet="edges").controlnet.controlnet_mid_block.weight
        trained = state["average"]["controlnet_mid_block.weight"]
        assert torch.allclose(trained * STRENGTH, shipped.float())
    with pytest.raises(FileExistsError, match="move it away first"):
        resume_adapter(name, FOLDER, tmp_path)


@pytest.mark.slow
def test_edits_have_the_style_of_a_lora() -> None:
    """A glance at a few; `python -m training.adapter_edits` is the gate."""
    found = judge_styles(8, 8, 8, [])["found"]
    assert found["none"]["plain"] >= 0.75, found
    assert all(found[name][name] >= found["none"][name] + 0.4 for name in STYLES), found
    assert found["blueprint"]["blueprint"] >= 0.75, found


@pytest.mark.slow
def test_edits_have_the_shape_of_the_edges() -> None:
    """A glance at a few; `python -m training.adapter_edits` is the gate, 85 % of 300."""
    found = judge_edges(32, 8, 8, RUNS, [])
    assert found["edges_and_colour"]["shape"] >= found["colour"]["shape"] + 0.1, found
    assert found["edges_and_prompt"]["shape"] >= 0.8, found


@pytest.mark.slow
def test_a_masked_edit_takes_a_shipped_lora() -> None:
    """By the batch's low-rank terms: brown inside the mask, the picture's own pixels outside."""
    adapters = maskfx.Adapters(loras(), deadline=300)
    pipe = maskfx.compile(reference("unet"), quality="all-steps", adapters=adapters)
    pipe.set_progress_bar_config(disable=True)
    grey = np.full((256, 256, 3), 128, np.uint8)
    mask = np.zeros((256, 256), np.uint8)
    mask[96:160, 96:160] = 255
    call: dict[str, Any] = {
        "image": Image.fromarray(grey),
        "mask_image": Image.fromarray(mask),
        "num_inference_steps": 6,
        "guidance_scale": 1.0,
        "height": 256,
        "width": 256,
    }
    noise = [torch.Generator().manual_seed(0) for _ in range(2)]
    plain = np.asarray(pipe("a blue ball", generator=noise[0], **call).images[0])
    styled_one = np.asarray(pipe("a blue ball", generator=noise[1], lora="sepia", **call).images[0])
    adapters.close()
    inside = mask > 0
    assert (styled_one[~inside] == 128).all()

    def warmth(pixels: np.ndarray) -> float:
        return float((pixels[inside][:, 0].astype(float) - pixels[inside][:, 2]).mean())

    assert warmth(styled_one) > warmth(plain) + 20
