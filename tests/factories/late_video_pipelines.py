"""Further tiny pipelines that make videos: chunks of frames, frames as pictures, arrays."""

from __future__ import annotations

from functools import partial
from typing import Any

from diffusers import FlowMapEulerDiscreteScheduler, HeliosScheduler

from tests.factories.more_video_pipelines import first, long
from tests.factories.pipelines import (
    Arguments,
    ddim,
    flow,
    pipe_of,
    sdxl,
    still,
    text_of,
    vae,
)
from tests.factories.small_unets import spoken
from tests.factories.unet_pipelines import of_zoo, seen
from tests.factories.video_pipelines import (
    FRAMES,
    SIDE,
    VIDEO_KINDS,
    VideoKind,
    animate_texts,
    hunyuan_vae,
    magvit,
    texts,
    wan_times,
    wan_vae,
)
from tests.factories.videos import WAN
from tests.factories.zoo import CROSS, POOLED, Draw, only, tiny


def sky_begun() -> Any:
    net = tiny("SkyReelsV2Transformer3DModel", **{**WAN, "in_channels": 12, "image_dim": 16})
    more = {"image_encoder": seen(CROSS, 224)["image_encoder"]}
    more["image_processor"] = seen(CROSS, 224)["feature_extractor"]
    parts = {"transformer": net, "vae": wan_vae(), "scheduler": wan_times(), **more}
    return pipe_of("SkyReelsV2ImageToVideoPipeline", lambda: parts)


def i2vgen() -> Any:
    net = tiny(
        "I2VGenXLUNet",
        module="diffusers.models.unets.unet_i2vgen_xl",
        sample_size=SIDE // 2,
        down_block_types=("CrossAttnDownBlock3D", "DownBlock3D"),
        up_block_types=("UpBlock3D", "CrossAttnUpBlock3D"),
        block_out_channels=(16, 32),
        layers_per_block=1,
        norm_num_groups=8,
        cross_attention_dim=CROSS,
        attention_head_dim=8,
    )
    parts = {"vae": still(vae()), "unet": net, "scheduler": ddim(), **seen(CROSS, 224)}
    return pipe_of("I2VGenXLPipeline", lambda: parts)


def inpainting() -> Any:
    config = {"in_channels": 12, "resize_inpaint_mask_directly": False}
    net = of_zoo("EasyAnimateTransformer3DModel", **config)
    parts = {"transformer": net, "vae": magvit(), "scheduler": flow()}
    return pipe_of("EasyAnimateInpaintPipeline", lambda: parts)


def anyflow(name: str, kind: str, **config: Any) -> Any:
    net = tiny(kind, **{**WAN, **config})
    parts = {"transformer": net, "vae": wan_vae(), "scheduler": FlowMapEulerDiscreteScheduler()}
    return pipe_of(name, lambda: parts)


def helios(name: str, *stages: float) -> Any:
    net = tiny("HeliosTransformer3DModel", **only(WAN, "rope_max_seq_len", rope_dim=(4, 6, 6)))
    # with the usual gamma the noise between stages has a covariance of rank 3
    times = HeliosScheduler(stages=len(stages) - 1, stage_range=list(stages), gamma=0.3)
    parts = {"transformer": net, "vae": wan_vae(), "scheduler": times}
    return pipe_of(name, lambda: parts)


def pyramid(seed: int) -> Arguments:
    """Steps on half of the sides, and then on all of the picture."""
    given = long(seed, height=64, width=64, num_frames=18, num_latent_frames_per_chunk=3)
    del given["num_inference_steps"]
    return {**given, "pyramid_num_inference_steps_list": [2, 2]}


def kandinsky_sixth() -> Any:
    net = tiny(
        "Kandinsky6Transformer3DModel",
        in_visual_dim=4,
        out_visual_dim=4,
        in_text_dim=CROSS,
        in_text_dim2=POOLED,
        time_dim=16,
        model_dim=32,
        ff_dim=64,
        num_text_blocks=1,
        num_visual_blocks=2,
        axes_dims=(4, 6, 6),
        in_audio_dim=4,
        out_audio_dim=4,
        text_token_padding=True,
        ca_rope=True,
        cross_gates=True,
        fix_modulation=True,
        visual_token_type_num_embeddings=2,
    )
    parts = {"transformer": net, "vae": hunyuan_vae(), "scheduler": flow()}
    return pipe_of("Kandinsky6TI2VAPipeline", lambda: parts)


def kandinsky_sixth_texts(seed: int, **more: Any) -> Arguments:
    draw = Draw(1400 + seed)
    pooled = {f"{n}pooled_prompt_embeds": draw.normal(1, POOLED) for n in ("", "negative_")}
    return {**texts(seed, num_frames=FRAMES, sample_audio=False), **pooled, **more}


MOVING_ZERO: Arguments = {
    "num_inference_steps": 6,
    "t0": 2,
    "t1": 4,
    "video_length": 4,
    "motion_field_strength_x": 2,
    "motion_field_strength_y": 2,
    "height": SIDE,
    "width": SIDE,
}


def moving_zero(seed: int) -> Arguments:
    return {"prompt": ("a cat", "two dogs", "the red house")[seed % 3], **MOVING_ZERO}


def moving_zero_xl(seed: int) -> Arguments:
    return {"prompt": None, **text_of(seed, pooled=True), **MOVING_ZERO}


LATE_VIDEO_KINDS = (
    VideoKind("SkyReelsV2ImageToVideoPipeline", sky_begun, partial(first, long)),
    VideoKind("I2VGenXLPipeline", i2vgen, partial(first, long)),
    VideoKind(
        "EasyAnimateInpaintPipeline",
        inpainting,
        animate_texts,
        "video",
        "mask_video",
        arrays=True,
    ),
    VideoKind(
        "AnyFlowPipeline",
        partial(anyflow, "AnyFlowPipeline", "AnyFlowTransformer3DModel"),
        partial(long, guidance_scale=3.0),
    ),
    VideoKind(
        "AnyFlowFARPipeline",
        partial(
            anyflow, "AnyFlowFARPipeline", "AnyFlowFARTransformer3DModel", chunk_partition=(1, 2)
        ),
        partial(long, guidance_scale=3.0),
        chunks=True,
    ),
    VideoKind(
        "HeliosPipeline",
        partial(helios, "HeliosPipeline", 0, 1),
        partial(long, height=64, width=64, num_frames=18, num_latent_frames_per_chunk=3),
        side=64,
        frames=17,
        chunks=True,
    ),
    VideoKind(
        "HeliosPyramidPipeline",
        partial(helios, "HeliosPyramidPipeline", 0, 0.5, 1),
        pyramid,
        side=64,
        frames=17,
        chunks=True,
    ),
    VideoKind(
        "Kandinsky6TI2VAPipeline",
        kandinsky_sixth,
        partial(kandinsky_sixth_texts, height=64, width=64),
        side=64,
    ),
    VideoKind(
        "TextToVideoZeroPipeline",
        lambda: pipe_of("TextToVideoZeroPipeline", spoken),
        moving_zero,
        frames=4,
    ),
    VideoKind(
        "TextToVideoZeroSDXLPipeline",
        lambda: pipe_of("TextToVideoZeroSDXLPipeline", sdxl),
        moving_zero_xl,
        frames=4,
    ),
)
VIDEO_KINDS.update({kind.name: kind for kind in LATE_VIDEO_KINDS})
