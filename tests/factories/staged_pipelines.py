"""Pipelines that run others or several denoisers in turn, or whose prompt is a picture."""

from functools import partial
from typing import Any

from diffusers import DDPMWuerstchenScheduler, UnCLIPScheduler

from tests.factories.edit_pipelines import kandinsky
from tests.factories.more_pipelines import kandinsky as kandinsky_inpaint
from tests.factories.pipelines import (
    SIDE,
    STEPS,
    Arguments,
    add,
    clip_tokenizer,
    picture,
    seeded,
    sized,
    usual,
    words,
)
from tests.factories.small_unets import sd, spoken
from tests.factories.unet_pipelines import (
    boxed,
    kandinsky_first,
    of_zoo,
    seen,
    vision,
    vision_processor,
)
from tests.factories.zoo import CROSS, POOLED, Draw, tiny


def clip_projected(width: int, projection: int) -> Any:
    """A tiny CLIP text encoder with a projection."""
    from transformers import CLIPTextConfig, CLIPTextModelWithProjection

    config = CLIPTextConfig(
        vocab_size=len(words()),
        hidden_size=width,
        intermediate_size=32,
        projection_dim=projection,
        num_attention_heads=2,
        num_hidden_layers=1,
        max_position_embeddings=16,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=1,
    )
    return seeded(9, CLIPTextModelWithProjection, config)


def prompt_of(seed: int) -> str:
    return ("a cat", "two dogs", "the red house")[seed % 3]


# Kandinsky: a prior makes the embedding of a picture, a second pipeline the picture.


def with_prior(parts: Arguments) -> Arguments:
    prior = tiny(
        "PriorTransformer",
        num_attention_heads=2,
        attention_head_dim=8,
        num_layers=1,
        embedding_dim=POOLED,
        num_embeddings=16,
    )
    return {
        **parts,
        "prior_prior": prior,
        "prior_image_encoder": vision(POOLED),
        "prior_text_encoder": clip_projected(POOLED, POOLED),
        "prior_tokenizer": clip_tokenizer(),
        "prior_scheduler": UnCLIPScheduler(prediction_type="sample", clip_sample_range=5.0),
        "prior_image_processor": vision_processor(),
    }


def combined(seed: int, **more: Any) -> Arguments:
    return {"prompt": prompt_of(seed), "prior_num_inference_steps": 2, **sized({}), **more}


begun: Arguments = {"num_inference_steps": 5, "strength": 0.6}
add(
    "KandinskyV22Img2ImgCombinedPipeline",
    "image",
    lambda: with_prior(kandinsky()),
    partial(combined, **begun),
)
add(
    "KandinskyV22InpaintCombinedPipeline",
    "blend",
    lambda: with_prior(kandinsky_inpaint()),
    partial(combined, num_inference_steps=STEPS),
)
add(
    "KandinskyImg2ImgCombinedPipeline",
    "image",
    lambda: with_prior(kandinsky_first(4)),
    partial(combined, **begun),
    output="np",
)
add(
    "KandinskyInpaintCombinedPipeline",
    "channels",
    lambda: with_prior(kandinsky_first(9)),
    partial(combined, num_inference_steps=STEPS),
    output="np",
)


# Stable Cascade: a prior of small latents, a decoder of larger ones.


def cascade() -> Arguments:
    coder = tiny(
        "PaellaVQModel",
        module="diffusers.pipelines.deprecated.wuerstchen",
        levels=2,
        bottleneck_blocks=1,
        embed_dim=8,
        num_vq_embeddings=16,
    )
    return {
        "decoder": of_zoo("StableCascadeUNet-decoder", effnet_in_channels=4),
        "scheduler": DDPMWuerstchenScheduler(),
        "vqgan": coder,
        "prior_prior": of_zoo("StableCascadeUNet-prior"),
        "prior_scheduler": DDPMWuerstchenScheduler(),
        "prior_image_encoder": vision(POOLED),
        "prior_feature_extractor": vision_processor(),
        "text_encoder": clip_projected(CROSS, POOLED),
        "prior_text_encoder": clip_projected(CROSS, POOLED),
    }


def cascade_text(seed: int) -> Arguments:
    draw, found = Draw(seed), {}
    for start in ("", "negative_"):
        found[f"{start}prompt_embeds"] = draw.normal(1, 5, CROSS)
        found[f"{start}prompt_embeds_pooled"] = draw.normal(1, 1, POOLED)
    return found


add(
    "StableCascadeCombinedPipeline",
    "text",
    cascade,
    lambda seed: {
        **usual(seed, cascade_text, height=128, width=128),
        "prior_num_inference_steps": 2,
        "images": [picture(50)],
    },
    128,
    "np",
)


# Karlo: one denoiser, then two of a larger picture.


def karlo() -> Arguments:
    from diffusers.pipelines.deprecated.unclip.text_proj import UnCLIPTextProjModel

    blocks: Arguments = {
        "block_out_channels": (16, 32),
        "layers_per_block": 1,
        "norm_num_groups": 8,
    }
    decoder = tiny(
        "UNet2DConditionModel",
        **blocks,
        sample_size=SIDE // 2,
        in_channels=3,
        out_channels=6,
        down_block_types=("ResnetDownsampleBlock2D", "SimpleCrossAttnDownBlock2D"),
        up_block_types=("SimpleCrossAttnUpBlock2D", "ResnetUpsampleBlock2D"),
        mid_block_type="UNetMidBlock2DSimpleCrossAttn",
        cross_attention_dim=CROSS,
        attention_head_dim=8,
        resnet_time_scale_shift="scale_shift",
        class_embed_type="identity",
    )
    larger = partial(
        tiny,
        "UNet2DModel",
        **blocks,
        sample_size=SIDE,
        in_channels=6,
        out_channels=3,
        down_block_types=("ResnetDownsampleBlock2D",) * 2,
        up_block_types=("ResnetUpsampleBlock2D",) * 2,
        add_attention=False,
    )
    projection = seeded(
        10,
        UnCLIPTextProjModel,
        clip_embeddings_dim=POOLED,
        time_embed_dim=64,
        cross_attention_dim=CROSS,
    )
    return {
        "decoder": decoder,
        "text_encoder": clip_projected(POOLED, POOLED),
        "tokenizer": clip_tokenizer(),
        "text_proj": projection,
        **seen(POOLED),
        "super_res_first": larger(),
        "super_res_last": larger(),
        "decoder_scheduler": UnCLIPScheduler(
            variance_type="learned_range", prediction_type="sample"
        ),
        "super_res_scheduler": UnCLIPScheduler(prediction_type="sample"),
    }


add(
    "UnCLIPImageVariationPipeline",
    "text",
    karlo,
    lambda seed: {
        "image": picture(50 + seed),
        "decoder_num_inference_steps": STEPS,
        "super_res_num_inference_steps": 2,
    },
    output="np",
)


# Versatile Diffusion: a picture as the prompt.


def versatile(**changed: Any) -> Arguments:
    parts = sd(**changed)
    return {
        "image_unet": parts.pop("unet"),
        **parts,
        "image_encoder": vision(),
        "image_feature_extractor": vision_processor(),
    }


add(
    "VersatileDiffusionImageVariationPipeline",
    "text",
    versatile,
    lambda seed: {"image": picture(50 + seed), "num_inference_steps": STEPS, **sized({})},
)


# GLIGEN: pictures in boxes beside phrases.


def gligen_pictures() -> Arguments:
    from diffusers.pipelines.stable_diffusion.clip_image_project_model import CLIPImageProjection

    return {
        **spoken(attention_type="gated-text-image"),
        "image_encoder": vision(),
        "processor": vision_processor(),
        "image_project": seeded(11, CLIPImageProjection, CROSS),
    }


add(
    "StableDiffusionGLIGENTextImagePipeline",
    "text",
    gligen_pictures,
    lambda seed: {**boxed(seed), "gligen_images": [picture(50)]},
)
