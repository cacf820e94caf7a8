"""More pipelines than the rules were made by: they take the paths of those in `pipelines.py`."""

from functools import partial
from typing import Any

import torch
from diffusers import DDPMScheduler, LCMScheduler

from tests.factories.pipelines import (
    CONTROL,
    SDXL,
    SIDE,
    STEPS,
    TEXT,
    Arguments,
    add,
    chroma,
    chroma_text,
    flow,
    flux,
    flux2,
    flux_control,
    picture,
    pooled,
    qwen,
    qwen_text,
    sd,
    sd3,
    sd_control,
    sdxl,
    single,
    sized,
    text_of,
    two,
    usual,
    vae,
    with_control,
    z_image,
    z_image_text,
)
from tests.factories.zoo import CROSS, LUMINA2, POOLED, UNET_BASE, Draw, only, tiny

KANDINSKY = only(
    UNET_BASE,
    layers_per_block=1,
    in_channels=9,
    out_channels=8,
    down_block_types=(
        "ResnetDownsampleBlock2D",
        "SimpleCrossAttnDownBlock2D",
        "SimpleCrossAttnDownBlock2D",
    ),
    up_block_types=(
        "SimpleCrossAttnUpBlock2D",
        "SimpleCrossAttnUpBlock2D",
        "ResnetUpsampleBlock2D",
    ),
    mid_block_type="UNetMidBlock2DSimpleCrossAttn",
    resnet_time_scale_shift="scale_shift",
    attention_head_dim=8,
    addition_embed_type="image",
    encoder_hid_dim=POOLED,
    encoder_hid_dim_type="image_proj",
)
MOVQ: Arguments = {
    "block_out_channels": (32, 32),
    "down_block_types": ("DownEncoderBlock2D", "AttnDownEncoderBlock2D"),
    "up_block_types": ("AttnUpDecoderBlock2D", "UpDecoderBlock2D"),
    "latent_channels": 4,
    "norm_num_groups": 4,
    "num_vq_embeddings": 16,
    "norm_type": "spatial",
    "vq_embed_dim": 4,
    "layers_per_block": 1,
}
UNION = only(
    SDXL,
    "sample_size",
    "up_block_types",
    num_control_type=6,
    conditioning_embedding_out_channels=CONTROL["conditioning_embedding_out_channels"],
    num_trans_channel=16,
    num_trans_head=2,
    num_proj_channel=16,
    addition_time_embed_dim=8,
    projection_class_embeddings_input_dim=POOLED + 6 * 8,
)


def kandinsky() -> Arguments:
    scheduler = DDPMScheduler(prediction_type="v_prediction", clip_sample=False)
    net, movq = tiny("UNet2DConditionModel", **KANDINSKY), tiny("VQModel", **MOVQ)
    return {"unet": net, "movq": movq, "scheduler": scheduler}


def imagined(seed: int) -> Arguments:
    """Embeddings of a picture in place of a prompt."""
    own, other = (Draw(one).normal(1, POOLED) for one in (seed, seed + 9))
    given = {"image_embeds": own, "negative_image_embeds": other}
    return {**given, "num_inference_steps": STEPS, **sized({})}


def union_control() -> Arguments:
    return {**sdxl(), "controlnet": tiny("ControlNetUnionModel", **UNION)}


def consistent() -> Arguments:
    scheduler = LCMScheduler(prediction_type="v_prediction", clip_sample=False)
    return {**sd(time_cond_proj_dim=8), "scheduler": scheduler}


def begun(seed: int, **more: Any) -> Arguments:
    """Some of the steps, from the picture on."""
    return {**text_of(seed), "num_inference_steps": 5, "strength": 0.6, **more}


def without_cfg(seed: int) -> Arguments:
    given = usual(seed, chroma_text, strength=0.7)
    return {name: value for name, value in given.items() if name != "true_cfg_scale"}


def lumina2() -> Arguments:
    net = tiny("Lumina2Transformer2DModel", **LUMINA2)
    coder = {"text_encoder": None, "tokenizer": None}
    return {"vae": vae(), "transformer": net, "scheduler": flow(), **coder}


def ragged_text(seed: int) -> Arguments:
    """Texts of unequal lengths, padded to one."""
    draw = Draw(seed)
    kept = torch.arange(TEXT + 2)[None]
    return {
        "prompt_embeds": draw.normal(1, TEXT + 2, CROSS),
        "prompt_attention_mask": (kept < TEXT).long(),
        "negative_prompt_embeds": draw.normal(1, TEXT + 2, CROSS),
        "negative_prompt_attention_mask": (kept < TEXT - 2).long(),
    }


edited = {"max_area": SIDE * SIDE, "_auto_resize": False}
large = {"height": 64, "width": 64}

add(
    "StableDiffusionPAGInpaintPipeline",
    "blend",
    sd,
    partial(usual, text=two, pag_scale=3.0),
)
add(
    "FluxKontextInpaintPipeline",
    "blend",
    flux,
    partial(usual, text=single, strength=1.0, **edited),
)
add(
    "Flux2KleinInpaintPipeline",
    "blend",
    partial(flux2, guidance_embeds=False),
    partial(usual, text=two, strength=1.0, **large),
    64,
)
add(
    "FluxControlInpaintPipeline",
    "blend",
    partial(flux, in_channels=32, out_channels=16),
    partial(usual, text=single, strength=1.0, control_image=picture(50)),
)
add("KandinskyV22InpaintPipeline", "blend", kandinsky, imagined)
add(
    "StableDiffusionXLControlNetUnionInpaintPipeline",
    "control",
    union_control,
    partial(with_control, text=pooled, control_mode=[1]),
)
add(
    "StableDiffusionControlNetPAGInpaintPipeline",
    "control",
    sd_control,
    partial(with_control, text=two),
)
add("StableDiffusionPAGImg2ImgPipeline", "image", sd, partial(begun, pag_scale=3.0))
add("StableDiffusion3Img2ImgPipeline", "image", sd3, partial(usual, text=pooled, strength=0.7))
add("ChromaImg2ImgPipeline", "image", chroma, without_cfg)
add("QwenImageImg2ImgPipeline", "image", qwen, partial(usual, text=qwen_text, strength=0.7))
add("ZImageImg2ImgPipeline", "image", z_image, partial(usual, text=z_image_text, strength=0.7))
add(
    "StableDiffusionControlNetImg2ImgPipeline",
    "image",
    sd_control,
    partial(begun, control_image=picture(50)),
)
add(
    "FluxControlNetImg2ImgPipeline",
    "image",
    flux_control,
    partial(with_control, text=single, strength=0.7),
)
add(
    "LatentConsistencyModelImg2ImgPipeline",
    "image",
    consistent,
    lambda seed: {
        **text_of(seed, negative=False),
        "num_inference_steps": 4,
        "strength": 0.8,
        "original_inference_steps": 20,
    },
)
add("Lumina2Pipeline", "text", lumina2, partial(usual, text=ragged_text))
add(
    "StableDiffusionInstructPix2PixPipeline",
    "reference",
    partial(sd, in_channels=8),
    lambda seed: {**text_of(seed), "num_inference_steps": STEPS},
)
