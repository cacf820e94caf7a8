"""The denoisers whose steps are split: three classes, at widths that matter and few blocks."""

from __future__ import annotations

from collections.abc import Callable

from bench.shapes import SDXL_BLOCKS, Shape, Size, flux_inputs, sd3_inputs, unet_inputs

GREATEST = 192  # side of a latent


def sd3(side: int, blocks: int) -> Shape:
    config = {
        "sample_size": GREATEST,
        "patch_size": 2,
        "in_channels": 16,
        "num_layers": blocks,
        "attention_head_dim": 64,
        "num_attention_heads": 8,
        "joint_attention_dim": 256,
        "caption_projection_dim": 512,
        "pooled_projection_dim": 128,
        "out_channels": 16,
        "pos_embed_max_size": GREATEST // 2,
    }
    title = f"SD3, width 512, {blocks} blocks, {side}x{side} latent"
    size = Size(side, side, 77)
    return Shape("sd3", title, "SD3Transformer2DModel", config, size, sd3_inputs)


def flux(side: int, blocks: int) -> Shape:
    config = {
        "num_layers": blocks,
        "num_single_layers": 2 * blocks,
        "attention_head_dim": 128,
        "num_attention_heads": 12,
        "joint_attention_dim": 4096,
        "pooled_projection_dim": 768,
        "axes_dims_rope": [16, 56, 56],
        "in_channels": 64,
        "guidance_embeds": True,
    }
    tokens = side // 2
    title = f"Flux, half width, {blocks} + {2 * blocks} blocks, {tokens}x{tokens} tokens"
    size = Size(tokens, tokens, 256)
    return Shape("flux", title, "FluxTransformer2DModel", config, size, flux_inputs, packed=True)


def sdxl(side: int, blocks: int) -> Shape:
    config = {
        **SDXL_BLOCKS,
        "sample_size": side,
        "layers_per_block": 1,
        "cross_attention_dim": 2048,
        "attention_head_dim": (5, 10, 20),
        "block_out_channels": (320, 640, 1280),
        "transformer_layers_per_block": (1, 1, blocks),
        "addition_time_embed_dim": 256,
        "projection_class_embeddings_input_dim": 2816,
    }
    title = f"SDXL UNet, real widths, depth (1, 1, {blocks}), {side}x{side} latent"
    size = Size(side, side, 77)
    return Shape("sdxl", title, "UNet2DConditionModel", config, size, unet_inputs)


# by name: what makes it, and its usual number of blocks
SHAPES: dict[str, tuple[Callable[[int, int], Shape], int]] = {
    "sd3": (sd3, 4),
    "flux": (flux, 1),
    "sdxl": (sdxl, 2),
}


def shape_of(name: str, side: int, blocks: int | None = None) -> Shape:
    make, usual = SHAPES[name]
    return make(side, usual if blocks is None else blocks)
