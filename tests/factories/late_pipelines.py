"""Pipelines whose calls hand keys and values on, or pack references of other sizes."""

from functools import partial
from typing import Any

import torch

from tests.factories.dit_pipelines import (
    LARGE,
    add_built,
    drawn,
    vae_of,
    wan_vae,
    words,
)
from tests.factories.pipelines import (
    SIDE,
    STEPS,
    TEXT,
    Arguments,
    add,
    flow,
    picture,
    pipe_of,
    qwen_tokenizer,
    still,
)
from tests.factories.unet_pipelines import of_zoo
from tests.factories.zoo import CROSS, Draw, tiny

# GLM-Image: numbers of an autoregressive model beside the text.


def glm() -> Arguments:
    coder = vae_of(2, 4)
    coder.register_to_config(latents_mean=[0.0] * 4, latents_std=[1.0] * 4)
    net = of_zoo("GlmImageTransformer2DModel")
    return {"vae": coder, "transformer": net, "scheduler": flow()}


def glm_text(seed: int) -> Arguments:
    draw = Draw(seed)
    return {
        "prompt_embeds": draw.normal(1, TEXT, CROSS),
        "negative_prompt_embeds": draw.normal(1, TEXT, CROSS),
        "prior_token_ids": draw.integers(1, SIDE * SIDE // 16, high=20),
        "num_inference_steps": STEPS,
        "height": SIDE,
        "width": SIDE,
    }


def glm_pictured(seed: int) -> Arguments:
    """Keys and values of the picture are written before the first step, and read in all of them."""
    side = SIDE // 4
    return {
        **glm_text(seed),
        "image": [picture()],
        "prior_token_ids": glm_text(9)["prior_token_ids"],
        "prior_token_image_ids": [Draw(9).integers(side * side, high=20)],
        "source_image_grid_thw": [torch.tensor([[1, side, side]])],
    }


add("GlmImagePipeline", "text", glm, glm_text)
add("GlmImagePipeline-pictured", "reference", glm, glm_pictured)


# Qwen-Image 2.1: text and references are computed in the first step only, unless asked otherwise.


class Processor:
    """The parts of a processor that the pipeline reads before it encodes a prompt."""

    def __init__(self) -> None:
        self.tokenizer = qwen_tokenizer()

    def apply_chat_template(self, *_: Any, **__: Any) -> list[list[int]]:
        return [[0]]


def qwen_second() -> Arguments:
    coder = tiny(
        "AutoencoderKLQwenImage21",
        base_dim=4,
        decoder_base_dim=4,
        z_dim=4,
        dim_mult=[1] * 5,
        num_res_blocks=1,
        temperal_downsample=[False] * 4,
        latents_mean=[0.0] * 4,
        latents_std=[1.0] * 4,
    )
    net = tiny(
        "QwenImage21Transformer2DModel",
        in_channels=4,
        out_channels=4,
        num_layers=2,
        attention_head_dim=16,
        num_attention_heads=2,
        context_in_dim=CROSS,
        axes_dims_rope=(4, 6, 6),
    )
    return {"vae": coder, "transformer": net, "scheduler": flow(), "processor": Processor()}


def qwen_second_text(seed: int, **more: Any) -> Arguments:
    embeds = Draw(seed).normal(1, TEXT, CROSS)
    size = {"height": 128, "width": 128}
    return {"prompt_embeds": embeds, "num_inference_steps": STEPS, **size, **more}


add("QwenImage21Pipeline", "text", qwen_second, qwen_second_text, 128)
add(
    "QwenImage21Pipeline-uncached",
    "text",
    qwen_second,
    partial(qwen_second_text, use_kv_cache=False),
    128,
)


# JoyImage: references of other sizes, in patches of six dimensions.


def joy_plus() -> Any:
    net = tiny(
        "JoyImageEditPlusTransformer3DModel",
        in_channels=4,
        hidden_size=32,
        num_attention_heads=2,
        text_dim=CROSS,
        num_layers=2,
        rope_dim_list=[4, 6, 6],
    )
    parts = {"vae": still(wan_vae()), "transformer": net, "scheduler": flow()}
    made = pipe_of("JoyImageEditPlusPipeline", lambda: parts)
    made.image_processor.get_default_height_width = lambda *_: (64, 64)
    return made


def joy_words(pipe: Any, prompt: Any, **_: Any) -> Any:
    return drawn(prompt, 1, TEXT, CROSS), torch.ones(1, TEXT, dtype=torch.long)


def joy_plus_spoken() -> Any:
    made = joy_plus()
    made.encode_prompt_multiple_images = partial(joy_words, made)
    return made


add_built(
    "JoyImageEditPlusPipeline",
    "text",
    joy_plus_spoken,
    lambda seed: {
        "prompt": words(seed),
        "images": [picture(50, 64)],
        "num_inference_steps": STEPS,
        **LARGE,
    },
    64,
)
