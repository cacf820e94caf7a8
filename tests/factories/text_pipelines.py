"""Pipelines that make a picture from a text, from a class or from nothing."""

from functools import partial
from typing import Any

import torch
from diffusers import (
    ClassifierFreeGuidance,
    DDIMParallelScheduler,
    KarrasVeScheduler,
    SCMScheduler,
)

from tests.factories.dit_pipelines import (
    LARGE,
    MIDDLE,
    add_built,
    bria_edit,
    bria_words,
    drawn,
    eighth,
    encoded,
    hunyuan_text,
    kandinsky_fifth_text,
    longcat,
    wan_vae,
    words,
)
from tests.factories.edit_pipelines import sana, sana_text, unconditional
from tests.factories.more_pipelines import begun
from tests.factories.more_video_pipelines import Harmless
from tests.factories.pipelines import (
    SIDE,
    STEPS,
    TEXT,
    Arguments,
    add,
    chroma,
    chroma_text,
    clip_tokenizer,
    ddim,
    flow,
    flux2_vae,
    pipe_of,
    pooled,
    qwen,
    qwen_text,
    sd3,
    sized,
    two,
    usual,
    vae,
)
from tests.factories.small_unets import sd, spoken
from tests.factories.unet_pipelines import (
    of_zoo,
)
from tests.factories.zoo import CROSS, POOLED, Draw, only, tiny


def around(name: str, *dropped: str, coder: Any = vae, **changed: Any) -> Arguments:
    """A transformer of the zoo with an autoencoder of pictures and flow times."""
    net = of_zoo(name, *dropped, **changed)
    return {"vae": coder(), "transformer": net, "scheduler": flow()}


def masked(seed: int, **more: Any) -> Arguments:
    """Texts with masks of their tokens."""
    kept = torch.ones(1, TEXT, dtype=torch.long)
    masks = {f"{n}prompt_attention_mask": kept for n in ("", "negative_")}
    return {**usual(seed, two), **masks, "negative_prompt": None, **more}


unbinned = partial(masked, use_resolution_binning=False)
cleaned = partial(unbinned, clean_caption=False)


def chroma_masked(seed: int) -> Arguments:
    return only(chroma_text(seed), "true_cfg_scale")


def bare(channels: int = 3, scheduler: Any = ddim) -> Arguments:
    return {"unet": unconditional(channels), "scheduler": scheduler()}


def alone(seed: int, **more: Any) -> Arguments:
    return {"num_inference_steps": STEPS, **more}


def kandinsky_fifth() -> Any:
    parts = around("Kandinsky5Transformer3DModel", in_visual_dim=4, coder=eighth)
    made = pipe_of("Kandinsky5T2IPipeline", lambda: parts)
    made.resolutions = [(128, 128)]
    return made


# transformers

add(
    "AuraFlowPipeline",
    "text",
    lambda: around("AuraFlowTransformer2DModel"),
    masked,
)
add("BriaPipeline", "text", lambda: around("BriaTransformer2DModel"), partial(usual, text=two))
add("ChromaPipeline", "text", chroma, partial(usual, text=chroma_masked))
add(
    "CogView3PlusPipeline",
    "text",
    lambda: {**around("CogView3PlusTransformer2DModel"), "scheduler": ddim()},
    partial(usual, text=two),
)
add(
    "CogView4Pipeline",
    "text",
    lambda: around("CogView4Transformer2DModel"),
    partial(usual, text=two),
)
add(
    "HunyuanDiTPipeline",
    "text",
    lambda: {**around("HunyuanDiT2DModel", coder=eighth), "scheduler": ddim()},
    partial(usual, text=hunyuan_text, **MIDDLE),
    128,
)
add(
    "LuminaPipeline",
    "text",
    lambda: around("LuminaNextDiT2DModel", coder=eighth),
    partial(masked, **MIDDLE),
    128,
)
add(
    "OvisImagePipeline",
    "text",
    lambda: around("OvisImageTransformer2DModel"),
    partial(usual, text=two, negative_prompt=None),
)
add(
    "NucleusMoEImagePipeline",
    "text",
    lambda: {
        **qwen(),
        "transformer": of_zoo("NucleusMoEImageTransformer2DModel-dense"),
        "processor": None,
    },
    partial(usual, text=qwen_text),
)
add("QwenImagePipeline", "text", qwen, partial(usual, text=qwen_text))
add(
    "PixArtAlphaPipeline",
    "text",
    lambda: {**around("PixArtTransformer2DModel", out_channels=8), "scheduler": ddim()},
    cleaned,
)
add(
    "PixArtSigmaPipeline",
    "text",
    lambda: {**around("PixArtTransformer2DModel", out_channels=8), "scheduler": ddim()},
    cleaned,
)
add("PRXPipeline", "text", lambda: around("PRXTransformer2DModel"), unbinned)
add("SanaPipeline", "text", sana, partial(usual, text=sana_text))
add(
    "SanaPAGPipeline",
    "text",
    lambda: {**sana(), "pag_applied_layers": "blocks.1"},
    partial(usual, text=sana_text),
)
add(
    "SanaSprintPipeline",
    "text",
    lambda: {
        **sana(guidance_embeds=True),
        "scheduler": SCMScheduler(prediction_type="trigflow"),
    },
    lambda seed: {
        **{n: v for n, v in sana_text(seed).items() if not n.startswith("negative")},
        "num_inference_steps": 2,
        **sized({}),
    },
)
add("StableDiffusion3PAGPipeline", "text", sd3, partial(usual, text=pooled))
add(
    "DiTPipeline",
    "text",
    lambda: {**around("DiTTransformer2DModel", num_embeds_ada_norm=1000), "scheduler": ddim()},
    lambda seed: {"class_labels": [seed % 5], "num_inference_steps": STEPS},
    output="np",
)
add_built("Kandinsky5T2IPipeline", "text", kandinsky_fifth, kandinsky_fifth_text, 128)
# UNets
add("StableDiffusionSAGPipeline", "text", sd, partial(usual, text=two))
add("DDIMPipeline", "text", bare, alone, SIDE, "np")
add("KarrasVePipeline", "text", lambda: bare(scheduler=KarrasVeScheduler), alone, SIDE, "np")


def said(seed: int, **more: Any) -> Arguments:
    return {"prompt": words(seed), "num_inference_steps": STEPS, **sized(more)}


def hidream() -> Any:
    parts = around("HiDreamImageTransformer2DModel")
    made = pipe_of("HiDreamImagePipeline", lambda: parts)
    made.default_sample_size = SIDE // 2
    return made


def krea_text(seed: int) -> Arguments:
    draw, found = Draw(seed), {}
    for start in ("", "negative_"):
        found[f"{start}prompt_embeds"] = draw.normal(1, TEXT, 3, CROSS)
        found[f"{start}prompt_embeds_mask"] = torch.ones(1, TEXT, dtype=torch.bool)
    return found


def hidream_text(seed: int) -> Arguments:
    draw, found = Draw(seed), {}
    for start in ("", "negative_"):
        found[f"{start}prompt_embeds_t5"] = draw.normal(1, TEXT, CROSS)
        found[f"{start}prompt_embeds_llama3"] = draw.normal(4, 1, TEXT, CROSS)
        found[f"{start}pooled_prompt_embeds"] = draw.normal(1, POOLED)
    return found


def ernie_text(seed: int) -> Arguments:
    draw = Draw(seed)
    return {f"{n}prompt_embeds": [draw.normal(TEXT, CROSS)] for n in ("", "negative_")}


def hunyuan_image() -> Arguments:
    parts = around(
        "HunyuanImageTransformer2DModel-refiner",
        coder=hunyuan_image_vae,
        patch_size=(1, 1),
        use_meanflow=False,
        guidance_embeds=False,
    )
    guide = ClassifierFreeGuidance(guidance_scale=3.5)
    return {**parts, "guider": guide, "ocr_guider": guide}


def hunyuan_image_vae() -> Any:
    return tiny(
        "AutoencoderKLHunyuanImage",
        in_channels=3,
        out_channels=3,
        latent_channels=4,
        block_out_channels=(32, 32, 32),
        layers_per_block=1,
        spatial_compression_ratio=4,
        sample_size=SIDE,
        scaling_factor=0.5,
    )


def hunyuan_image_text(seed: int) -> Arguments:
    draw, found = Draw(seed), {}
    for start in ("", "negative_"):
        found[f"{start}prompt_embeds"] = draw.normal(1, TEXT, CROSS)
        found[f"{start}prompt_embeds_mask"] = torch.ones(1, TEXT, dtype=torch.long)
        found[f"{start}prompt_embeds_2"] = draw.normal(1, 4, 12)
        found[f"{start}prompt_embeds_mask_2"] = torch.ones(1, 4, dtype=torch.long)
    return found


add("SemanticStableDiffusionPipeline", "text", spoken, said)
add(
    "Krea2Pipeline",
    "text",
    lambda: {**qwen(), "transformer": of_zoo("Krea2Transformer2DModel")},
    partial(usual, text=krea_text),
)
add_built("HiDreamImagePipeline", "text", hidream, partial(usual, text=hidream_text))
add(
    "ErnieImagePipeline",
    "text",
    lambda: {
        **around("ErnieImageTransformer2DModel", in_channels=16, out_channels=16),
        "vae": flux2_vae(),
    },
    partial(usual, text=ernie_text, **LARGE),
    64,
)
add("HunyuanImagePipeline", "text", hunyuan_image, partial(usual, text=hunyuan_image_text))
add_built(
    "BriaFiboPipeline",
    "text",
    encoded("BriaFiboPipeline", bria_edit, encode_prompt=bria_words),
    lambda seed: {"prompt": words(seed), "num_inference_steps": STEPS, **MIDDLE},
    128,
)
add_built(
    "LongCatImagePipeline",
    "text",
    encoded(
        "LongCatImagePipeline",
        longcat,
        _encode_prompt=lambda pipe, prompts: torch.cat(
            [drawn(one, 1, TEXT, CROSS) for one in prompts]
        ),
    ),
    lambda seed: {
        "prompt": words(seed),
        "num_inference_steps": STEPS,
        "enable_prompt_rewrite": False,
        **MIDDLE,
    },
    128,
)
add(
    "Cosmos2TextToImagePipeline",
    "text",
    lambda: {
        **around("CosmosTransformer3DModel-image", coder=wan_vae),
        "scheduler": flow(use_karras_sigmas=True),
        "safety_checker": Harmless(),
    },
    partial(usual, text=two, **MIDDLE),
    128,
)
add(
    "PRXPixelPipeline",
    "text",
    lambda: {
        **only(around("PRXTransformer2DModel", in_channels=3), "vae"),
        "tokenizer": clip_tokenizer(),
    },
    unbinned,
    output="np",
)
add(
    "StableDiffusionInpaintPipelineLegacy",
    "blend",
    sd,
    partial(begun),
    output="np",
)
add(
    "StableDiffusionParadigmsPipeline",
    "text",
    lambda: {**sd(), "scheduler": DDIMParallelScheduler(prediction_type="v_prediction")},
    partial(usual, text=two, parallel=2),
)
add(
    "StableDiffusionAttendAndExcitePipeline",
    "text",
    spoken,
    lambda seed: {**said(seed), "token_indices": [1], "attn_res": (8, 8)},
)
