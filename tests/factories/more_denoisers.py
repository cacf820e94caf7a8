"""Tiny denoisers with packed tokens, several pictures in one sequence or parts of another model."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn

from tests.factories.videos import JOY
from tests.factories.zoo import (
    CROSS,
    HEADS,
    POOLED,
    TOKEN_SIZES,
    Z_IMAGE,
    Draw,
    Size,
    add,
    grid_ids,
    only,
    packed,
    spatial,
    tiny,
    z_image_inputs,
)

QUADS = tuple(size for size in TOKEN_SIZES if size.height * size.width % 4 == 0)
# more tokens of the picture than half of those of the text, which stand behind them
LONG_SIZES = (Size(1, 8, 16, 7), Size(1, 16, 16, 11), Size(2, 10, 14, 3), Size(1, 16, 24, 7))
HIDREAM: dict[str, Any] = {
    **HEADS,
    "patch_size": 2,
    "in_channels": 4,
    "out_channels": 4,
    "num_layers": 1,
    "num_single_layers": 1,
    "caption_channels": [CROSS, CROSS],
    "text_emb_dim": POOLED,
    "axes_dims_rope": (8, 4, 4),
    "llama_layers": [0, 1],
    "force_inference_output": True,
}
QWEN21: dict[str, Any] = {
    **HEADS,
    "in_channels": 16,
    "out_channels": 16,
    "num_layers": 2,
    "context_in_dim": CROSS,
    "mlp_ratio": 2,
    "axes_dims_rope": (4, 6, 6),
}
Z_CONTROL: dict[str, Any] = {
    "control_layers_places": [0, 1],
    "control_refiner_layers_places": [0],
    "control_in_dim": 4,
    **{n: Z_IMAGE[n] for n in ("dim", "n_refiner_layers", "n_heads", "n_kv_heads")},
}


def hidream_packed(size: Size, seed: int) -> dict[str, Any]:
    """Inputs of HiDreamImageTransformer2DModel with tokens of patches, their places and a mask."""
    draw = Draw(seed)
    tokens = size.height * size.width
    return {
        "hidden_states": draw.normal(size.batch, tokens, 16),
        "timesteps": draw.steps(size.batch),
        "encoder_hidden_states_t5": draw.normal(size.batch, size.text, CROSS),
        "encoder_hidden_states_llama3": draw.normal(2, size.batch, size.text, CROSS),
        "pooled_embeds": draw.normal(size.batch, POOLED),
        "img_ids": grid_ids(size).expand(size.batch, -1, -1),
        "img_sizes": [(size.height, size.width)] * size.batch,
        "hidden_states_masks": torch.ones(size.batch, tokens),
        "return_dict": False,
    }


def qwen21_inputs(size: Size, seed: int) -> dict[str, Any]:
    """Inputs of QwenImage21Transformer2DModel: a slot of the text stands for four image tokens."""
    draw = Draw(seed)
    tokens = size.height * size.width
    slots = torch.arange(size.text + tokens // 4) >= size.text
    return {
        "hidden_states": draw.normal(size.batch, tokens, 16),
        "encoder_hidden_states": draw.normal(size.batch, size.text, CROSS),
        "timestep": draw.uniform(size.batch, low=0.01),
        "img_shapes": [[(1, size.height, size.width)]] * size.batch,
        "img_mask": slots.expand(size.batch, -1).contiguous(),
        "encoder_hidden_states_mask": draw.keep(size.batch, size.text),
        "return_dict": False,
    }


def joy_plus_inputs(
    size: Size, seed: int, *, references: tuple[tuple[int, int], ...] = ()
) -> dict[str, Any]:
    """Inputs of JoyImageEditPlusTransformer3DModel: patches of the picture and its references."""
    draw = Draw(seed)
    shapes = [(1, *sides) for sides in ((size.height, size.width), *references)]
    patches = sum(height * width for _, height, width in shapes)
    return {
        "hidden_states": draw.normal(size.batch, patches, 4, 1, 2, 2),
        "timestep": draw.steps(size.batch),
        "encoder_hidden_states": draw.normal(size.batch, size.text, CROSS),
        "encoder_hidden_states_mask": draw.keep(size.batch, size.text).long(),
        "shape_list": [shapes] * size.batch,
        "return_dict": False,
    }


def z_control_inputs(size: Size, seed: int) -> dict[str, Any]:
    """Inputs of ZImageControlNetModel: a control picture as large as the latent."""
    arguments = only(z_image_inputs(size, seed), "return_dict", conditioning_scale=0.75)
    draw = Draw(seed + 100)
    arguments["control_context"] = [draw.normal(*x.shape) for x in arguments["x"]]
    return arguments


def z_control(**config: Any) -> nn.Module:
    """Build a ControlNet that shares the embeddings and refiners of its transformer."""
    net: Any = tiny("ZImageControlNetModel", **Z_CONTROL, **config)
    shared = tiny("ZImageTransformer2DModel", **Z_IMAGE)
    net.from_transformer(net, shared)
    return net.eval().requires_grad_(False)


def add_more() -> None:
    """Add the cases of this file."""
    add(
        "HiDreamImageTransformer2DModel-packed",
        hidream_packed,
        HIDREAM,
        mask_shape=spatial,
        sizes=TOKEN_SIZES,
        text_first=False,
    )
    add(
        "QwenImage21Transformer2DModel",
        qwen21_inputs,
        QWEN21,
        mask_shape=packed,
        sizes=QUADS,
        text_first=True,
    )
    add(
        "JoyImageEditPlusTransformer3DModel",
        joy_plus_inputs,
        JOY,
        mask_shape=packed,
        sizes=TOKEN_SIZES,
        text_first=False,
    )
    add(
        "JoyImageEditPlusTransformer3DModel-references",
        partial(joy_plus_inputs, references=((3, 5),)),
        JOY,
        mask_shape=lambda size: (size.height * size.width + 15,),
        sizes=TOKEN_SIZES,
        text_first=False,
    )
    for name in ("plain", "control_layers", "control_noise_refiner"):
        add(
            f"ZImageControlNetModel-{name}",
            z_control_inputs,
            {},
            sizes=LONG_SIZES,
            build=partial(z_control, add_control_noise_refiner=None if name == "plain" else name),
            text_first=False,
        )


add_more()

__all__ = ["add_more"]
