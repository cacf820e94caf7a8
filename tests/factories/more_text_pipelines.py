"""Pipelines that make a picture from a text, around the parts of those that edit one."""

from functools import partial
from typing import Any

import torch
from diffusers import (
    CMStochasticIterativeScheduler,
    DDPMScheduler,
    PNDMScheduler,
    ScoreSdeVeScheduler,
    UnCLIPScheduler,
)

from tests.factories.dit_pipelines import (
    LARGE,
    MIDDLE,
    add_built,
    drawn,
    eighth,
    encoded,
    hunyuan_text,
)
from tests.factories.edit_pipelines import kandinsky
from tests.factories.late_pipelines import qwen_second
from tests.factories.modular_pipelines import add as add_modular
from tests.factories.modular_pipelines import modular_of
from tests.factories.more_pipelines import MOVQ, consistent, imagined
from tests.factories.pipelines import (
    SIDE,
    STEPS,
    TEXT,
    Arguments,
    add,
    clip,
    clip_tokenizer,
    ddim,
    flow,
    flux2_vae,
    pooled,
    qwen,
    seeded,
    text_of,
    two,
    usual,
)
from tests.factories.small_unets import sd, sdxl, spoken
from tests.factories.staged_pipelines import (
    cascade,
    cascade_text,
    clip_projected,
    combined,
    karlo,
    with_prior,
)
from tests.factories.text_pipelines import (
    alone,
    around,
    bare,
    cleaned,
    ernie_text,
    krea_text,
    said,
)
from tests.factories.unet_pipelines import (
    floyd,
    floyd_first,
    kandinsky_first,
    kandinsky_third,
    masked_text,
    of_zoo,
    unclip,
    worded,
)
from tests.factories.zoo import CROSS, POOLED, Draw, only, tiny

# Stable Diffusion, pixels and no text.

add("AltDiffusionPipeline", "text", sd, partial(usual, text=two))
add("StableDiffusionPAGPipeline", "text", sd, partial(usual, text=two))
add("StableDiffusionXLPAGPipeline", "text", sdxl, partial(usual, text=pooled))
add("StableDiffusionPipelineSafe", "text", spoken, said, output="np")
add("StableDiffusionModelEditingPipeline", "text", spoken, said)
add(
    "LatentConsistencyModelPipeline",
    "text",
    consistent,
    lambda seed: {**usual(seed, partial(text_of, negative=False)), "original_inference_steps": 20},
)
add("IFPipeline", "text", floyd_first, lambda seed: floyd(seed, height=16, width=16), 16, "np")
for unconditional, times, steps in (
    ("DDPMPipeline", DDPMScheduler, STEPS),
    ("PNDMPipeline", PNDMScheduler, 5),
    ("ConsistencyModelPipeline", CMStochasticIterativeScheduler, STEPS),
    ("ScoreSdeVePipeline", ScoreSdeVeScheduler, STEPS),
):
    given = partial(alone, num_inference_steps=steps)
    add(unconditional, "text", partial(bare, scheduler=times), given, SIDE, "np")


def latent_unconditional() -> Arguments:
    movq = tiny("VQModel", **only(MOVQ, latent_channels=3, vq_embed_dim=3, norm_type="group"))
    return {**bare(3), "vqvae": movq}


def bert() -> Arguments:
    from diffusers.pipelines.latent_diffusion.pipeline_latent_diffusion import (
        LDMBertConfig,
        LDMBertModel,
    )

    config = LDMBertConfig(
        vocab_size=64,
        max_position_embeddings=77,
        encoder_layers=1,
        encoder_ffn_dim=32,
        encoder_attention_heads=2,
        head_dim=16,
        d_model=CROSS,
    )
    encoder = seeded(12, LDMBertModel, config)
    return {**only(sd(), "vae"), "vqvae": eighth(), "bert": encoder, "tokenizer": clip_tokenizer()}


def versatile_texts() -> Arguments:
    parts = sd()
    net = parts.pop("unet")
    return {
        **parts,
        "image_unet": net,
        "text_unet": net,
        "text_encoder": clip_projected(CROSS, CROSS),
        "tokenizer": clip_tokenizer(),
    }


add("LDMPipeline", "text", latent_unconditional, alone, 64, "np")
add("LDMTextToImagePipeline", "text", bert, partial(said, guidance_scale=3.0, **MIDDLE), 128, "np")
add("VersatileDiffusionTextToImagePipeline", "text", versatile_texts, said)

# Kandinsky.

add("KandinskyV22Pipeline", "text", kandinsky, imagined)
add(
    "KandinskyV22ControlnetPipeline",
    "text",
    partial(kandinsky, in_channels=8, addition_embed_type="image_hint"),
    lambda seed: {
        **imagined(seed),
        "hint": Draw(71).uniform(1, 3, 4 * SIDE, 4 * SIDE),
    },
    output="np",
)
add(
    "KandinskyV22CombinedPipeline",
    "text",
    lambda: with_prior(kandinsky()),
    partial(combined, num_inference_steps=STEPS),
)
add(
    "KandinskyPipeline",
    "text",
    partial(kandinsky_first, 4),
    partial(worded, num_inference_steps=STEPS),
    output="np",
)
add(
    "KandinskyCombinedPipeline",
    "text",
    lambda: with_prior(kandinsky_first(4)),
    partial(combined, num_inference_steps=STEPS),
    output="np",
)
add(
    "Kandinsky3Pipeline",
    "text",
    kandinsky_third,
    lambda seed: {**usual(seed, two, **MIDDLE), **masked_text(seed)},
)

# A prior makes an embedding or small latents first.


def with_text_prior(parts: Arguments) -> Arguments:
    prior = tiny(
        "PriorTransformer",
        num_attention_heads=2,
        attention_head_dim=8,
        num_layers=1,
        embedding_dim=POOLED,
        num_embeddings=16,
    )
    times = UnCLIPScheduler(prediction_type="sample", clip_sample_range=5.0)
    return {**only(parts, "image_encoder", "feature_extractor"), "prior": prior} | {
        "prior_scheduler": times
    }


def stable_unclip() -> Arguments:
    encoders = {"prior_text_encoder": clip_projected(POOLED, POOLED), "text_encoder": clip()}
    tokenizers = {"prior_tokenizer": clip_tokenizer(), "tokenizer": clip_tokenizer()}
    return {**with_text_prior(unclip()), **encoders, **tokenizers}


def cascade_decoder() -> Arguments:
    parts = cascade()
    return {n: parts[n] for n in ("decoder", "vqgan", "text_encoder", "scheduler")}


def cascaded(seed: int) -> Arguments:
    embeds = Draw(90 + seed).normal(1, 4, 3, 3)
    return {**cascade_text(seed), "image_embeddings": embeds, "num_inference_steps": STEPS}


add("StableUnCLIPPipeline", "text", stable_unclip, partial(said, prior_num_inference_steps=2))
add(
    "UnCLIPPipeline",
    "text",
    lambda: with_text_prior(karlo()),
    lambda seed: {
        **only(said(seed), "num_inference_steps", "height", "width"),
        "prior_num_inference_steps": 2,
        "decoder_num_inference_steps": STEPS,
        "super_res_num_inference_steps": 2,
    },
    output="np",
)
add("StableCascadeDecoderPipeline", "text", cascade_decoder, cascaded, 128, "np")
# Transformers.

add(
    "HunyuanDiTPAGPipeline",
    "text",
    lambda: {
        **around("HunyuanDiT2DModel", coder=eighth),
        "scheduler": ddim(),
        "pag_applied_layers": "1",
    },
    partial(usual, text=hunyuan_text, **MIDDLE),
    128,
)
add(
    "PixArtSigmaPAGPipeline",
    "text",
    lambda: {
        **around("PixArtTransformer2DModel", out_channels=8),
        "scheduler": ddim(),
        "pag_applied_layers": "blocks.1",
    },
    cleaned,
)


def ideogram() -> Arguments:
    nets = {
        n: of_zoo("Ideogram4Transformer2DModel-uncond")
        for n in ("transformer", "unconditional_transformer")
    }
    return {**nets, "scheduler": flow(), "vae": flux2_vae()}


def ideogram_words(
    pipe: Any, prompt: Any, grid_h: int, grid_w: int, max_sequence_length: int, device: Any
) -> Any:
    """Text features in front of the picture's tokens, with padding before them."""
    length, count = max_sequence_length, grid_h * grid_w
    found = torch.zeros(1, length + count, CROSS)
    found[:, length - TEXT : length] = drawn(prompt, 1, TEXT, CROSS)
    return found, *pipe._prepare_ids([TEXT], grid_h, grid_w, length, device)


add_built(
    "Ideogram4Pipeline",
    "text",
    encoded("Ideogram4Pipeline", ideogram, encode_prompt=ideogram_words),
    lambda seed: {
        **said(seed, **LARGE),
        "guidance_schedule": (7.0,) * (STEPS - 1) + (3.0,),
        "max_sequence_length": TEXT + 3,
    },
    64,
)

# Modular pipelines.


def krea() -> Arguments:
    return {**qwen(), "transformer": of_zoo("Krea2Transformer2DModel")}


def ernie() -> Arguments:
    net = around("ErnieImageTransformer2DModel", in_channels=16, out_channels=16)
    return {**net, "vae": flux2_vae()}


add_modular(
    "Krea2ModularPipeline",
    "text",
    partial(modular_of, "Krea2AutoBlocks", krea),
    partial(usual, text=krea_text),
)
add_modular(
    "Krea2TurboModularPipeline",
    "text",
    partial(modular_of, "Krea2TurboAutoBlocks", krea),
    lambda seed: {n: v for n, v in usual(seed, krea_text).items() if not n.startswith("negative")},
)
add_modular(
    "ErnieImageModularPipeline",
    "text",
    partial(modular_of, "ErnieImageAutoBlocks", ernie, ("text_encoder", "prompt_enhancer")),
    partial(usual, text=ernie_text, **LARGE),
    64,
)


def qwen_modular(seed: int, *signs: str) -> Arguments:
    """Texts beside their masks."""
    found: Arguments = {"num_inference_steps": STEPS, **MIDDLE}
    for i, sign in enumerate(signs):
        found[f"{sign}prompt_embeds"] = Draw(seed + 9 * i).normal(1, TEXT, CROSS)
        found[f"{sign}prompt_embeds_mask"] = torch.ones(1, TEXT, dtype=torch.long)
        found[f"{sign}image_pad_mask"] = torch.zeros(1, TEXT, dtype=torch.bool)
    return found


add_modular(
    "QwenImage21ModularPipeline",
    "text",
    partial(modular_of, "QwenImage21AutoBlocks", lambda: only(qwen_second(), "processor")),
    lambda seed: qwen_modular(seed, "", "negative_"),
    128,
)
add_modular(
    "QwenImage21TurboModularPipeline",
    "text",
    partial(modular_of, "QwenImage21TurboAutoBlocks", lambda: only(qwen_second(), "processor")),
    lambda seed: qwen_modular(seed, ""),
    128,
)
