"""More tiny pipelines that make videos by transformers."""

from __future__ import annotations

from functools import partial
from typing import Any

from diffusers import EDMEulerScheduler

from tests.factories.pipelines import STEPS, TEXT, Arguments, ddim, flow, picture, pipe_of, seeded
from tests.factories.unet_pipelines import of_zoo, seen
from tests.factories.video_pipelines import (
    FRAMES,
    SIDE,
    VIDEO_KINDS,
    VideoKind,
    animate_texts,
    film,
    hunyuan,
    hunyuan_texts,
    hunyuan_vae,
    kandinsky,
    kandinsky_texts,
    ltx,
    ltx_texts,
    motif,
    sana_texts,
    sana_video,
    sky,
    texts,
    unprompted,
    wan_times,
    wan_vae,
)
from tests.factories.videos import HUNYUAN
from tests.factories.zoo import CROSS, POOLED, Draw, only, tiny

long = partial(texts, num_frames=FRAMES)


def first(inputs: Any, seed: int, **more: Any) -> Arguments:
    """Arguments with the picture that the video begins with."""
    return {**inputs(seed), "image": picture(3, SIDE), **more}


forced = partial(texts, num_frames=FRAMES, base_num_frames=FRAMES)


def mochi() -> Any:
    coder = tiny(
        "AutoencoderKLMochi",
        latent_channels=12,
        out_channels=3,
        encoder_block_out_channels=(32, 32, 32, 32),
        decoder_block_out_channels=(32, 32, 32, 32),
        layers_per_block=(1, 1, 1, 1, 1),
    )
    net = of_zoo("MochiTransformer3DModel", max_sequence_length=TEXT, in_channels=12)
    parts = {"transformer": net, "vae": coder, "scheduler": flow(invert_sigmas=True)}
    return pipe_of("MochiPipeline", lambda: parts)


def allegro() -> Any:
    coder: Any = tiny(
        "AutoencoderKLAllegro",
        latent_channels=4,
        block_out_channels=(8, 8, 8, 8),
        down_block_types=("AllegroDownBlock3D",) * 4,
        up_block_types=("AllegroUpBlock3D",) * 4,
        temporal_downsample_blocks=(True, True, False, False),
        temporal_upsample_blocks=(False, True, True, False),
        layers_per_block=1,
        norm_num_groups=4,
        temporal_compression_ratio=4,
    )
    coder.use_tiling, coder.kernel, coder.stride = True, (8, SIDE, SIDE), (8, SIDE, SIDE)
    net = of_zoo("AllegroTransformer3DModel", sample_height=4, sample_width=4)
    parts = {"transformer": net, "vae": coder, "scheduler": ddim()}
    return pipe_of("AllegroPipeline", lambda: parts)


def ltx_condition() -> Any:
    made = ltx("LTXConditionPipeline")
    made.scheduler = flow()
    return made


def hunyuan15(name: str, **more: Any) -> Any:
    from diffusers import ClassifierFreeGuidance

    coder = tiny(
        "AutoencoderKLHunyuanVideo15",
        latent_channels=4,
        block_out_channels=(16, 16, 16, 16),
        layers_per_block=1,
        spatial_compression_ratio=8,
    )
    net = of_zoo(
        "HunyuanVideo15Transformer3DModel", in_channels=9, target_size=SIDE, image_embed_dim=CROSS
    )
    guider = ClassifierFreeGuidance(guidance_scale=4.0)
    parts = {"transformer": net, "vae": coder, "scheduler": flow(shift=7.0), "guider": guider}
    made = pipe_of(name, lambda: {**parts, **more})
    made.vision_num_semantic_tokens, made.vision_states_dim = 4, CROSS
    return made


def hunyuan15_texts(seed: int) -> Arguments:
    draw, found = Draw(1000 + seed), {}
    for start in ("", "negative_"):
        found[f"{start}prompt_embeds"] = draw.normal(1, TEXT, CROSS)
        found[f"{start}prompt_embeds_mask"] = draw.keep(1, TEXT)
        found[f"{start}prompt_embeds_2"] = draw.normal(1, 5, 12)
        found[f"{start}prompt_embeds_mask_2"] = draw.keep(1, 5)
    sizes = {"height": SIDE, "width": SIDE, "num_frames": FRAMES}
    return {**found, **sizes, "num_inference_steps": STEPS}


class Harmless:
    """Stands for a safety checker that refuses nothing."""

    def to(self, *_: Any) -> Harmless:
        return self

    def check_text_safety(self, _: str) -> bool:
        return True

    def check_video_safety(self, video: Any) -> Any:
        return video


def cosmos_vae() -> Any:
    return tiny(
        "AutoencoderKLCosmos",
        latent_channels=4,
        encoder_block_out_channels=(8, 8, 8, 8),
        decode_block_out_channels=(8, 8, 8, 8),
        attention_resolutions=(8,),
        resolution=64,
        num_layers=1,
        patch_size=4,
        spatial_compression_ratio=4,
        temporal_compression_ratio=4,
    )


def cosmos(name: str, vae: Any = cosmos_vae, scheduler: Any = None, **config: Any) -> Any:
    net = of_zoo("CosmosTransformer3DModel", **config)
    times = scheduler or EDMEulerScheduler(sigma_data=0.5, prediction_type="epsilon")
    parts = {"transformer": net, "vae": vae(), "scheduler": times}
    return pipe_of(name, lambda: {**parts, "safety_checker": Harmless()})


def chrono() -> Any:
    net = of_zoo("ChronoEditTransformer3DModel", in_channels=12, image_dim=16)
    encoder = seen(CROSS, 224)["image_encoder"]
    parts = {"transformer": net, "vae": wan_vae(), "scheduler": wan_times()}
    more = {"image_encoder": encoder, "image_processor": seen(CROSS, 224)["feature_extractor"]}
    return pipe_of("ChronoEditPipeline", lambda: {**parts, **more})


def framepack() -> Any:
    net = tiny(
        "HunyuanVideoFramepackTransformer3DModel",
        **only(
            HUNYUAN,
            pooled_projection_dim=POOLED,
            has_image_proj=True,
            image_proj_dim=CROSS,
            has_clean_x_embedder=True,
        ),
    )
    parts = {"transformer": net, "vae": hunyuan_vae(), "scheduler": flow(shift=7.0)}
    return pipe_of("HunyuanVideoFramepackPipeline", lambda: {**parts, **siglip()})


def siglip() -> Arguments:
    from transformers import SiglipImageProcessor, SiglipVisionConfig, SiglipVisionModel

    config = SiglipVisionConfig(
        hidden_size=CROSS,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        image_size=16,
        patch_size=8,
    )
    encoder = seeded(6, SiglipVisionModel, config)
    size = {"height": 16, "width": 16}
    return {"image_encoder": encoder, "feature_extractor": SiglipImageProcessor(size=size)}


MORE_VIDEO_KINDS = (
    VideoKind(
        "SkyReelsV2DiffusionForcingImageToVideoPipeline",
        partial(sky, "SkyReelsV2DiffusionForcingImageToVideoPipeline"),
        partial(first, forced),
    ),
    VideoKind(
        "SkyReelsV2DiffusionForcingVideoToVideoPipeline",
        partial(sky, "SkyReelsV2DiffusionForcingVideoToVideoPipeline"),
        lambda seed: {**forced(seed), "video": film(5), "overlap_history": 5, "num_frames": 17},
        frames=26,
        given=15,
    ),
    VideoKind(
        "Kandinsky5I2VPipeline",
        partial(kandinsky, "Kandinsky5I2VPipeline"),
        lambda seed: {**kandinsky_texts(seed), "image": picture(3, 64), "num_frames": 21},
        side=64,
        frames=21,
    ),
    VideoKind(
        "MochiPipeline",
        mochi,
        lambda seed: {**animate_texts(seed), "num_frames": 13},
        frames=13,
    ),
    VideoKind(
        "MotifVideoImage2VideoPipeline",
        partial(motif, "MotifVideoImage2VideoPipeline"),
        partial(first, animate_texts, prompt=None),
    ),
    VideoKind(
        "SanaImageToVideoPipeline",
        partial(sana_video, "SanaImageToVideoPipeline"),
        partial(first, sana_texts),
    ),
    VideoKind(
        "AllegroPipeline",
        allegro,
        lambda seed: {**unprompted(seed), "num_frames": 8, "clean_caption": False},
        frames=8,
    ),
    VideoKind(
        "HunyuanVideoImageToVideoPipeline",
        partial(hunyuan, "HunyuanVideoImageToVideoPipeline", image_condition_type="token_replace"),
        lambda seed: {**hunyuan_texts(seed), "image": picture(3, SIDE)},
    ),
    VideoKind(
        "HunyuanSkyreelsImageToVideoPipeline",
        partial(hunyuan, "HunyuanSkyreelsImageToVideoPipeline", in_channels=8),
        lambda seed: {**hunyuan_texts(seed), "image": picture(3, SIDE)},
    ),
    VideoKind(
        "LTXConditionPipeline",
        ltx_condition,
        lambda seed: {**ltx_texts(seed), "image": picture(3, SIDE)},
    ),
    VideoKind(
        "HunyuanVideo15Pipeline", partial(hunyuan15, "HunyuanVideo15Pipeline"), hunyuan15_texts
    ),
    VideoKind(
        "HunyuanVideo15ImageToVideoPipeline",
        lambda: hunyuan15("HunyuanVideo15ImageToVideoPipeline", **siglip()),
        lambda seed: only(hunyuan15_texts(seed), "height", "width", image=picture(3, SIDE)),
    ),
    VideoKind(
        "HunyuanVideoFramepackPipeline",
        framepack,
        lambda seed: {**hunyuan_texts(seed), "image": picture(3, SIDE), "latent_window_size": 3},
        frames=13,
    ),
    VideoKind("ChronoEditPipeline", chrono, partial(first, long, num_frames=5), frames=5),
    VideoKind("CosmosTextToWorldPipeline", partial(cosmos, "CosmosTextToWorldPipeline"), long),
    VideoKind(
        "CosmosVideoToWorldPipeline",
        partial(cosmos, "CosmosVideoToWorldPipeline", in_channels=5),
        partial(first, long),
    ),
    VideoKind(
        "Cosmos2VideoToWorldPipeline",
        lambda: cosmos(
            "Cosmos2VideoToWorldPipeline", wan_vae, flow(use_karras_sigmas=True), in_channels=5
        ),
        partial(first, long),
    ),
    VideoKind(
        "Cosmos2_5_PredictBasePipeline",
        lambda: cosmos("Cosmos2_5_PredictBasePipeline", wan_vae, wan_times(), in_channels=5),
        lambda seed: long(seed, video=film(5, frames=5), num_latent_conditional_frames=2),
    ),
)
VIDEO_KINDS.update({kind.name: kind for kind in MORE_VIDEO_KINDS})
