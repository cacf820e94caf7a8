"""Examples of adapters, and that an untrained adapter changes nothing."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import nn

from maskfx.shipped import reference
from training.adapters import BLOCK, STYLES, LowRank, crop_of, edges_of, make_control, mosaic, sepia


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
    tiles = mosaic(np.random.default_rng(0).integers(0, 255, (64, 64, 3)).astype(np.uint8))
    assert len(np.unique(tiles[:BLOCK, :BLOCK].reshape(-1, 3), axis=0)) == 1
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
