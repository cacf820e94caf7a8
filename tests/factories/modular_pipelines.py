"""Modular pipelines of diffusers: blocks without their text encoders, over tiny components."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import diffusers

from tests.factories.pipelines import (
    SIDE,
    Arguments,
    Kind,
    control_net,
    flux,
    flux2,
    qwen,
    register,
    sd3,
    sdxl,
    text_of,
    usual,
    with_control,
    z_image,
    z_image_text,
)
from tests.factories.zoo import SDXL

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
