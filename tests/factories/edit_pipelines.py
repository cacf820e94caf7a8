"""Further pipelines of diffusers that take a picture, for the table of docs/pipelines.md."""

from functools import partial
from typing import Any

import torch
from diffusers import DDPMScheduler, SCMScheduler

from tests.factories.more_pipelines import (
    KANDINSKY,
    MOVQ,
    begun,
    imagined,
)
from tests.factories.pipelines import (
    PIPES,
    STEPS,
    TEXT,
    Arguments,
    add,
    flow,
    flux,
    flux_control,
    picture,
    pooled,
    qwen,
    qwen_text,
    qwen_vae,
    sd3,
    sd_control,
    seeded,
    single,
    sized,
    square,
    still,
    text_of,
    two,
    usual,
    vae,
    with_control,
)
from tests.factories.pipelines import sdxl as three_levels
from tests.factories.small_unets import sd, sdxl, union_control, xl_control
from tests.factories.zoo import CROSS, HEADS, QWEN, SANA, SD3, Draw, only, tiny

SIDE = PIPES["StableDiffusionInpaintPipeline"].side


def begun_xl(seed: int, **more: Any) -> Arguments:
    return {**begun(seed), **text_of(seed, pooled=True), **more}


def shown(seed: int, text: Any, **more: Any) -> Arguments:
    """A picture that steers, and nothing that is edited."""
    return {**usual(seed, text), "image": picture(50), **more}


def with_adapter(parts: Arguments, channels: list[int], kind: str, factor: int) -> Arguments:
    from diffusers import T2IAdapter

    return {**parts, "adapter": seeded(4, T2IAdapter, 3, channels, 1, factor, kind)}


def depth(seed: int) -> Arguments:
    return {**begun(seed), "depth_map": Draw(70).uniform(1, SIDE, SIDE)}


def small_picture(seed: int) -> Arguments:
    """A picture of a quarter of the sites, which the pipeline makes larger."""
    given = {**text_of(seed), "num_inference_steps": STEPS}
    return {**given, "image": picture(50, 16), "noise_level": 10}


def upscale() -> Arguments:
    scheduler = DDPMScheduler()
    return {**sd(in_channels=7, num_class_embeds=20), "low_res_scheduler": scheduler}


def unconditional(channels: int) -> Any:
    return tiny(
        "UNet2DModel",
        sample_size=SIDE,
        in_channels=channels,
        out_channels=3,
        layers_per_block=1,
        block_out_channels=(16, 32),
        norm_num_groups=8,
        attention_head_dim=8,
        down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"),
    )


def cogview_control() -> Arguments:
    net = tiny(
        "CogView4Transformer2DModel",
        **HEADS,
        in_channels=8,
        out_channels=4,
        num_layers=2,
        text_embed_dim=CROSS,
        time_embed_dim=16,
        condition_dim=8,
        sample_size=16,
        rope_axes_dim=(16, 16),
    )
    return {"vae": still(vae()), "transformer": net, "scheduler": flow()}


def sd3_control(config: Arguments) -> Arguments:
    net = tiny("SD3ControlNetModel", **only(SD3, num_layers=2, in_channels=16, **config))
    return {**sd3(), "vae": still(vae(16)), "controlnet": net}


def qwen_control(**config: Any) -> Arguments:
    net = tiny("QwenImageControlNetModel", **only(QWEN, **config))
    return {**qwen(), "vae": still(qwen_vae()), "controlnet": net}


def sana(**changed: Any) -> Arguments:
    net = tiny("SanaTransformer2DModel", **only(SANA, **changed))
    coder = tiny(
        "AutoencoderDC",
        in_channels=3,
        latent_channels=4,
        encoder_block_out_channels=(8, 8),
        decoder_block_out_channels=(8, 8),
        encoder_layers_per_block=(1, 1),
        decoder_layers_per_block=(1, 1),
        encoder_qkv_multiscales=((), ()),
        decoder_qkv_multiscales=((), ()),
        encoder_block_types=("ResBlock", "ResBlock"),
        decoder_block_types=("ResBlock", "ResBlock"),
        upsample_block_type="interpolate",
        downsample_block_type="conv",
        decoder_norm_types="rms_norm",
        decoder_act_fns="silu",
    )
    return {"vae": coder, "transformer": net, "scheduler": flow()}


def sana_text(seed: int) -> Arguments:
    draw = Draw(seed)
    kept = torch.ones(1, TEXT, dtype=torch.long)
    return {
        "prompt_embeds": draw.normal(1, TEXT, CROSS),
        "prompt_attention_mask": kept,
        "negative_prompt_embeds": draw.normal(1, TEXT, CROSS),
        "negative_prompt_attention_mask": kept,
        "negative_prompt": None,
        "use_resolution_binning": False,
    }


def sprint() -> Arguments:
    return {**sana(guidance_embeds=True), "scheduler": SCMScheduler(prediction_type="trigflow")}


def sprint_text(seed: int) -> Arguments:
    given = {n: v for n, v in sana_text(seed).items() if not n.startswith("negative")}
    return {**given, "num_inference_steps": 2, "strength": 0.8, **sized({})}


def kandinsky(**changed: Any) -> Arguments:
    scheduler = DDPMScheduler(prediction_type="v_prediction", clip_sample=False)
    net = tiny("UNet2DConditionModel", **only(KANDINSKY, **{"in_channels": 4, **changed}))
    return {"unet": net, "movq": tiny("VQModel", **MOVQ), "scheduler": scheduler}


def hinted(seed: int) -> Arguments:
    hint = Draw(71).uniform(1, 3, 4 * SIDE, 4 * SIDE)
    return {**imagined(seed), "num_inference_steps": 5, "strength": 0.6, "hint": hint}


# a ControlNet or another side network, without a picture that is edited
add(
    "StableDiffusionControlNetPipeline",
    "text",
    sd_control,
    partial(shown, text=two),
)
add("StableDiffusionControlNetPAGPipeline", "text", sd_control, partial(shown, text=two))
add("StableDiffusionXLControlNetPipeline", "text", xl_control, partial(shown, text=pooled))
add("StableDiffusionXLControlNetPAGPipeline", "text", xl_control, partial(shown, text=pooled))
add(
    "StableDiffusionXLControlNetUnionPipeline",
    "text",
    union_control,
    partial(with_control, text=pooled, control_mode=[1]),
)
add(
    "StableDiffusionAdapterPipeline",
    "text",
    lambda: with_adapter(sd(), [16, 32], "full_adapter", 2),
    partial(shown, text=two),
)
add(
    "StableDiffusionXLAdapterPipeline",
    "text",
    lambda: with_adapter(three_levels(), [16, 32, 32], "full_adapter_xl", 4),
    partial(shown, text=pooled),
)
add("FluxControlNetPipeline", "text", flux_control, partial(with_control, text=single))
add(
    "FluxControlPipeline",
    "text",
    partial(flux, in_channels=32, out_channels=16),
    partial(with_control, text=single),
)
add(
    "StableDiffusion3ControlNetPipeline",
    "text",
    partial(sd3_control, {}),
    partial(with_control, text=pooled),
)
add(
    "QwenImageControlNetPipeline",
    "text",
    partial(qwen_control, num_layers=2),
    partial(with_control, text=qwen_text),
)
add(
    "SanaControlNetPipeline",
    "text",
    lambda: {**sana(), "controlnet": tiny("SanaControlNetModel", **only(SANA, num_layers=2))},
    partial(with_control, text=sana_text),
)
add("CogView4ControlPipeline", "text", cogview_control, partial(with_control, text=two))
add(
    "StableDiffusion3ControlNetInpaintingPipeline",
    "text",
    lambda: {**sd3_control({"extra_conditioning_channels": 1})},
    partial(with_control, text=pooled, control_mask=square()),
)
add(
    "QwenImageControlNetInpaintPipeline",
    "text",
    partial(qwen_control, num_layers=2, extra_condition_channels=4),
    partial(with_control, text=qwen_text, control_mask=square()),
)
# the picture is where the latents begin
add("StableDiffusionDepth2ImgPipeline", "image", partial(sd, in_channels=5), depth)
add("StableDiffusionXLImg2ImgPipeline", "image", sdxl, begun_xl)
add("StableDiffusionXLPAGImg2ImgPipeline", "image", sdxl, partial(begun_xl, pag_scale=3.0))
add("StableDiffusion3PAGImg2ImgPipeline", "image", sd3, partial(begun_xl, pag_scale=3.0))
add(
    "StableDiffusionXLControlNetImg2ImgPipeline",
    "image",
    xl_control,
    partial(begun_xl, control_image=picture(50)),
)
add(
    "StableDiffusionXLControlNetPAGImg2ImgPipeline",
    "image",
    xl_control,
    partial(begun_xl, control_image=picture(50)),
)
add(
    "StableDiffusionXLControlNetUnionImg2ImgPipeline",
    "image",
    union_control,
    partial(begun_xl, control_image=[picture(50)], control_mode=[1]),
)
add(
    "FluxControlImg2ImgPipeline",
    "image",
    partial(flux, in_channels=32, out_channels=16),
    partial(with_control, text=single, strength=0.7),
)
add(
    "KandinskyV22Img2ImgPipeline",
    "image",
    kandinsky,
    lambda seed: {**imagined(seed), "num_inference_steps": 5, "strength": 0.6},
)
add(
    "KandinskyV22ControlnetImg2ImgPipeline",
    "image",
    partial(kandinsky, in_channels=8, addition_embed_type="image_hint"),
    hinted,
    output="np",
)
add("SanaSprintImg2ImgPipeline", "image", sprint, sprint_text)
add("StableDiffusionUpscalePipeline", "text", upscale, small_picture)
# the mask is laid over the latents
add(
    "StableDiffusionXLPAGInpaintPipeline",
    "blend",
    sdxl,
    partial(usual, text=pooled, pag_scale=3.0),
)
add(
    "QwenImageEditInpaintPipeline",
    "blend",
    partial(qwen, 4),
    partial(usual, text=qwen_text, height=1024, width=1024, strength=1.0),
    1024,
)
# the picture is a reference
add(
    "StableDiffusionXLInstructPix2PixPipeline",
    "reference",
    partial(sdxl, in_channels=8),
    partial(usual, text=pooled),
)
add(
    "QwenImageEditPlusPipeline",
    "reference",
    partial(qwen, 4),
    partial(usual, text=qwen_text, height=256, width=256),
    256,
)
