"""Files of tiny IP-Adapters, as they are published, and the image encoder beside them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import CLIPVisionConfig, CLIPVisionModelWithProjection

SHOWN = 6  # width of what the encoder returns


def image_encoder() -> CLIPVisionModelWithProjection:
    torch.manual_seed(4)
    config = CLIPVisionConfig(
        hidden_size=8,
        intermediate_size=8,
        projection_dim=SHOWN,
        num_hidden_layers=1,
        num_attention_heads=1,
        patch_size=56,
    )
    return CLIPVisionModelWithProjection(config).eval()


def tensors_for(unet: Any, seed: int) -> dict[str, Tensor]:
    """The tensors of an IP-Adapter for a UNet, by the names in files."""
    draw = torch.Generator().manual_seed(seed)

    def values(*shape: int) -> Tensor:
        return 0.3 * torch.randn(*shape, generator=draw)

    width = unet.config.cross_attention_dim
    found = {
        "image_proj.proj.weight": values(4 * width, SHOWN),
        "image_proj.proj.bias": values(4 * width),
        "image_proj.norm.weight": torch.ones(width),
        "image_proj.norm.bias": torch.zeros(width),
    }
    crossing = [n for n in unet.attn_processors if not n.endswith("attn1.processor")]
    for i, name in enumerate(crossing):
        size = unet.get_submodule(name.removesuffix(".processor")).to_q.out_features
        for kind in "kv":
            found[f"ip_adapter.{2 * i + 1}.to_{kind}_ip.weight"] = values(size, width)
    return found


def save_ip_adapters(unet: Any, folder: Path, *names: str) -> list[Path]:
    """Save an IP-Adapter of other numbers under each name, and the image encoder beside them."""
    image_encoder().save_pretrained(folder / "image_encoder")
    for seed, name in enumerate(names):
        save_file(tensors_for(unet, seed), folder / f"{name}.safetensors")
    return [folder / f"{name}.safetensors" for name in names]
