"""Modular pipelines of diffusers: blocks without their text encoders, over tiny components."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import diffusers
import torch

from tests.factories.pipelines import (
    SDXL,
    SIDE,
    TEXT,
    Arguments,
    Kind,
    control_net,
    flow,
    flux,
    flux2,
    flux2_vae,
    qwen,
    qwen_vae,
    register,
    sd3,
    sdxl,
    text_of,
    usual,
    with_control,
    z_image,
    z_image_text,
)
from tests.factories.zoo import CROSS, ZOO, Draw, tiny

WITHOUT = ("text_encoder", "ip_adapter")  # blocks whose results the calls here pass themselves


def modular_of(
    blocks: str,
    components: Callable[[], Arguments],
    without: Sequence[str] = WITHOUT,
    **more: Any,
) -> Any:
    """A modular pipeline from diffusers' blocks of this name; `more` are further components."""
    made = getattr(diffusers, blocks)()
    for name in without:
        made.sub_blocks.pop(name, None)
    pipe = made.init_pipeline()
    pipe.update_components(**components(), **more)
    for block in within(pipe._blocks):
        if hasattr(block, "set_progress_bar_config"):
            block.set_progress_bar_config(disable=True)
    return pipe


def within(block: Any) -> list[Any]:
    """A block and those inside it; a pipeline passes settings of progress bars to few of them."""
    inner = getattr(block, "sub_blocks", {}).values()
    return [block, *(one for part in inner for one in within(part))]


def guided(blocks: str, components: Callable[[], Arguments], guider: str, **config: Any) -> Any:
    return modular_of(blocks, components, guider=getattr(diffusers, guider)(**config))


def add(
    name: str,
    edits: str,
    build: Callable[[], Any],
    inputs: Callable[[int], Arguments],
    side: int = SIDE,
) -> None:
    """Register a kind, which is compared by the latents in the state at the end of a call."""
    register(Kind(name, build, inputs, edits, side))


pooled = partial(text_of, pooled=True)
single = partial(text_of, negative=False, pooled=True)
xl = partial(usual, text=pooled, strength=0.9)
XL = "StableDiffusionXLAutoBlocks"

add("StableDiffusionXLModularPipeline", "blend", partial(modular_of, XL, sdxl), xl)
add(
    "StableDiffusionXLModularPipeline-9",
    "channels",
    partial(modular_of, XL, partial(sdxl, in_channels=9)),
    xl,
)
add(
    "StableDiffusionXLModularPipeline-control",
    "control",
    partial(modular_of, XL, lambda: {**sdxl(), "controlnet": control_net(SDXL)}),
    partial(with_control, text=pooled, strength=0.9),
)
add(
    "StableDiffusion3ModularPipeline",
    "image",
    partial(modular_of, "StableDiffusion3AutoBlocks", sd3),
    partial(usual, text=pooled, strength=0.7),
)
add(
    "FluxModularPipeline",
    "image",
    partial(modular_of, "FluxAutoBlocks", flux),
    partial(usual, text=single, strength=0.7),
)
add(
    "FluxKontextModularPipeline",
    "reference",
    partial(modular_of, "FluxKontextAutoBlocks", flux),
    partial(usual, text=single, max_area=SIDE * SIDE, _auto_resize=False),
)
add(
    "Flux2ModularPipeline",
    "reference",
    partial(modular_of, "Flux2AutoBlocks", flux2),
    partial(usual, text=partial(text_of, negative=False), height=64, width=64),
    64,
)
add(
    "Flux2KleinModularPipeline",
    "reference",
    partial(modular_of, "Flux2KleinAutoBlocks", partial(flux2, guidance_embeds=False)),
    partial(usual, text=text_of, height=64, width=64),
    64,
)
add(
    "Flux2KleinBaseModularPipeline",
    "reference",
    partial(modular_of, "Flux2KleinBaseAutoBlocks", partial(flux2, guidance_embeds=False)),
    partial(usual, text=text_of, height=64, width=64),
    64,
)
add(
    "QwenImageModularPipeline",
    "blend",
    partial(modular_of, "QwenImageAutoBlocks", qwen),
    partial(usual, text=partial(text_of, mask=True), strength=1.0),
)
add(
    "ZImageModularPipeline",
    "image",
    partial(modular_of, "ZImageAutoBlocks", z_image),
    partial(usual, text=z_image_text, strength=0.7),
)


# Flux 3: its prompt is rewritten by a language model first, and encoded by another


def flux3(case: str = "Flux3Transformer2DModel") -> Arguments:
    return {"vae": flux2_vae(), "transformer": ZOO[case].build(), "scheduler": flow()}


JUMPING = "Flux3Transformer2DModel-jumping"  # it takes the next time too
UPSAMPLED = ("prompt_upsampler", "text_encoder")
add(
    "Flux3ModularPipeline",
    "reference",
    partial(modular_of, "Flux3AutoBlocks", flux3, UPSAMPLED),
    partial(usual, text=text_of, height=64, width=64),
    64,
)
add(
    "Flux3DistilledModularPipeline",
    "reference",
    partial(modular_of, "Flux3DistilledAutoBlocks", partial(flux3, JUMPING), UPSAMPLED),
    partial(usual, text=partial(text_of, negative=False), height=64, width=64),
    64,
)


# Anima: a text conditioner between the text encoder and the transformer


def anima() -> Arguments:
    net = ZOO["CosmosTransformer3DModel-image"].build()
    conditioner = tiny(
        "AnimaTextConditioner",
        source_dim=CROSS,
        target_dim=CROSS,
        model_dim=CROSS,
        num_layers=1,
        num_attention_heads=2,
        target_vocab_size=100,
        min_sequence_length=TEXT,
    )
    parts = {"vae": qwen_vae(1), "transformer": net, "scheduler": flow()}
    return {**parts, "text_conditioner": conditioner}


def anima_text(seed: int) -> Arguments:
    draw, words = Draw(seed), torch.ones(1, TEXT, dtype=torch.long)
    found: Arguments = {}
    for sign in ("", "negative_"):
        found[f"{sign}qwen_prompt_embeds"] = draw.normal(1, TEXT, CROSS)
        found[f"{sign}qwen_attention_mask"] = words
        found[f"{sign}t5_input_ids"] = words * (2 + seed % 7)
        found[f"{sign}t5_attention_mask"] = words
    return found


add(
    "AnimaModularPipeline",
    "image",
    partial(modular_of, "AnimaAutoBlocks", anima),
    partial(usual, text=anima_text, strength=0.7),
)

# Qwen-Image's editors enlarge the picture to a million pixels: 1024 tokens here
add(
    "QwenImageEditModularPipeline",
    "blend",
    partial(modular_of, "QwenImageEditAutoBlocks", partial(qwen, 4)),
    partial(usual, text=partial(text_of, mask=True), height=1024, width=1024, strength=1.0),
    1024,
)
add(
    "QwenImageEditPlusModularPipeline",
    "reference",
    partial(modular_of, "QwenImageEditPlusAutoBlocks", partial(qwen, 4)),
    partial(usual, text=partial(text_of, mask=True), height=256, width=256),
    256,
)
