"""The denoisers that are measured: real classes of diffusers at a size that two cores can run.

Owns their configs, inputs and mask grids; knows nothing of masks, timing or maskfx.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

Inputs = dict[str, Any]


@dataclass(frozen=True)
class Size:
    """How large one request is: its mask grid and its text."""

    height: int
    width: int
    text: int


@dataclass(frozen=True)
class Shape:
    """One denoiser: how to build it, and what to call it with."""

    name: str
    title: str
    class_name: str
    config: dict[str, Any]
    size: Size
    make_inputs: Callable[[dict[str, Any], Size, int], Inputs]
    packed: bool = False

    @property
    def has_convolutions(self) -> bool:
        return self.class_name.startswith("UNet")

    def build(self) -> nn.Module:
        """fp32, eval, seeded, no gradients, no parameter idle."""
        import diffusers

        torch.manual_seed(0)
        module: nn.Module = getattr(diffusers, self.class_name)(**self.config)
        module = module.float().eval().requires_grad_(False)
        if not any(p.is_meta for p in module.parameters()):
            wake(module)
        return module

    def inputs(self, seed: int, size: Size | None = None) -> Inputs:
        """Keyword arguments of forward."""
        return {**self.make_inputs(self.config, size or self.size, seed), "return_dict": False}

    def as_mask(self, grid: Tensor) -> Tensor:
        """A (height, width) mask as the denoiser wants it."""
        return grid.reshape(-1) if self.packed else grid

    def masked(self, output: Tensor, grid: Tensor) -> Tensor:
        """The values of a batch-1 output at masked sites."""
        return output[:, grid.reshape(-1)] if self.packed else output[..., grid]


def wake(module: nn.Module) -> None:
    """Give parameters that start at zero values, so that no part is idle."""
    generator = torch.Generator().manual_seed(1)
    for parameter in module.parameters():
        if not bool(parameter.any()):
            parameter.copy_(0.02 * torch.randn(parameter.shape, generator=generator))


def normal(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def unet_inputs(config: dict[str, Any], size: Size, seed: int) -> Inputs:
    inputs: Inputs = {
        "sample": normal(seed, 1, config.get("in_channels", 4), size.height, size.width),
        "timestep": torch.tensor([981 - 20 * (seed % 40)]),
        "encoder_hidden_states": normal(seed + 1000, 1, size.text, config["cross_attention_dim"]),
    }
    if config.get("addition_embed_type") == "text_time":
        time_width = 6 * config["addition_time_embed_dim"]
        pooled = config["projection_class_embeddings_input_dim"] - time_width
        side = 8.0 * size.height
        inputs["added_cond_kwargs"] = {
            "text_embeds": normal(seed + 2000, 1, pooled),
            "time_ids": torch.tensor([[side, side, 0.0, 0.0, side, side]]),
        }
    return inputs


def flux_inputs(config: dict[str, Any], size: Size, seed: int) -> Inputs:
    ids = torch.zeros(size.height, size.width, 3)
    ids[..., 1] = torch.arange(size.height)[:, None]
    ids[..., 2] = torch.arange(size.width)[None, :]
    return {
        "hidden_states": normal(seed, 1, size.height * size.width, config["in_channels"]),
        "encoder_hidden_states": normal(seed + 1000, 1, size.text, config["joint_attention_dim"]),
        "pooled_projections": normal(seed + 2000, 1, config["pooled_projection_dim"]),
        "timestep": torch.tensor([0.98 - 0.02 * (seed % 40)]),
        "guidance": torch.tensor([3.5]),
        "img_ids": ids.flatten(0, 1),
        "txt_ids": torch.zeros(size.text, 3),
    }


def sd3_inputs(config: dict[str, Any], size: Size, seed: int) -> Inputs:
    return {
        "hidden_states": normal(seed, 1, config["in_channels"], size.height, size.width),
        "encoder_hidden_states": normal(seed + 1000, 1, size.text, config["joint_attention_dim"]),
        "pooled_projections": normal(seed + 2000, 1, config["pooled_projection_dim"]),
        "timestep": torch.tensor([981.0 - 20 * (seed % 40)]),
    }


SDXL_BLOCKS: dict[str, Any] = {
    "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
    "up_block_types": ("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
    "use_linear_projection": True,
    "addition_embed_type": "text_time",
}

SHAPES = {
    shape.name: shape
    for shape in (
        Shape(
            "a",
            "SD1.5 UNet at half width, 64x64 latent",
            "UNet2DConditionModel",
            {
                "sample_size": 64,
                "cross_attention_dim": 768,
                "attention_head_dim": 8,
                "block_out_channels": (160, 320, 640, 640),
            },
            Size(64, 64, 77),
            unet_inputs,
        ),
        Shape(
            "b",
            "SDXL UNet at half width and depth (1, 2, 4), 64x64 latent",
            "UNet2DConditionModel",
            {
                **SDXL_BLOCKS,
                "sample_size": 64,
                "cross_attention_dim": 768,
                "attention_head_dim": (5, 5, 10),
                "block_out_channels": (160, 320, 640),
                "transformer_layers_per_block": (1, 2, 4),
                "addition_time_embed_dim": 128,
                "projection_class_embeddings_input_dim": 640 + 6 * 128,
            },
            Size(64, 64, 77),
            unet_inputs,
        ),
        Shape(
            "c",
            "Flux, width 512, 4 + 8 blocks, 32x32 tokens",
            "FluxTransformer2DModel",
            {
                "num_layers": 4,
                "num_single_layers": 8,
                "attention_head_dim": 64,
                "num_attention_heads": 8,
                "joint_attention_dim": 512,
                "pooled_projection_dim": 256,
                "axes_dims_rope": [8, 28, 28],
                "in_channels": 64,
                "guidance_embeds": True,
            },
            Size(32, 32, 77),
            flux_inputs,
            packed=True,
        ),
        Shape(
            "cw",
            "Flux, width 1024, 2 + 4 blocks, 32x32 tokens",
            "FluxTransformer2DModel",
            {
                "num_layers": 2,
                "num_single_layers": 4,
                "attention_head_dim": 128,
                "num_attention_heads": 8,
                "joint_attention_dim": 1024,
                "pooled_projection_dim": 768,
                "axes_dims_rope": [16, 56, 56],
                "in_channels": 64,
                "guidance_embeds": True,
            },
            Size(32, 32, 77),
            flux_inputs,
            packed=True,
        ),
        Shape(
            "d",
            "SD3, width 768, 8 blocks, 64x64 latent in 1024 tokens",
            "SD3Transformer2DModel",
            {
                "sample_size": 64,
                "patch_size": 2,
                "in_channels": 16,
                "out_channels": 16,
                "num_layers": 8,
                "attention_head_dim": 64,
                "num_attention_heads": 12,
                "joint_attention_dim": 768,
                "caption_projection_dim": 768,
                "pooled_projection_dim": 512,
                "pos_embed_max_size": 96,
            },
            Size(64, 64, 154),
            sd3_inputs,
        ),
    )
}

TINY_UNET = Shape(
    "tiny",
    "UNet with two levels, 8x8 latent",
    "UNet2DConditionModel",
    {
        "sample_size": 8,
        "cross_attention_dim": 64,
        "attention_head_dim": 8,
        "block_out_channels": (32, 64),
        "layers_per_block": 1,
        "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"),
        "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D"),
    },
    Size(8, 8, 11),
    unet_inputs,
)

# What --quick runs in the place of each shape.
SMALL = {
    "a": Size(16, 16, 11),
    "b": Size(16, 16, 11),
    "c": Size(8, 8, 11),
    "cw": Size(8, 8, 11),
    "d": Size(16, 16, 11),
}
SMALL_FLUX = {"num_layers": 1, "num_single_layers": 1, "num_attention_heads": 2}
SMALL_CONFIG: dict[str, dict[str, Any]] = {
    "a": TINY_UNET.config,
    "b": {
        **SDXL_BLOCKS,
        "cross_attention_dim": 64,
        "attention_head_dim": (2, 2, 4),
        "block_out_channels": (32, 32, 64),
        "layers_per_block": 1,
        "transformer_layers_per_block": (1, 1, 2),
        "addition_time_embed_dim": 8,
        "projection_class_embeddings_input_dim": 64 + 6 * 8,
    },
    "c": {**SHAPES["c"].config, **SMALL_FLUX},
    "cw": {**SHAPES["cw"].config, **SMALL_FLUX},
    "d": {
        **SHAPES["d"].config,
        "num_layers": 2,
        "num_attention_heads": 2,
        "caption_projection_dim": 128,
    },
}


def choose(name: str, small: bool) -> Shape:
    """A shape, or its small stand-in."""
    shape = SHAPES[name]
    if not small:
        return shape
    return Shape(
        shape.name,
        f"small stand-in for: {shape.title}",
        shape.class_name,
        SMALL_CONFIG[name],
        SMALL[name],
        shape.make_inputs,
        shape.packed,
    )


def qwen_inputs(config: dict[str, Any], size: Size, seed: int) -> Inputs:
    return {
        "hidden_states": normal(seed, 1, size.height * size.width, config["in_channels"]),
        "encoder_hidden_states": normal(seed + 1000, 1, size.text, config["joint_attention_dim"]),
        "encoder_hidden_states_mask": torch.ones(1, size.text, dtype=torch.long),
        "timestep": torch.tensor([0.98 - 0.02 * (seed % 40)]),
        "img_shapes": [[(1, size.height, size.width)]],
    }


def wan_inputs(config: dict[str, Any], size: Size, seed: int) -> Inputs:
    """A video of 33 frames: 9 of latents, and a mask that is the same in all of them."""
    return {
        "hidden_states": normal(seed, 1, config["in_channels"], 9, size.height, size.width),
        "encoder_hidden_states": normal(seed + 1000, 1, size.text, config["text_dim"]),
        "timestep": torch.tensor([981 - 20 * (seed % 40)]),
    }


# Real depth and width, for GPUs, and for weights on the meta device: only capture and passes run.
FLUX = Shape(
    "flux",
    "Flux, 19 + 38 blocks",
    "FluxTransformer2DModel",
    {
        "num_layers": 19,
        "num_single_layers": 38,
        "attention_head_dim": 128,
        "num_attention_heads": 24,
        "joint_attention_dim": 4096,
        "pooled_projection_dim": 768,
        "axes_dims_rope": [16, 56, 56],
        "in_channels": 64,
        "guidance_embeds": True,
    },
    Size(64, 64, 512),
    flux_inputs,
    packed=True,
)
# its width at about a fifth of its depth, whose capture and compilation fit a short lease
SHORT_FLUX = replace(
    FLUX,
    name="short-flux",
    title="Flux at full width, 4 + 8 of 19 + 38 blocks",
    config={**FLUX.config, "num_layers": 4, "num_single_layers": 8},
)
FULL_DEPTH = (
    FLUX,
    Shape(
        "sdxl",
        "SDXL UNet",
        "UNet2DConditionModel",
        {
            **SDXL_BLOCKS,
            "sample_size": 128,
            "cross_attention_dim": 2048,
            "attention_head_dim": (5, 10, 20),
            "block_out_channels": (320, 640, 1280),
            "transformer_layers_per_block": (1, 2, 10),
            "addition_time_embed_dim": 256,
            "projection_class_embeddings_input_dim": 2816,
        },
        Size(128, 128, 77),
        unet_inputs,
    ),
    Shape(
        "sd21",
        "SD2.1 UNet, 96x96 latent",
        "UNet2DConditionModel",
        {
            "sample_size": 96,
            "cross_attention_dim": 1024,
            "attention_head_dim": (5, 10, 20, 20),
            "use_linear_projection": True,
        },
        Size(96, 96, 77),
        unet_inputs,
    ),
    Shape(
        "qwen",
        "Qwen-Image, 60 blocks",
        "QwenImageTransformer2DModel",
        {
            "num_layers": 60,
            "attention_head_dim": 128,
            "num_attention_heads": 24,
            "joint_attention_dim": 3584,
            "in_channels": 64,
            "out_channels": 16,
        },
        Size(64, 64, 256),
        qwen_inputs,
        packed=True,
    ),
    Shape(
        "wan",
        "Wan 2.1 of 1.3 billion parameters, 9 latent frames of 480x832",
        "WanTransformer3DModel",
        {
            "num_attention_heads": 12,
            "attention_head_dim": 128,
            "in_channels": 16,
            "out_channels": 16,
            "text_dim": 4096,
            "freq_dim": 256,
            "ffn_dim": 8960,
            "num_layers": 30,
        },
        Size(60, 104, 512),
        wan_inputs,
    ),
)
