"""Tiny pipelines that make videos by denoisers whose frames lie beside the batch."""

from __future__ import annotations

from functools import partial
from typing import Any

from diffusers import EulerDiscreteScheduler

from tests.factories.pipelines import Arguments, control_net, ddim, picture, pipe_of, vae
from tests.factories.unet_pipelines import of_zoo, seen
from tests.factories.video_pipelines import (
    FRAMES,
    SIDE,
    VIDEO_KINDS,
    VideoKind,
    film,
    texts,
)
from tests.factories.zoo import CROSS, POOLED, SD15, Draw, tiny


def animated(name: str, **more: Any) -> Any:
    """Build a pipeline of AnimateDiff: a motion model, and an autoencoder of pictures."""
    parts = {"vae": vae(), "unet": of_zoo("UNetMotionModel"), "scheduler": ddim(), **more}
    return pipe_of(name, lambda: parts)


def controlled(name: str) -> Any:
    downs = "CrossAttnDownBlock2D", "DownBlock2D"
    config = {**SD15, "block_out_channels": (16, 32), "down_block_types": downs}
    net = control_net({**config, "layers_per_block": 1})
    return animated(name, controlnet=net)


def stable_video() -> Any:
    """Build Stable Video Diffusion: a picture moves."""
    coder = tiny(
        "AutoencoderKLTemporalDecoder",
        block_out_channels=(32, 32),
        down_block_types=("DownEncoderBlock2D",) * 2,
        latent_channels=4,
        layers_per_block=1,
        force_upcast=False,
        scaling_factor=0.5,
    )
    net = of_zoo("UNetSpatioTemporalConditionModel", num_frames=FRAMES)
    times = EulerDiscreteScheduler(prediction_type="v_prediction", use_karras_sigmas=True)
    parts = {"vae": coder, "unet": net, "scheduler": times, **seen(CROSS, 224)}
    return pipe_of("StableVideoDiffusionPipeline", lambda: parts)


def moved(seed: int) -> Arguments:
    return {
        "image": picture(3 + seed, SIDE),
        "num_frames": FRAMES,
        "num_inference_steps": 3,
        "height": SIDE,
        "width": SIDE,
    }


def latte() -> Any:
    net = of_zoo("LatteTransformer3DModel", video_length=FRAMES)
    parts = {"transformer": net, "vae": vae(), "scheduler": ddim()}
    return pipe_of("LattePipeline", lambda: parts)


def latte_texts(seed: int) -> Arguments:
    return texts(seed, video_length=FRAMES, negative_prompt=None, clean_caption=False)


def synthesis(name: str) -> Any:
    """Build a pipeline of a UNet with convolutions and attention along the frames."""
    parts = {"vae": vae(), "unet": of_zoo("UNet3DConditionModel"), "scheduler": ddim()}
    return pipe_of(name, lambda: parts)


def sparse() -> Any:
    """Build AnimateDiff with a ControlNet that controls some frames."""
    net = tiny(
        "SparseControlNetModel",
        down_block_types=("CrossAttnDownBlockMotion", "DownBlockMotion"),
        block_out_channels=(16, 32),
        layers_per_block=1,
        norm_num_groups=8,
        cross_attention_dim=CROSS,
        attention_head_dim=2,
        motion_num_attention_heads=2,
        conditioning_channels=3,
        conditioning_embedding_out_channels=(8, 16),
        use_simplified_condition_embedding=False,
    )
    return animated("AnimateDiffSparseControlNetPipeline", controlnet=net)


def larger() -> Any:
    """Build AnimateDiff with the conditions of SDXL: sizes, and a pooled text."""
    net = of_zoo(
        "UNetMotionModel",
        addition_embed_type="text_time",
        addition_time_embed_dim=8,
        projection_class_embeddings_input_dim=6 * 8 + POOLED,
    )
    return animated("AnimateDiffSDXLPipeline", unet=net)


def larger_texts(seed: int) -> Arguments:
    draw = Draw(1200 + seed)
    pooled = {f"{n}pooled_prompt_embeds": draw.normal(1, POOLED) for n in ("", "negative_")}
    return {**long(seed), **pooled}


long = partial(texts, num_frames=FRAMES)
changed = partial(texts, strength=0.9)


def resized(seed: int) -> Arguments:
    """A video's own size is the result's."""
    return {n: v for n, v in changed(seed).items() if n not in ("height", "width")}


MOTION_KINDS = (
    VideoKind("AnimateDiffPipeline", partial(animated, "AnimateDiffPipeline"), long),
    VideoKind(
        "AnimateDiffVideoToVideoPipeline",
        partial(animated, "AnimateDiffVideoToVideoPipeline"),
        changed,
        "video",
    ),
    VideoKind(
        "AnimateDiffControlNetPipeline",
        partial(controlled, "AnimateDiffControlNetPipeline"),
        lambda seed: long(seed, conditioning_frames=film(5)),
    ),
    VideoKind(
        "AnimateDiffVideoToVideoControlNetPipeline",
        partial(controlled, "AnimateDiffVideoToVideoControlNetPipeline"),
        lambda seed: changed(seed, conditioning_frames=film(5)),
        "video",
    ),
    VideoKind("StableVideoDiffusionPipeline", stable_video, moved),
    VideoKind("LattePipeline", latte, latte_texts),
    VideoKind("TextToVideoSDPipeline", partial(synthesis, "TextToVideoSDPipeline"), long),
    VideoKind(
        "VideoToVideoSDPipeline", partial(synthesis, "VideoToVideoSDPipeline"), resized, "video"
    ),
    VideoKind(
        "AnimateDiffPAGPipeline",
        partial(animated, "AnimateDiffPAGPipeline", pag_applied_layers="mid"),
        long,
    ),
    VideoKind("AnimateDiffSDXLPipeline", larger, larger_texts),
    VideoKind(
        "AnimateDiffSparseControlNetPipeline",
        sparse,
        lambda seed: long(seed, conditioning_frames=film(5)[:1]),
    ),
    VideoKind(
        "PIAPipeline",
        lambda: animated("PIAPipeline", unet=of_zoo("UNetMotionModel", in_channels=9)),
        lambda seed: long(seed, image=picture(3, SIDE)),
    ),
)
VIDEO_KINDS.update({kind.name: kind for kind in MOTION_KINDS})
