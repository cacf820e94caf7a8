"""Pipelines around UNets that differ from Stable Diffusion's: further inputs, pixels, encoders."""

from functools import partial
from typing import Any

import torch
from diffusers import (
    DDIMInverseScheduler,
    DDIMScheduler,
    DDPMScheduler,
    EulerDiscreteScheduler,
)

from tests.factories.more_pipelines import begun
from tests.factories.pipelines import (
    SIDE,
    STEPS,
    TEXT,
    Arguments,
    add,
    ddim,
    picture,
    pooled,
    seeded,
    sized,
    text_of,
    two,
    usual,
    vae,
)
from tests.factories.small_unets import SMALL_SD, SMALL_XL, sd, spoken, unet
from tests.factories.zoo import CROSS, POOLED, ZOO, Draw, only, tiny


def of_zoo(name: str, /, *dropped: str, **changed: Any) -> Any:
    """Build a denoiser of the zoo with a changed config."""
    config = only(ZOO[name].build.keywords, "module", *dropped, **changed)  # type: ignore[attr-defined]
    return tiny(name.partition("-")[0], **config)


def vision_config(width: int, layers: int, side: int = 16) -> Any:
    from transformers import CLIPVisionConfig

    return CLIPVisionConfig(
        hidden_size=16,
        intermediate_size=16,
        projection_dim=width,
        num_hidden_layers=layers,
        num_attention_heads=2,
        image_size=side,
        patch_size=side // 2,
    )


def vision(width: int = CROSS, side: int = 16) -> Any:
    """A tiny CLIP encoder of pictures."""
    from transformers import CLIPVisionModelWithProjection

    return seeded(6, CLIPVisionModelWithProjection, vision_config(width, 1, side))


def vision_processor(side: int = 16) -> Any:
    from transformers import CLIPImageProcessor

    crop = {"height": side, "width": side}
    return CLIPImageProcessor(size={"shortest_edge": side}, crop_size=crop)


def seen(width: int = CROSS, side: int = 16) -> Arguments:
    return {"image_encoder": vision(width, side), "feature_extractor": vision_processor(side)}


# ControlNet-XS: one network of the UNet and its control, connected in every block.


def xs(config: Arguments, **changed: Any) -> Arguments:
    own = {"num_attention_heads": config["attention_head_dim"], "time_embedding_mix": 0.7}
    shared = only(config, "attention_head_dim", "layers_per_block", **own)
    control = {
        "ctrl_conditioning_embedding_out_channels": (8, 16),
        "ctrl_block_out_channels": (8, 16),
        "ctrl_num_attention_heads": 2,
        "ctrl_max_norm_num_groups": 4,
        "ctrl_learn_time_embedding": True,
    }
    net = tiny("UNetControlNetXSModel", **only({**shared, **control}, **changed))
    return {"vae": vae(), "unet": net, "scheduler": ddim()}


def xs_sd() -> Arguments:
    return xs(SMALL_SD)


def xs_xl() -> Arguments:
    return xs(only(SMALL_XL, "use_linear_projection"))


def shown(seed: int, text: Any, **more: Any) -> Arguments:
    return {**usual(seed, text), "image": picture(50), **more}


# GLIGEN: phrases in boxes.


def gligen() -> Arguments:
    return spoken(attention_type="gated")


def boxed(seed: int) -> Arguments:
    boxes = {"gligen_phrases": ["a cat"], "gligen_boxes": [[0.1, 0.2, 0.6, 0.7]]}
    return {**usual(seed, two), **boxes, "gligen_scheduled_sampling_beta": 1.0}


# DiffEdit: latents of an inversion, a mask of their size.


def diff_edit() -> Arguments:
    return {**sd(), "inverse_scheduler": DDIMInverseScheduler()}


def inverted(seed: int) -> Arguments:
    text = text_of(seed)
    latents = Draw(80).normal(1, STEPS, 4, SIDE // 2, SIDE // 2)
    given = {"image_latents": latents, "num_inference_steps": STEPS, "inpaint_strength": 1.0}
    return {**text, **given, "image": picture()}


def cycled(seed: int) -> Arguments:
    prompts = {"prompt": ("a cat", "two dogs")[seed % 2], "source_prompt": "a house"}
    return {**prompts, "num_inference_steps": 5, "strength": 0.6, "eta": 0.1}


# Pictures in place of prompts.


def variation() -> Arguments:
    return {**sd(), **seen()}


def by_example() -> Arguments:
    from diffusers.pipelines.deprecated.paint_by_example.image_encoder import (
        PaintByExampleImageEncoder,
    )

    encoder = seeded(6, PaintByExampleImageEncoder, vision_config(16, 4), proj_size=CROSS)
    parts = {"image_encoder": encoder}
    return {**sd(in_channels=9), **parts, "feature_extractor": vision_processor()}


def unclip() -> Arguments:
    from diffusers.pipelines.stable_diffusion.stable_unclip_image_normalizer import (
        StableUnCLIPImageNormalizer,
    )

    net = unet(class_embed_type="projection", projection_class_embeddings_input_dim=2 * POOLED)
    normalizer = StableUnCLIPImageNormalizer(embedding_dim=POOLED)
    noising = DDPMScheduler(beta_schedule="squaredcos_cap_v2")
    more = {"image_normalizer": normalizer, "image_noising_scheduler": noising}
    return {"vae": vae(), "unet": net, "scheduler": ddim(), **seen(POOLED), **more}


# Larger pictures.


def latent_upscale() -> Arguments:
    net = unet(in_channels=8, out_channels=5, time_cond_proj_dim=128 + POOLED)
    return {"vae": vae(), "unet": net, "scheduler": EulerDiscreteScheduler()}


def to_upscale(seed: int) -> Arguments:
    given = {**text_of(seed, pooled=True), "num_inference_steps": STEPS}
    return {**given, "image": Draw(81).normal(1, 4, SIDE // 4, SIDE // 4)}


def super_resolution() -> Arguments:
    from tests.factories.edit_pipelines import unconditional
    from tests.factories.more_pipelines import MOVQ

    movq = tiny("VQModel", **only(MOVQ, latent_channels=3, vq_embed_dim=3, norm_type="group"))
    scheduler = DDIMScheduler(prediction_type="v_prediction", clip_sample=False)
    return {"unet": unconditional(6), "vqvae": movq, "scheduler": scheduler}


# DeepFloyd: pixels.


def deepfloyd(**changed: Any) -> Arguments:
    few = {
        "block_out_channels": (16, 32),
        "layers_per_block": 1,
        "down_block_types": ("ResnetDownsampleBlock2D", "SimpleCrossAttnDownBlock2D"),
        "up_block_types": ("SimpleCrossAttnUpBlock2D", "ResnetUpsampleBlock2D"),
    }
    own = {**few, "encoder_hid_dim": CROSS, "sample_size": SIDE // 2, **changed}
    net = of_zoo("UNet2DConditionModel-deepfloyd", **own)
    scheduler = DDPMScheduler(
        variance_type="learned_range", prediction_type="v_prediction", clip_sample=False
    )
    noising = DDPMScheduler(beta_schedule="squaredcos_cap_v2")
    return {"unet": net, "scheduler": scheduler, "image_noising_scheduler": noising}


def floyd_first() -> Arguments:
    return {n: v for n, v in deepfloyd().items() if n != "image_noising_scheduler"}


def floyd_larger() -> Arguments:
    return deepfloyd(in_channels=6, class_embed_type="timestep")


def floyd(seed: int, **more: Any) -> Arguments:
    return {**text_of(seed), "num_inference_steps": 5, **more}


LOW: Arguments = {"image": picture(50, SIDE // 4), "noise_level": 10}


# Kandinsky of the first version and of the third.


def multilingual() -> Any:
    from diffusers.pipelines.kandinsky.text_encoder import MCLIPConfig, MultilingualCLIP

    config = MCLIPConfig(
        transformerDimSize=CROSS,
        imageDimSize=POOLED,
        vocab_size=64,
        hidden_size=CROSS,
        intermediate_size=32,
        num_attention_heads=2,
        num_hidden_layers=1,
        max_position_embeddings=100,
    )
    return seeded(7, MultilingualCLIP, config)


def roberta_tokenizer() -> Any:
    from transformers import XLMRobertaTokenizer

    letters = [(x, -2.0) for x in "abcdefghijklmnopqrstuvwxyz"]
    special = [("<s>", 0.0), ("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), ("▁", -1.0)]
    return XLMRobertaTokenizer(vocab=special + letters)


def kandinsky_first(channels: int) -> Arguments:
    from tests.factories.more_pipelines import KANDINSKY, MOVQ

    text = {
        "in_channels": channels,
        "addition_embed_type": "text_image",
        "encoder_hid_dim": CROSS,
        "encoder_hid_dim_type": "text_image_proj",
        "cross_attention_dim": POOLED,
    }
    net = tiny("UNet2DConditionModel", **only(KANDINSKY, **text))
    scheduler = DDIMScheduler(prediction_type="v_prediction", clip_sample=False)
    coder = {"movq": tiny("VQModel", **MOVQ), "scheduler": scheduler}
    words = {"text_encoder": multilingual(), "tokenizer": roberta_tokenizer()}
    return {"unet": net, **coder, **words}


def worded(seed: int, **more: Any) -> Arguments:
    own, other = (Draw(one).normal(1, POOLED) for one in (seed, seed + 9))
    embeds = {"image_embeds": own, "negative_image_embeds": other}
    return {"prompt": ("a cat", "two dogs")[seed % 2], **embeds, **sized({}), **more}


def kandinsky_third() -> Arguments:
    from tests.factories.more_pipelines import MOVQ

    scheduler = DDPMScheduler(prediction_type="v_prediction", clip_sample=False)
    wide = (32, 32, 32, 32)  # norms over 2 channels would enlarge rounding a thousandfold
    return {
        "unet": of_zoo("Kandinsky3UNet", block_out_channels=wide),
        "movq": tiny("VQModel", **MOVQ),
        "scheduler": scheduler,
    }


def masked_text(seed: int) -> Arguments:
    kept = torch.ones(1, TEXT, dtype=torch.long)
    return {**text_of(seed), "attention_mask": kept, "negative_attention_mask": kept}


add("StableDiffusionControlNetXSPipeline", "text", xs_sd, partial(shown, text=two))
add("StableDiffusionXLControlNetXSPipeline", "text", xs_xl, partial(shown, text=pooled))
add("StableDiffusionGLIGENPipeline", "text", gligen, boxed)
add("StableDiffusionDiffEditPipeline", "blend", diff_edit, inverted, SIDE // 2)
add("AltDiffusionImg2ImgPipeline", "image", sd, begun)
add("CycleDiffusionPipeline", "image", spoken, cycled)
add(
    "StableDiffusionImageVariationPipeline",
    "text",
    variation,
    lambda seed: {"image": picture(50 + seed), "num_inference_steps": STEPS, **sized({})},
)
add(
    "PaintByExamplePipeline",
    "channels",
    by_example,
    lambda seed: {"example_image": picture(50 + seed), "num_inference_steps": STEPS},
)
add(
    "StableUnCLIPImg2ImgPipeline",
    "text",
    unclip,
    lambda seed: {**usual(seed, two), "image_embeds": Draw(82).normal(1, POOLED)},
)
add("StableDiffusionLatentUpscalePipeline", "text", latent_upscale, to_upscale)
add(
    "LDMSuperResolutionPipeline",
    "text",
    super_resolution,
    lambda seed: {"image": picture(50), "num_inference_steps": STEPS},
)
add("IFImg2ImgPipeline", "image", floyd_first, partial(floyd, strength=0.6), SIDE // 2)
add("IFInpaintingPipeline", "blend", floyd_first, floyd, SIDE // 2)
add(
    "IFSuperResolutionPipeline",
    "text",
    floyd_larger,
    partial(floyd, **LOW, **sized({})),
)
add(
    "IFImg2ImgSuperResolutionPipeline",
    "image",
    floyd_larger,
    partial(floyd, **LOW, original_image=picture(0, SIDE // 2), strength=0.8),
    SIDE // 2,
)
add(
    "IFInpaintingSuperResolutionPipeline",
    "blend",
    floyd_larger,
    partial(floyd, **LOW, original_image=picture(0, SIDE // 2)),
    SIDE // 2,
)
add(
    "KandinskyImg2ImgPipeline",
    "image",
    partial(kandinsky_first, 4),
    partial(worded, num_inference_steps=5, strength=0.6),
    output="np",
)
add(
    "KandinskyInpaintPipeline",
    "channels",
    partial(kandinsky_first, 9),
    partial(worded, num_inference_steps=STEPS),
    output="np",
)
add(
    "Kandinsky3Img2ImgPipeline",
    "image",
    kandinsky_third,
    lambda seed: {**begun(seed), **masked_text(seed)},
)
