"""Tiny pipelines that make videos with their sound."""

from __future__ import annotations

from functools import partial
from typing import Any

from tests.factories.pipelines import STEPS, TEXT, Arguments, flow, picture, pipe_of, seeded
from tests.factories.unet_pipelines import of_zoo
from tests.factories.video_pipelines import FRAMES, SIDE, VIDEO_KINDS, VideoKind
from tests.factories.zoo import Draw, tiny

WORDS, LAYERS = 4, 4  # what the text encoder gives: channels, and its layers
SOUND = 2 * (16 // 4)  # channels of its latents, and the height of its spectrum in them


def ltx2(name: str, shifted: bool = True, **config: Any) -> Any:
    """Build a pipeline of LTX 2.

    Args:
        name: the class of the pipeline.
        shifted: whether the scheduler moves its times by the number of tokens.
        config: settings of the denoiser.
    """
    coder = tiny(
        "AutoencoderKLLTX2Video",
        latent_channels=4,
        block_out_channels=(8, 8),
        down_block_types=("LTX2VideoDownBlock3D",) * 2,
        decoder_block_out_channels=(8, 8),
        layers_per_block=(1, 1, 1),
        decoder_layers_per_block=(1, 1, 1),
        spatio_temporal_scaling=(True, True),
        decoder_spatio_temporal_scaling=(True, True),
        decoder_inject_noise=(False, False, False),
        downsample_type=("spatiotemporal", "spatiotemporal"),
        upsample_type=("spatiotemporal", "spatiotemporal"),
        upsample_residual=(False, False),
        upsample_factor=(1, 1),
        patch_size=2,
        spatial_compression_ratio=8,
        temporal_compression_ratio=4,
    )
    sounds = tiny(
        "AutoencoderKLLTX2Audio",
        base_channels=8,
        ch_mult=(1, 1, 1),
        num_res_blocks=1,
        latent_channels=2,
        mel_bins=16,
    )
    net = of_zoo(
        "LTX2VideoTransformer3DModel",
        audio_in_channels=SOUND,
        audio_out_channels=SOUND,
        caption_channels=32,
        vae_scale_factors=(4, 8, 8),
        **config,
    )
    from diffusers.pipelines.ltx2.connectors import LTX2TextConnectors
    from diffusers.pipelines.ltx2.vocoder import LTX2Vocoder

    connectors = seeded(
        7,
        LTX2TextConnectors,
        caption_channels=32,
        text_proj_in_factor=LAYERS,
        video_connector_num_attention_heads=2,
        video_connector_attention_head_dim=16,
        video_connector_num_layers=1,
        video_connector_num_learnable_registers=None,
        audio_connector_num_attention_heads=2,
        audio_connector_attention_head_dim=16,
        audio_connector_num_layers=1,
        audio_connector_num_learnable_registers=None,
    )
    vocoder = seeded(
        8,
        LTX2Vocoder,
        in_channels=32,
        hidden_channels=8,
        upsample_kernel_sizes=[4, 4],
        upsample_factors=[2, 2],
        resnet_kernel_sizes=[3],
        resnet_dilations=[[1, 3]],
    )
    parts = {
        "vae": coder,
        "audio_vae": sounds,
        "transformer": net,
        "connectors": connectors,
        "vocoder": vocoder,
        "scheduler": flow(use_dynamic_shifting=shifted),
    }
    return pipe_of(name, lambda: parts)


def sounding(seed: int, **more: Any) -> Arguments:
    draw, found = Draw(1100 + seed), {}
    for start in ("", "negative_"):
        found[f"{start}prompt_embeds"] = draw.normal(1, TEXT, 32 * LAYERS)
        found[f"{start}prompt_attention_mask"] = draw.keep(1, TEXT)
    sizes = {"height": SIDE, "width": SIDE, "num_frames": FRAMES, "num_inference_steps": STEPS}
    return {**found, **sizes, "spatio_temporal_guidance_blocks": [1], **more}


def keyframes(seed: int) -> Arguments:
    """Few steps of a distilled model, which computes frames between keyframes too."""
    given = sounding(seed, sigmas=[1.0, 0.7, 0.3])
    unknown = "num_inference_steps", "spatio_temporal_guidance_blocks"
    return {n: v for n, v in given.items() if n not in unknown and n[:8] != "negative"}


SOUNDING_KINDS = (
    VideoKind("LTX2Pipeline", partial(ltx2, "LTX2Pipeline"), sounding),
    VideoKind(
        "LTX2ImageToVideoPipeline",
        partial(ltx2, "LTX2ImageToVideoPipeline"),
        lambda seed: sounding(seed, image=picture(3, SIDE), image_crf=0),
    ),
    VideoKind("LTX2ConditionPipeline", partial(ltx2, "LTX2ConditionPipeline"), sounding),
    VideoKind("LTX2InContextPipeline", partial(ltx2, "LTX2InContextPipeline"), sounding),
    VideoKind("LTX2HDRPipeline", partial(ltx2, "LTX2HDRPipeline"), sounding),
    VideoKind(
        "LTX2DFRPipeline",
        partial(ltx2, "LTX2DFRPipeline", shifted=False, use_keyframes_abs_pos_embedding=True),
        keyframes,
    ),
)
VIDEO_KINDS.update({kind.name: kind for kind in SOUNDING_KINDS})
