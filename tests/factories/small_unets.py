"""UNets of one or two levels with one layer each, for tests of what is around them."""

from typing import Any

from tests.factories.more_pipelines import UNION
from tests.factories.pipelines import (
    Arguments,
    clip,
    clip_tokenizer,
    control_net,
    ddim,
    vae,
)
from tests.factories.zoo import SD15, SDXL, only, tiny

SMALL: Arguments = {
    "block_out_channels": (16, 32),
    "layers_per_block": 1,
    "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"),
    "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D"),
}
SMALL_SD = only(SD15, **SMALL)
LEAST: Arguments = {
    "block_out_channels": (16,),
    "layers_per_block": 1,
    "down_block_types": ("CrossAttnDownBlock2D",),
    "up_block_types": ("CrossAttnUpBlock2D",),
}
LEAST_SD = only(SD15, **LEAST)
SMALL_XL = only(SDXL, **SMALL, attention_head_dim=2, transformer_layers_per_block=1)


def unet(**changed: Any) -> Any:
    return tiny("UNet2DConditionModel", **only(SMALL_SD, **changed))


def sd(**changed: Any) -> Arguments:
    return {"vae": vae(), "unet": unet(**changed), "scheduler": ddim()}


def least_control() -> Arguments:
    return {**sd(**LEAST), "controlnet": control_net(LEAST_SD)}


def sdxl(**changed: Any) -> Arguments:
    net = tiny("UNet2DConditionModel", **only(SMALL_XL, **changed))
    return {"vae": vae(), "unet": net, "scheduler": ddim()}


def xl_control() -> Arguments:
    return {**sdxl(), "controlnet": control_net(SMALL_XL)}


def union_control(shape: Arguments = SMALL) -> Arguments:
    own = {n: shape[n] for n in shape if n != "up_block_types"}
    config = only(UNION, **own, attention_head_dim=2, transformer_layers_per_block=1)
    return {**sdxl(**shape), "controlnet": tiny("ControlNetUnionModel", **config)}


def spoken(**changed: Any) -> Arguments:
    return {**sd(**changed), "text_encoder": clip(), "tokenizer": clip_tokenizer()}
