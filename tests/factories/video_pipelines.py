"""Tiny pipelines that make videos."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from diffusers import ClassifierFreeGuidance, CogVideoXDDIMScheduler, UniPCMultistepScheduler
from PIL import Image

from tests.factories.pipelines import STEPS, TEXT, Arguments, flow, picture, pipe_of, square
from tests.factories.unet_pipelines import of_zoo
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
    side: int = SIDE  # of each frame
    frames: int = FRAMES  # of the result
    given: int = 0  # the first of them, which follow from a video that is passed
    arrays: bool = False  # whether a video and its mask are tensors (1, colours, frames, …)
    chunks: bool = False  # whether calls make some frames, masked where any frame of the video is

    def given_as(self, pictures: list[Image.Image]) -> Any:
        """A video or its mask as the pipeline takes it."""
        if not self.arrays:
            return pictures
        found = torch.stack([torch.from_numpy(np.array(one)) for one in pictures])
        found = found[..., None] if found.dim() == 3 else found
        return found.movedim(-1, 0)[None] / 255


def videos_of(result: Any) -> Any:
    """The videos of a result as an array: (videos, frames, height, width, colours)."""
    found = np.asarray(result.frames if "frames" in result else result.images)
    return found if found.ndim == 5 else found[None]


def film(seed: int = 0, side: int = SIDE, frames: int = FRAMES) -> list[Image.Image]:
    """Frames of smooth blobs."""
    return [picture(seed + frame, side) for frame in range(frames)]


def moving(side: int = SIDE, frames: int = FRAMES) -> list[Image.Image]:
    """Masks of a square that moves to the right and down, and back from the edge."""
    places = (frame % (side - 14) for frame in range(frames))
    return [square(4 + place, 14 + place, side) for place in places]


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


def wan_times() -> Any:
    """Shifted flow times, as pipelines of Wan expect them."""
    return UniPCMultistepScheduler(
        prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0
    )


def wan(name: str, **config: Any) -> Any:
    net = tiny("WanTransformer3DModel", **{**WAN, **config})
    parts = {"transformer": net, "vae": wan_vae(), "scheduler": wan_times()}
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


def cog(name: str, **config: Any) -> Any:
    net = tiny(
        "CogVideoXTransformer3DModel",
        **{**COG, "sample_width": 4, "sample_height": 4, "max_text_seq_length": TEXT, **config},
    )
    parts = {"transformer": net, "vae": cog_vae(), "scheduler": CogVideoXDDIMScheduler()}
    return pipe_of(name, lambda: parts)


def hunyuan(name: str, **config: Any) -> Any:
    net = tiny(
        "HunyuanVideoTransformer3DModel",
        **only(HUNYUAN, pooled_projection_dim=POOLED, **config),
    )
    parts = {"transformer": net, "vae": hunyuan_vae(), "scheduler": flow(shift=7.0)}
    return pipe_of(name, lambda: parts)


def hunyuan_vae() -> Any:
    return tiny(
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


def wan_image(seed: int) -> Arguments:
    """A picture that the video begins with."""
    return texts(seed, num_frames=FRAMES, image=picture(3, SIDE))


def sky(name: str) -> Any:
    net = tiny("SkyReelsV2Transformer3DModel", **WAN)
    parts = {"transformer": net, "vae": wan_vae(), "scheduler": wan_times()}
    return pipe_of(name, lambda: parts)


def kandinsky(name: str) -> Any:
    net = of_zoo("Kandinsky5Transformer3DModel-video", visual_cond=True)
    parts = {"transformer": net, "vae": hunyuan_vae(), "scheduler": flow()}
    return pipe_of(name, lambda: parts)


def kandinsky_texts(seed: int) -> Arguments:
    draw, found = Draw(800 + seed), {}
    for start in ("", "negative_"):
        found[f"{start}prompt_embeds_qwen"] = draw.normal(1, TEXT, CROSS)
        found[f"{start}prompt_embeds_clip"] = draw.normal(1, POOLED)
        found[f"{start}prompt_cu_seqlens"] = torch.tensor([0, TEXT], dtype=torch.int32)
    sizes = {"height": 64, "width": 64, "num_frames": FRAMES}
    return {**found, **sizes, "num_inference_steps": STEPS}


def animate(name: str) -> Any:
    channels = 9 if "Inpaint" in name else 4
    net = of_zoo("EasyAnimateTransformer3DModel", in_channels=channels)
    parts = {"transformer": net, "vae": magvit(), "scheduler": flow()}
    return pipe_of(name, lambda: parts)


def animate_texts(seed: int) -> Arguments:
    draw = Draw(900 + seed)
    masks = {f"{n}prompt_attention_mask": draw.keep(1, TEXT) for n in ("", "negative_")}
    return {**texts(seed, num_frames=FRAMES), **masks}


def cog_image(seed: int) -> Arguments:
    return texts(seed, num_frames=FRAMES, image=picture(3, SIDE))


def controlled(seed: int) -> Arguments:
    return texts(seed, control_video=film(5))


def two_wans() -> Any:
    """Two denoisers, of early steps and of later ones."""
    nets = {n: tiny("WanTransformer3DModel", **WAN) for n in ("transformer", "transformer_2")}
    parts = {**nets, "vae": wan_vae(), "scheduler": wan_times(), "boundary_ratio": 0.8}
    return pipe_of("WanPipeline", lambda: parts)


def unprompted(seed: int) -> Arguments:
    """Text states in place of the empty text that a pipeline has by default."""
    return {**animate_texts(seed), "negative_prompt": None}


def sana_video(name: str) -> Any:
    net = of_zoo("SanaVideoTransformer3DModel")
    parts = {"transformer": net, "vae": wan_vae(), "scheduler": flow(shift=7.0)}
    return pipe_of(name, lambda: parts)


def sana_texts(seed: int) -> Arguments:
    given = {**unprompted(seed), "frames": FRAMES, "use_resolution_binning": False}
    return {n: v for n, v in given.items() if n != "num_frames"}


def motif(name: str) -> Any:
    net = of_zoo("MotifVideoTransformer3DModel", in_channels=9)
    parts = {"transformer": net, "vae": wan_vae(), "scheduler": flow()}
    guider = ClassifierFreeGuidance(guidance_scale=4.0)
    return pipe_of(name, lambda: {**parts, "guider": guider})


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
        VideoKind(
            "HunyuanVideoPipeline",
            partial(hunyuan, "HunyuanVideoPipeline", guidance_embeds=True),
            hunyuan_texts,
        ),
        VideoKind("LTXPipeline", partial(ltx, "LTXPipeline"), ltx_texts),
        VideoKind(
            "LTXImageToVideoPipeline",
            partial(ltx, "LTXImageToVideoPipeline"),
            lambda seed: {**ltx_texts(seed), "image": picture(3, SIDE)},
        ),
        VideoKind(
            "WanImageToVideoPipeline",
            partial(wan, "WanImageToVideoPipeline", in_channels=12),
            wan_image,
        ),
        VideoKind(
            "LucyEditPipeline",
            partial(wan, "LucyEditPipeline", in_channels=8),
            partial(texts, num_frames=FRAMES),
            "video",
        ),
        VideoKind(
            "SkyReelsV2Pipeline",
            partial(sky, "SkyReelsV2Pipeline"),
            partial(texts, num_frames=FRAMES),
        ),
        VideoKind(
            "CogVideoXImageToVideoPipeline",
            partial(cog, "CogVideoXImageToVideoPipeline", in_channels=8),
            cog_image,
        ),
        VideoKind(
            "CogVideoXFunControlPipeline",
            partial(cog, "CogVideoXFunControlPipeline", in_channels=8),
            controlled,
        ),
        VideoKind(
            "Kandinsky5T2VPipeline",
            partial(kandinsky, "Kandinsky5T2VPipeline"),
            kandinsky_texts,
            side=64,
        ),
        VideoKind("EasyAnimatePipeline", partial(animate, "EasyAnimatePipeline"), animate_texts),
        VideoKind("WanPipeline-two", two_wans, partial(texts, num_frames=FRAMES)),
        VideoKind("SanaVideoPipeline", partial(sana_video, "SanaVideoPipeline"), sana_texts),
        VideoKind("MotifVideoPipeline", partial(motif, "MotifVideoPipeline"), animate_texts),
        VideoKind(
            "SkyReelsV2DiffusionForcingPipeline",
            partial(sky, "SkyReelsV2DiffusionForcingPipeline"),
            partial(texts, num_frames=FRAMES, base_num_frames=FRAMES, prompt=None),
        ),
    )
}

__all__ = ["FRAMES", "HEADS", "VIDEO_KINDS", "VideoKind", "film", "moving", "videos_of"]
