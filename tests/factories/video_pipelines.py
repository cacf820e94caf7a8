"""Tiny pipelines that make videos."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from diffusers import CogVideoXDDIMScheduler, UniPCMultistepScheduler
from PIL import Image

from tests.factories.pipelines import STEPS, TEXT, Arguments, flow, picture, pipe_of, square
from tests.factories.videos import COG, HUNYUAN, LTX, WAN
from tests.factories.zoo import CROSS, HEADS, POOLED, Draw, only, tiny

SIDE = 32
FRAMES = 9  # of pixels, 3 of latents


@dataclass(frozen=True)
class VideoKind:
    """One pipeline class: how it is built and called, and what it calls the video to edit."""

    name: str
    build: Callable[[], Any]
    inputs: Callable[[int], Arguments]
    video: str = ""
    mask: str = "mask_image"


def film(seed: int = 0, count: int = FRAMES) -> list[Image.Image]:
    """Frames of smooth blobs."""
    return [picture(seed + frame, SIDE) for frame in range(count)]


def moving(count: int = FRAMES, first: int = 4, wide: int = 10) -> list[Image.Image]:
    """Masks of a square that moves to the right and down."""
    return [square(first + frame, first + frame + wide, SIDE) for frame in range(count)]


def wan_vae() -> Any:
    return tiny(
        "AutoencoderKLWan",
        base_dim=4,
        z_dim=4,
        dim_mult=[1, 1, 1, 1],
        num_res_blocks=1,
        temperal_downsample=[False, True, True],
        latents_mean=[0.0] * 4,
        latents_std=[1.0] * 4,
        scale_factor_temporal=4,
        scale_factor_spatial=8,
    )


def texts(seed: int, **more: Any) -> Arguments:
    draw = Draw(400 + seed)
    return {
        "prompt_embeds": draw.normal(1, TEXT, CROSS),
        "negative_prompt_embeds": draw.normal(1, TEXT, CROSS),
        "num_inference_steps": STEPS,
        "height": SIDE,
        "width": SIDE,
        **more,
    }


def wan(name: str, **config: Any) -> Any:
    net = tiny("WanTransformer3DModel", **{**WAN, **config})
    # shifted flow times, as the pipelines expect them
    scheduler = UniPCMultistepScheduler(
        prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0
    )
    parts = {"transformer": net, "vae": wan_vae(), "scheduler": scheduler}
    return pipe_of(name, lambda: parts)


def vace() -> Any:
    net = tiny(
        "WanVACETransformer3DModel",
        **{**WAN, "vace_layers": [0, 1], "vace_in_channels": 2 * 4 + 64},
    )
    parts = {"transformer": net, "vae": wan_vae(), "scheduler": flow(shift=3.0)}
    return pipe_of("WanVACEPipeline", lambda: parts)


def cog_vae() -> Any:
    return tiny(
        "AutoencoderKLCogVideoX",
        in_channels=3,
        out_channels=3,
        down_block_types=("CogVideoXDownBlock3D",) * 4,
        up_block_types=("CogVideoXUpBlock3D",) * 4,
        block_out_channels=(8, 8, 8, 8),
        latent_channels=4,
        layers_per_block=1,
        norm_num_groups=2,
        temporal_compression_ratio=4,
    )


def cog(name: str) -> Any:
    net = tiny(
        "CogVideoXTransformer3DModel",
        **{**COG, "sample_width": 4, "sample_height": 4, "max_text_seq_length": TEXT},
    )
    parts = {"transformer": net, "vae": cog_vae(), "scheduler": CogVideoXDDIMScheduler()}
    return pipe_of(name, lambda: parts)


def hunyuan() -> Any:
    net = tiny(
        "HunyuanVideoTransformer3DModel",
        **only(HUNYUAN, pooled_projection_dim=POOLED, guidance_embeds=True),
    )
    coder = tiny(
        "AutoencoderKLHunyuanVideo",
        in_channels=3,
        out_channels=3,
        latent_channels=4,
        down_block_types=("HunyuanVideoDownBlock3D",) * 4,
        up_block_types=("HunyuanVideoUpBlock3D",) * 4,
        block_out_channels=(8, 8, 8, 8),
        layers_per_block=1,
        norm_num_groups=4,
    )
    parts = {"transformer": net, "vae": coder, "scheduler": flow(shift=7.0)}
    return pipe_of("HunyuanVideoPipeline", lambda: parts)


def hunyuan_texts(seed: int) -> Arguments:
    draw = Draw(500 + seed)
    return {
        "prompt_embeds": draw.normal(1, TEXT, CROSS),
        "pooled_prompt_embeds": draw.normal(1, POOLED),
        "prompt_attention_mask": draw.keep(1, TEXT),
        "num_inference_steps": STEPS,
        "num_frames": FRAMES,
        "height": SIDE,
        "width": SIDE,
    }


def ltx(name: str) -> Any:
    net = tiny("LTXVideoTransformer3DModel", **LTX)
    coder = tiny(
        "AutoencoderKLLTXVideo",
        latent_channels=4,
        block_out_channels=(8, 8, 8, 8),
        decoder_block_out_channels=(8, 8, 8, 8),
        layers_per_block=(1, 1, 1, 1, 1),
        decoder_layers_per_block=(1, 1, 1, 1, 1),
        spatio_temporal_scaling=(True, True, False, False),
        decoder_spatio_temporal_scaling=(True, True, False, False),
        patch_size=2,
        encoder_causal=True,
        decoder_causal=False,
    )
    parts = {"transformer": net, "vae": coder, "scheduler": flow(use_dynamic_shifting=True)}
    return pipe_of(name, lambda: parts)


def ltx_texts(seed: int) -> Arguments:
    draw = Draw(600 + seed)
    given = texts(seed, num_frames=FRAMES, decode_timestep=0.05)
    masks = {f"{n}prompt_attention_mask": draw.keep(1, TEXT) for n in ("", "negative_")}
    return {**given, **masks}


def magvit() -> Any:
    return tiny(
        "AutoencoderKLMagvit",
        in_channels=3,
        out_channels=3,
        latent_channels=4,
        block_out_channels=(8, 8, 8, 8),
        down_block_types=(
            "SpatialDownBlock3D",
            "SpatialTemporalDownBlock3D",
            "SpatialTemporalDownBlock3D",
            "SpatialTemporalDownBlock3D",
        ),
        up_block_types=(
            "SpatialUpBlock3D",
            "SpatialTemporalUpBlock3D",
            "SpatialTemporalUpBlock3D",
            "SpatialTemporalUpBlock3D",
        ),
        layers_per_block=1,
        norm_num_groups=4,
    )


VIDEO_KINDS: dict[str, VideoKind] = {
    kind.name: kind
    for kind in (
        VideoKind(
            "WanVideoToVideoPipeline",
            partial(wan, "WanVideoToVideoPipeline"),
            partial(texts, strength=0.9),
            "video",
        ),
        VideoKind("WanPipeline", partial(wan, "WanPipeline"), partial(texts, num_frames=FRAMES)),
        VideoKind("WanVACEPipeline", vace, partial(texts, num_frames=FRAMES), "video", "mask"),
        VideoKind(
            "CogVideoXVideoToVideoPipeline",
            partial(cog, "CogVideoXVideoToVideoPipeline"),
            partial(texts, strength=0.9),
            "video",
        ),
        VideoKind(
            "CogVideoXPipeline",
            partial(cog, "CogVideoXPipeline"),
            partial(texts, num_frames=FRAMES),
        ),
        VideoKind("HunyuanVideoPipeline", hunyuan, hunyuan_texts),
        VideoKind("LTXPipeline", partial(ltx, "LTXPipeline"), ltx_texts),
    )
}

__all__ = ["FRAMES", "HEADS", "VIDEO_KINDS", "VideoKind", "film", "moving"]
