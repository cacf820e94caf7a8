"""Tiny denoisers of videos, with several frames, as cases of the zoo."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from tests.factories.zoo import (
    CROSS,
    HEADS,
    PATCH_SIZES,
    POOLED,
    TOKEN_SIZES,
    ZOO,
    Draw,
    Size,
    add,
    fixed_text,
    kandinsky5_inputs,
    latent_inputs,
    only,
)

FRAMES = 3
Inputs = Callable[[Size, int], dict[str, Any]]

# A UNet that halves once, at sizes that it takes.
HALVED_SIZES = (Size(1, 8, 8, 7), Size(1, 8, 12, 5), Size(2, 12, 8, 7))


def filmed(size: Size) -> tuple[int, ...]:
    """The mask shape of a model that takes a latent video."""
    return (FRAMES, size.height, size.width)


def video_inputs(
    size: Size,
    seed: int,
    *,
    key: str = "hidden_states",
    frames: int = FRAMES,
    channels: int = 4,
    frames_first: bool = False,
    **options: Any,
) -> dict[str, Any]:
    """Inputs of a model that takes a latent video."""
    arguments = latent_inputs(size, seed, **options)
    arguments.pop("hidden_states")
    front = (frames, channels) if frames_first else (channels, frames)
    video = Draw(seed + 50).normal(size.batch, *front, size.height, size.width)
    return {key: video, **arguments}


def kandinsky_video(size: Size, seed: int) -> dict[str, Any]:
    """Inputs of Kandinsky5Transformer3DModel: frames before the picture, channels last."""
    arguments = kandinsky5_inputs(size, seed)
    shape = (size.batch, FRAMES, size.height, size.width, 4)
    arguments["hidden_states"] = Draw(seed).normal(*shape)
    arguments["visual_rope_pos"][0] = torch.arange(FRAMES)
    return arguments


def with_rotary(inputs: Inputs, width: int, size: Size, seed: int) -> dict[str, Any]:
    """Inputs with rotary tables of every site."""
    arguments = inputs(size, seed)
    sites = FRAMES * size.height * size.width // 4
    angles = Draw(7).normal(sites, width)
    arguments["image_rotary_emb"] = (angles.cos(), angles.sin())
    return arguments


def each_frame(inputs: Inputs, size: Size, seed: int) -> dict[str, Any]:
    """Inputs with a timestep for each frame."""
    arguments = inputs(size, seed)
    arguments["timestep"] = Draw(seed + 9).integers(size.batch, FRAMES, low=1, high=1000)
    return arguments


def wan_tokens(inputs: Inputs, size: Size, seed: int) -> dict[str, Any]:
    """Inputs with a timestep for each token."""
    arguments = inputs(size, seed)
    sites = FRAMES * size.height * size.width // 4
    arguments["timestep"] = Draw(seed + 9).integers(size.batch, sites, low=1, high=1000)
    return arguments


def items_inputs(size: Size, seed: int) -> dict[str, Any]:
    """Inputs of JoyImageEditTransformer3DModel with references, each an item of one frame."""
    arguments = video_inputs(size, seed)
    arguments["hidden_states"] = arguments["hidden_states"].transpose(1, 2).unsqueeze(3)
    return arguments


def vace_inputs(size: Size, seed: int) -> dict[str, Any]:
    """Inputs of WanVACETransformer3DModel: a control video as large as the latent."""
    arguments = video_inputs(size, seed)
    draw = Draw(seed + 11)
    shape = (size.batch, 6, FRAMES, size.height, size.width)
    arguments["control_hidden_states"] = draw.normal(*shape)
    arguments["control_hidden_states_scale"] = torch.tensor([0.7, 0.9, 0.8])
    return arguments


def packed_video(size: Size, seed: int) -> dict[str, Any]:
    """Inputs of LTXVideoTransformer3DModel: tokens of all frames, and their sizes."""
    draw = Draw(seed)
    sites = FRAMES * size.height * size.width
    return {
        "hidden_states": draw.normal(size.batch, sites, 4),
        "encoder_hidden_states": draw.normal(size.batch, size.text, CROSS),
        "timestep": draw.steps(size.batch),
        "encoder_attention_mask": draw.keep(size.batch, size.text),
        "num_frames": FRAMES,
        "height": size.height,
        "width": size.width,
        "return_dict": False,
    }


def ltx2_inputs(size: Size, seed: int) -> dict[str, Any]:
    """Inputs of LTX2VideoTransformer3DModel: tokens of a video and its sound, with a text each."""
    arguments, draw, sounds = packed_video(size, seed), Draw(seed + 17), 5
    tokens = arguments["hidden_states"].shape[1]
    step = draw.steps(size.batch).float()
    return {
        **arguments,
        "timestep": step[:, None].expand(-1, tokens).contiguous(),
        "audio_hidden_states": draw.normal(size.batch, sounds, 4),
        "audio_encoder_hidden_states": draw.normal(size.batch, size.text, CROSS),
        "audio_encoder_attention_mask": draw.keep(size.batch, size.text),
        "audio_num_frames": sounds,
        "audio_timestep": step,
        "sigma": draw.uniform(size.batch),
    }


def hunyuan15_inputs(size: Size, seed: int) -> dict[str, Any]:
    """Inputs of HunyuanVideo15Transformer3DModel: two texts and an image embedding."""
    arguments = video_inputs(size, seed, text_mask="encoder_attention_mask")
    draw = Draw(seed + 13)
    arguments["encoder_hidden_states_2"] = draw.normal(size.batch, 5, 12)
    arguments["encoder_attention_mask_2"] = draw.keep(size.batch, 5)
    arguments["timestep"] = arguments["timestep"].float()
    arguments["image_embeds"] = draw.normal(size.batch, 4, 10)
    return arguments


def motion_inputs(size: Size, seed: int) -> dict[str, Any]:
    """Inputs of a UNet that takes a latent video as `sample`."""
    return video_inputs(size, seed, key="sample")


def animated_inputs(size: Size, seed: int) -> dict[str, Any]:
    """Inputs of UNetMotionModel: the text once for each frame."""
    arguments = motion_inputs(size, seed)
    text = arguments["encoder_hidden_states"]
    arguments["encoder_hidden_states"] = text.repeat_interleave(FRAMES, 0)
    return arguments


def controlled_inputs(size: Size, seed: int) -> dict[str, Any]:
    """Inputs of UNetMotionModel with what a ControlNet adds to each frame."""
    arguments, draw = animated_inputs(size, seed), Draw(seed + 19)
    halves = -(-size.height // 2), -(-size.width // 2)
    shapes = ((16, size.height, size.width),) * 2 + ((16, *halves), (32, *halves), (32, *halves))
    *down, mid = (draw.normal(size.batch * FRAMES, *shape) for shape in shapes)
    arguments["down_block_additional_residuals"] = tuple(down)
    arguments["mid_block_additional_residual"] = mid
    return arguments


def stable_video_inputs(size: Size, seed: int) -> dict[str, Any]:
    """Inputs of UNetSpatioTemporalConditionModel: frames first, one image embedding."""
    one = Size(size.batch, size.height, size.width, 1)
    arguments = video_inputs(one, seed, key="sample", channels=8, frames_first=True)
    arguments["added_time_ids"] = Draw(seed + 15).uniform(size.batch, 3, low=1.0, high=9.0)
    return arguments


WAN: dict[str, Any] = {
    **HEADS,
    "in_channels": 4,
    "out_channels": 4,
    "text_dim": CROSS,
    "freq_dim": 16,
    "ffn_dim": 64,
    "num_layers": 2,
    "rope_max_seq_len": 32,
}
LTX: dict[str, Any] = {
    **HEADS,
    "in_channels": 4,
    "out_channels": 4,
    "cross_attention_dim": 32,
    "num_layers": 2,
    "caption_channels": CROSS,
}
COG: dict[str, Any] = {
    **HEADS,
    "in_channels": 4,
    "out_channels": 4,
    "time_embed_dim": 16,
    "text_embed_dim": CROSS,
    "num_layers": 2,
    "sample_width": 8,
    "sample_height": 8,
    "sample_frames": 9,
    "max_text_seq_length": 7,
}
JOY: dict[str, Any] = {
    "in_channels": 4,
    "hidden_size": 32,
    "num_attention_heads": 2,
    "text_dim": CROSS,
    "mlp_width_ratio": 2.0,
    "num_layers": 2,
    "rope_dim_list": [4, 6, 6],
}
HUNYUAN: dict[str, Any] = {
    **HEADS,
    "in_channels": 4,
    "out_channels": 4,
    "num_layers": 2,
    "num_single_layers": 2,
    "num_refiner_layers": 1,
    "mlp_ratio": 2.0,
    "text_embed_dim": CROSS,
    "rope_axes_dim": (4, 6, 6),
}


def add_video(name: str, inputs: Inputs, config: dict[str, Any], **options: Any) -> None:
    add(name, inputs, config, **{"mask_shape": filmed, **options})


def add_videos() -> None:
    """Transformers that attend to all frames, and models that attend to frames in turn."""
    masked = partial(video_inputs, text_mask="encoder_attention_mask")
    add_video("WanTransformer3DModel", video_inputs, WAN)
    add_video("WanTransformer3DModel-tokens", partial(wan_tokens, video_inputs), WAN)
    add_video(
        "WanVACETransformer3DModel",
        vace_inputs,
        {**WAN, "num_layers": 3, "vace_layers": [0, 1, 2], "vace_in_channels": 6},
    )
    add_video("SkyReelsV2Transformer3DModel", video_inputs, WAN)
    add_video(
        "SkyReelsV2Transformer3DModel-forced",
        partial(each_frame, partial(forced, video_inputs)),
        WAN,
    )
    add_video("ChronoEditTransformer3DModel", video_inputs, WAN)
    add_video(
        "HunyuanVideoTransformer3DModel",
        partial(masked, pooled_text=True, guidance=True),
        {**HUNYUAN, "pooled_projection_dim": POOLED},
    )
    add_video(
        "HunyuanVideoTransformer3DModel-replace",
        partial(masked, pooled_text=True, guidance=True),
        {**HUNYUAN, "pooled_projection_dim": POOLED, "image_condition_type": "token_replace"},
    )
    add_video(
        "HunyuanVideo15Transformer3DModel",
        hunyuan15_inputs,
        {**only(HUNYUAN, "num_single_layers"), "text_embed_2_dim": 12, "image_embed_dim": 10},
        sizes=TOKEN_SIZES,
    )
    add_video(
        "CosmosTransformer3DModel",
        video_inputs,
        {
            **HEADS,
            "in_channels": 4,
            "out_channels": 4,
            "num_layers": 2,
            "mlp_ratio": 2.0,
            "text_embed_dim": CROSS,
            "adaln_lora_dim": 8,
            "max_size": (4, 64, 64),
            "concat_padding_mask": False,
            "extra_pos_embed_type": "learnable",
        },
    )
    add_video(
        "Kandinsky5Transformer3DModel-video",
        kandinsky_video,
        {
            "in_text_dim": CROSS,
            "in_text_dim2": POOLED,
            "time_dim": 16,
            "model_dim": 32,
            "ff_dim": 64,
            "num_text_blocks": 1,
            "num_visual_blocks": 2,
            "axes_dims": (4, 6, 6),
            "in_visual_dim": 4,
            "out_visual_dim": 4,
        },
    )
    joy = {**JOY, "patch_size": [1, 2, 2]}
    add_video("JoyImageEditTransformer3DModel-references", video_inputs, joy)
    add_video("JoyImageEditTransformer3DModel-items", items_inputs, joy)
    cog = partial(video_inputs, frames_first=True)
    add_video("CogVideoXTransformer3DModel", cog, COG, sizes=fixed_text(PATCH_SIZES))
    add_video(
        "CogVideoXTransformer3DModel-rotary",
        partial(with_rotary, cog, 16),
        {**COG, "use_rotary_positional_embeddings": True},
        sizes=fixed_text(PATCH_SIZES),
    )
    add_video(
        "MochiTransformer3DModel",
        masked,
        {
            **HEADS,
            "patch_size": 2,
            "num_layers": 2,
            "pooled_projection_dim": 32,
            "in_channels": 4,
            "text_embed_dim": CROSS,
            "time_embed_dim": 16,
            "max_sequence_length": 16,
        },
    )
    add_video(
        "AllegroTransformer3DModel",
        partial(with_rotary_triple, masked),
        {
            "num_attention_heads": 2,
            "attention_head_dim": 24,
            "in_channels": 4,
            "out_channels": 4,
            "num_layers": 2,
            "cross_attention_dim": 48,
            "caption_channels": CROSS,
            "sample_height": 16,
            "sample_width": 16,
            "sample_frames": 3,
        },
    )
    add_video(
        "EasyAnimateTransformer3DModel",
        video_inputs,
        {
            **HEADS,
            "in_channels": 4,
            "out_channels": 4,
            "patch_size": 2,
            "num_layers": 2,
            "mmdit_layers": 1,
            "time_embed_dim": 16,
            "text_embed_dim": CROSS,
            "sample_width": 16,
            "sample_height": 16,
        },
    )
    add_video(
        "MotifVideoTransformer3DModel",
        masked,
        {**only(HUNYUAN, "num_refiner_layers"), "patch_size": 2},
    )
    add_video(
        "SanaVideoTransformer3DModel",
        masked,
        {
            **HEADS,
            "in_channels": 4,
            "out_channels": 4,
            "num_layers": 2,
            "num_cross_attention_heads": 2,
            "cross_attention_head_dim": 16,
            "cross_attention_dim": 32,
            "caption_channels": CROSS,
            "sample_size": 16,
        },
    )
    add(
        "LTXVideoTransformer3DModel",
        packed_video,
        LTX,
        mask_shape=lambda size: (FRAMES * size.height * size.width,),
        sizes=TOKEN_SIZES,
    )
    sound: dict[str, Any] = {
        "audio_in_channels": 4,
        "audio_out_channels": 4,
        "audio_num_attention_heads": 2,
        "audio_attention_head_dim": 8,
        "audio_cross_attention_dim": 16,
    }
    add(
        "LTX2VideoTransformer3DModel",
        ltx2_inputs,
        {**LTX, **sound},
        mask_shape=lambda size: (FRAMES * size.height * size.width,),
        sizes=TOKEN_SIZES,
    )
    add_video(
        "LatteTransformer3DModel",
        video_inputs,
        {
            **HEADS,
            "in_channels": 4,
            "out_channels": 8,
            "num_layers": 2,
            "patch_size": 2,
            "cross_attention_dim": 32,
            "caption_channels": CROSS,
            "sample_size": 8,
            "num_embeds_ada_norm": 1000,
            "norm_type": "ada_norm_single",
            "norm_elementwise_affine": False,
            "attention_bias": True,
            "video_length": FRAMES,
        },
    )
    halves: dict[str, Any] = {
        "in_channels": 4,
        "out_channels": 4,
        "block_out_channels": (16, 32),
        "layers_per_block": 1,
        "norm_num_groups": 8,
        "cross_attention_dim": CROSS,
    }
    add_video(
        "UNet3DConditionModel",
        motion_inputs,
        {
            **halves,
            "down_block_types": ("CrossAttnDownBlock3D", "DownBlock3D"),
            "up_block_types": ("UpBlock3D", "CrossAttnUpBlock3D"),
            "attention_head_dim": 8,
        },
        sizes=HALVED_SIZES,
    )
    animated = {
        **halves,
        "down_block_types": ("CrossAttnDownBlockMotion", "DownBlockMotion"),
        "up_block_types": ("UpBlockMotion", "CrossAttnUpBlockMotion"),
        "num_attention_heads": 2,
        "motion_num_attention_heads": 2,
        "use_motion_mid_block": True,
    }
    add_video("UNetMotionModel", animated_inputs, animated, sizes=HALVED_SIZES)
    add_video("UNetMotionModel-control", controlled_inputs, animated, sizes=HALVED_SIZES)
    add_video(
        "UNetSpatioTemporalConditionModel",
        stable_video_inputs,
        {
            **only(halves, "norm_num_groups"),
            "in_channels": 8,
            "block_out_channels": (32, 64),
            "down_block_types": ("CrossAttnDownBlockSpatioTemporal", "DownBlockSpatioTemporal"),
            "up_block_types": ("UpBlockSpatioTemporal", "CrossAttnUpBlockSpatioTemporal"),
            "num_attention_heads": (2, 4),
            "addition_time_embed_dim": 8,
            "projection_class_embeddings_input_dim": 24,
        },
        sizes=HALVED_SIZES,
    )


def forced(inputs: Inputs, size: Size, seed: int) -> dict[str, Any]:
    """Inputs of a model that denoises frames by steps of their own."""
    return {**inputs(size, seed), "enable_diffusion_forcing": True}


def with_rotary_triple(inputs: Inputs, size: Size, seed: int) -> dict[str, Any]:
    """Inputs with rotary tables of each axis and positions, as Allegro takes them."""
    from diffusers.models.embeddings import get_3d_rotary_pos_embed_allegro

    arguments = inputs(size, seed)
    make: Any = get_3d_rotary_pos_embed_allegro
    *tables, frames, rows, columns = make(
        embed_dim=24,
        crops_coords=((0, 0), (size.height // 2, size.width // 2)),
        grid_size=(size.height // 2, size.width // 2),
        temporal_size=FRAMES,
        interpolation_scale=(1.0, 1.0, 1.0),
    )
    places = torch.cartesian_prod(frames.long(), rows.long(), columns.long())
    arguments["image_rotary_emb"] = (tuple(tables), tuple(places.T.unsqueeze(1).contiguous()))
    return arguments


add_videos()

__all__ = ["FRAMES", "ZOO", "add_videos", "filmed"]
