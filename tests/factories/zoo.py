"""Tiny, randomly initialised denoisers of diffusers, with input makers of any legal size.

This file owns the list of models that the tests run: for every :class:`Case` how to build the
module, how to make keyword arguments for its ``forward``, and how its image sites are laid out.
Nothing here knows about masks being applied; the tests do that.  Each model is a real class of
diffusers with a made-up small config, and no weight of it is zero: parts that diffusers starts at
zero (adaLN-zero gates, ControlNet projections, biases) are re-randomised, so no block is an
identity and a wrongly skipped part shows in the output.

``python -m tests.factories.zoo`` builds and runs every case and prints one line each.
"""

from __future__ import annotations

import importlib
import math
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree


def called(module: nn.Module, inputs: Mapping[str, Any]) -> Any:
    """Call a module with lists of its own, because some empty those that they are given."""
    return module(**pytree.tree_map(lambda value: value, dict(inputs)))


@dataclass(frozen=True)
class Size:
    """How large an input is."""

    batch: int = 1
    height: int = 8  # latent grid for spatial inputs; token grid for packed ones
    width: int = 8
    text: int = 7  # text tokens; cases whose text length is fixed by the config use only 7


@dataclass(frozen=True)
class Case:
    """One model of the zoo."""

    name: str
    build: Callable[[], nn.Module]  # fp32, eval(), seeded, no gradients
    inputs: Callable[[Size, int], dict[str, Any]]  # (size, seed) -> keyword arguments of forward
    mask_shape: Callable[[Size], tuple[int, ...]]  # (height, width), or (tokens,) for packed ones
    sizes: tuple[Size, ...]
    named: bool  # one of the classes that must fully narrow
    text_first: bool | None = None  # text before image on the joint axis; None: no joint axis


ZOO: dict[str, Case] = {}


def slow_unet(names: Iterable[str]) -> list[Any]:
    """The same cases; UNets, whose capture takes most of a test's time, in the slow run only."""
    import pytest

    return [pytest.param(n, marks=pytest.mark.slow) if n.startswith("UNet") else n for n in names]
# the default run takes these through the long oracles
QUICK = ("AuraFlow", "FluxTransformer2DModel", "Flux2Transformer2DModel")

LINEAR_GAIN = 1.7  # keeps the variance: torch draws linear weights with 1/sqrt(3) of that scale


def spatial(size: Size) -> tuple[int, ...]:
    """The mask shape of a model that takes a latent image."""
    return (size.height, size.width)


def packed(size: Size) -> tuple[int, ...]:
    """The mask shape of a model that takes a sequence of image tokens."""
    return (size.height * size.width,)


# UNets halve twice; the odd size needs their forward_upsample_size.
EVEN_UNET_SIZES = (
    Size(1, 8, 8, 7),
    Size(1, 8, 16, 5),
    Size(2, 12, 8, 7),
    Size(1, 16, 16, 11),
    Size(2, 16, 24, 3),
)
UNET_SIZES = (*EVEN_UNET_SIZES, Size(1, 9, 13, 7))
# Patch size 2 on a latent.
PATCH_SIZES = (
    Size(1, 8, 8, 7),
    Size(1, 8, 12, 5),
    Size(2, 12, 8, 7),
    Size(1, 16, 16, 11),
    Size(2, 10, 14, 3),
)
# Tokens, or a latent with patch size 1.
TOKEN_SIZES = (
    Size(1, 4, 4, 7),
    Size(1, 4, 6, 5),
    Size(2, 6, 4, 7),
    Size(1, 8, 8, 11),
    Size(2, 5, 7, 3),
)


def fixed_text(sizes: tuple[Size, ...]) -> tuple[Size, ...]:
    """The same sizes, for a model whose config fixes the number of text tokens at 7."""
    return tuple(Size(size.batch, size.height, size.width, 7) for size in sizes)


class Draw:
    """Random values for one set of inputs; does not touch torch's global generator."""

    def __init__(self, seed: int) -> None:
        self.generator = torch.Generator().manual_seed(seed)

    def normal(self, *shape: int, scale: float = 1.0) -> Tensor:
        """Normal values."""
        return torch.randn(shape, generator=self.generator) * scale

    def uniform(self, *shape: int, low: float = 0.0, high: float = 1.0) -> Tensor:
        """Uniform values."""
        return torch.rand(shape, generator=self.generator) * (high - low) + low

    def integers(self, *shape: int, low: int = 0, high: int) -> Tensor:
        """Whole numbers in [low, high)."""
        return torch.randint(low, high, shape, generator=self.generator)

    def steps(self, batch: int) -> Tensor:
        """Timesteps out of 1000, one for each sample."""
        return self.integers(batch, low=1, high=1000)

    def keep(self, batch: int, length: int) -> Tensor:
        """True for valid text tokens: up to a third of each row is padding, at its end."""
        padding = self.integers(batch, 1, high=max(length // 3, 1) + 1)
        if length > 1:
            padding[0] = padding[0].clamp(min=1)
        return torch.arange(length)[None, :] < length - padding


def rouse(module: nn.Module, generator: torch.Generator) -> None:
    """Make every part of a module matter to its output.

    Parameters that are constant 0 or 1 are perturbed, so that no part is idle or an identity, and
    those that the class leaves uninitialised get values.  The weights of linear layers are
    enlarged: torch's own scale shrinks what passes through, and behind a few gates of tiny size
    the text and the far end of the image would not show in the output.
    """
    for parameter in module.parameters():
        noise = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
        if not bool(parameter.data.any()) or bool(parameter.data.isnan().any()):
            parameter.data.copy_(0.2 * noise)
        elif bool((parameter.data == 1).all()):
            parameter.data.add_(0.1 * noise)
    for part in module.modules():
        if isinstance(part, nn.Linear):
            part.weight.data.mul_(LINEAR_GAIN)


def tiny(class_name: str, /, module: str = "diffusers", **config: Any) -> nn.Module:
    """Build one class of diffusers from a config, always with the same weights."""
    factory = getattr(importlib.import_module(module), class_name)
    strict = torch.are_deterministic_algorithms_enabled()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        torch.use_deterministic_algorithms(True)  # fills uninitialised memory with nan
        try:
            model: nn.Module = factory(**config)
        finally:
            torch.use_deterministic_algorithms(strict)
    model = model.float()
    rouse(model, torch.Generator().manual_seed(1))
    return model.eval().requires_grad_(False)


def add(
    name: str,
    inputs: Callable[[Size, int], dict[str, Any]],
    config: Mapping[str, Any],
    *,
    module: str = "diffusers",
    build: Callable[[], nn.Module] | None = None,
    mask_shape: Callable[[Size], tuple[int, ...]] = spatial,
    sizes: tuple[Size, ...] = PATCH_SIZES,
    named: bool = False,
    text_first: bool | None = None,
) -> None:
    """Add one case; its class is the part of the name before the first dash."""
    if name in ZOO:
        raise ValueError(f"two cases are called {name}")
    maker = build or partial(tiny, name.partition("-")[0], module=module, **config)
    ZOO[name] = Case(name, maker, inputs, mask_shape, sizes, named, text_first)


# ---------------------------------------------------------------------------------------------
# UNets and their ControlNets
# ---------------------------------------------------------------------------------------------

CROSS = 32  # width of the text states, all models
POOLED = 16  # width of pooled text states

UNET_BASE: dict[str, Any] = {
    "sample_size": 16,
    "block_out_channels": (16, 32, 32),
    "layers_per_block": 2,
    "norm_num_groups": 8,
    "cross_attention_dim": CROSS,
    "attention_head_dim": 2,  # for these classes: the number of heads
}
SD15: dict[str, Any] = {
    **UNET_BASE,
    "down_block_types": ("CrossAttnDownBlock2D", "CrossAttnDownBlock2D", "DownBlock2D"),
    "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D", "CrossAttnUpBlock2D"),
}
SD21: dict[str, Any] = {**SD15, "attention_head_dim": (2, 4, 4), "use_linear_projection": True}
SDXL: dict[str, Any] = {
    **UNET_BASE,
    "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
    "up_block_types": ("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
    "attention_head_dim": (2, 2, 4),
    "use_linear_projection": True,
    "transformer_layers_per_block": (1, 2, 3),
    "addition_embed_type": "text_time",
    "addition_time_embed_dim": 8,
    "projection_class_embeddings_input_dim": POOLED + 6 * 8,
}


def only(config: Mapping[str, Any], *dropped: str, **changed: Any) -> dict[str, Any]:
    """A config without some entries and with others."""
    return {**{key: value for key, value in config.items() if key not in dropped}, **changed}


def half(length: int, times: int) -> int:
    """A side after some stride-2 convolutions."""
    for _ in range(times):
        length = (length + 1) // 2
    return length


def residual_shapes(size: Size) -> Iterator[tuple[int, ...]]:
    """Shapes of what a UNet of ``UNET_BASE`` keeps on its way down, then of its middle."""
    channels = UNET_BASE["block_out_channels"]
    yield (size.batch, channels[0], size.height, size.width)
    for level, width in enumerate(channels):
        here = (half(size.height, level), half(size.width, level))
        for _ in range(UNET_BASE["layers_per_block"]):
            yield (size.batch, width, *here)
        if level < len(channels) - 1:
            yield (size.batch, width, half(here[0], 1), half(here[1], 1))
    last = len(channels) - 1
    yield (size.batch, channels[-1], half(size.height, last), half(size.width, last))


def unet_inputs(
    size: Size,
    seed: int,
    *,
    channels: int = 4,
    time_kind: str = "batch",
    text_time: bool = False,
    residuals: bool = False,
    control: int = 0,
    text_mask: bool = False,
    classes: int = 0,
    text_width: int = CROSS,
    class_width: int = 0,
    added: Mapping[str, tuple[int, ...]] | None = None,
) -> dict[str, Any]:
    """Inputs of UNet2DConditionModel and ControlNetModel."""
    draw = Draw(seed)
    steps = draw.steps(size.batch)
    timesteps = {"batch": steps, "scalar": steps[0], "int": int(steps[0]), "sigma": steps / 400.0}
    arguments: dict[str, Any] = {
        "sample": draw.normal(size.batch, channels, size.height, size.width),
        "timestep": timesteps[time_kind],
        "encoder_hidden_states": draw.normal(size.batch, size.text, text_width),
        "return_dict": False,
    }
    if text_time:
        arguments["added_cond_kwargs"] = {
            "text_embeds": draw.normal(size.batch, POOLED),
            "time_ids": draw.uniform(size.batch, 6, high=1024.0).round(),
        }
    if added:
        arguments["added_cond_kwargs"] = {
            key: draw.normal(size.batch, *shape) for key, shape in added.items()
        }
    if residuals:
        *down, mid = (draw.normal(*shape) for shape in residual_shapes(size))
        arguments["down_block_additional_residuals"] = tuple(down)
        arguments["mid_block_additional_residual"] = mid
    if control:
        arguments["controlnet_cond"] = draw.uniform(
            size.batch, control, 8 * size.height, 8 * size.width
        )
        arguments["conditioning_scale"] = 0.75
    if text_mask:
        arguments["encoder_attention_mask"] = draw.keep(size.batch, size.text)
    if classes:
        arguments["class_labels"] = draw.integers(size.batch, high=classes)
    if class_width:
        arguments["class_labels"] = draw.normal(size.batch, class_width)
    return arguments


def plain_unet_inputs(
    size: Size, seed: int, *, time_kind: str = "batch", classes: int = 0
) -> dict[str, Any]:
    """Inputs of UNet2DModel."""
    arguments = unet_inputs(size, seed, channels=3, time_kind=time_kind, classes=classes)
    del arguments["encoder_hidden_states"]
    return arguments


def add_unets() -> None:
    """UNet2DConditionModel, UNet2DModel and ControlNetModel."""
    named = partial(add, sizes=UNET_SIZES, named=True)
    named("UNet2DConditionModel-sd15", unet_inputs, SD15)
    named("UNet2DConditionModel-sd21", partial(unet_inputs, time_kind="scalar"), SD21)
    named("UNet2DConditionModel-sdxl", partial(unet_inputs, text_time=True), SDXL)
    named("UNet2DConditionModel-inpaint", partial(unet_inputs, channels=9),
          only(SD15, in_channels=9))
    named("UNet2DConditionModel-textmask", partial(unet_inputs, text_mask=True), SD15)
    named("UNet2DConditionModel-residuals", partial(unet_inputs, residuals=True), SD15)
    named("UNet2DConditionModel-sdxlresiduals",
          partial(unet_inputs, residuals=True, text_time=True), SDXL)
    cond = {"conditioning_embedding_out_channels": (8, 8, 16, 16)}
    control = only(SD15, "sample_size", "up_block_types", **cond)
    named("ControlNetModel", partial(unet_inputs, control=3), control)
    named("ControlNetModel-sdxl", partial(unet_inputs, control=3, text_time=True),
          only(SDXL, "sample_size", "up_block_types", **cond))

    plain: dict[str, Any] = {
        "sample_size": 16,
        "block_out_channels": (16, 32, 32),
        "layers_per_block": 2,
        "norm_num_groups": 8,
        "attention_head_dim": 8,
        "down_block_types": ("DownBlock2D", "AttnDownBlock2D", "AttnDownBlock2D"),
        "up_block_types": ("AttnUpBlock2D", "AttnUpBlock2D", "UpBlock2D"),
    }
    even = partial(add, sizes=EVEN_UNET_SIZES, named=True)
    even("UNet2DModel", plain_unet_inputs, plain)
    even("UNet2DModel-noattn", partial(plain_unet_inputs, time_kind="int"),
         only(plain, add_attention=False, down_block_types=("DownBlock2D",) * 3,
              up_block_types=("UpBlock2D",) * 3))


# ---------------------------------------------------------------------------------------------
# Transformers on packed tokens
# ---------------------------------------------------------------------------------------------

PACKED_CHANNELS = 16


def grid_ids(size: Size, axes: int = 3, row_axis: int = 1, first: int = 0) -> Tensor:
    """Position ids of image tokens, float, one row for each token in reading order."""
    ids = torch.zeros(size.height, size.width, axes)
    ids[..., 0] = first
    ids[..., row_axis] = torch.arange(size.height)[:, None]
    ids[..., row_axis + 1] = torch.arange(size.width)[None, :]
    return ids.flatten(0, 1)


def flux_inputs(
    size: Size,
    seed: int,
    *,
    guidance: bool = True,
    pooled_text: bool = True,
    axes: int = 3,
    controls: tuple[int, int] = (0, 0),
    control_width: int = 32,
    mask: str = "",
    channels: int = PACKED_CHANNELS,
) -> dict[str, Any]:
    """Inputs of Flux and of the models built like it."""
    draw = Draw(seed)
    tokens = size.height * size.width
    text_ids = torch.zeros(size.text, axes)
    if axes == 4:
        text_ids[:, 3] = torch.arange(size.text)
    arguments: dict[str, Any] = {
        "hidden_states": draw.normal(size.batch, tokens, channels),
        "encoder_hidden_states": draw.normal(size.batch, size.text, CROSS),
        "timestep": draw.uniform(size.batch, low=0.01),
        "img_ids": grid_ids(size, axes),
        "txt_ids": text_ids,
        "return_dict": False,
    }
    if pooled_text:
        arguments["pooled_projections"] = draw.normal(size.batch, POOLED)
    if guidance:
        arguments["guidance"] = draw.uniform(size.batch, low=1.0, high=5.0)
    for key, count in zip(
        ("controlnet_block_samples", "controlnet_single_block_samples"), controls, strict=True
    ):
        if count:
            arguments[key] = [
                draw.normal(size.batch, tokens, control_width) for _ in range(count)
            ]
    if mask:
        keep = draw.keep(size.batch, size.text)
        full = torch.cat([keep, torch.ones(size.batch, tokens, dtype=torch.bool)], dim=1)
        # The pipeline of Chroma hands over floats, which the attention then adds to its scores.
        arguments["attention_mask"] = full.float() if mask == "float" else full
    return arguments


def qwen_inputs(size: Size, seed: int, *, mask: bool = True, controls: int = 0) -> dict[str, Any]:
    """Inputs of QwenImageTransformer2DModel; img_shapes are Python ints."""
    draw = Draw(seed)
    tokens = size.height * size.width
    arguments: dict[str, Any] = {
        "hidden_states": draw.normal(size.batch, tokens, PACKED_CHANNELS),
        "encoder_hidden_states": draw.normal(size.batch, size.text, CROSS),
        "timestep": draw.uniform(size.batch, low=0.01),
        "img_shapes": [[(1, size.height, size.width)] for _ in range(size.batch)],
        "return_dict": False,
    }
    if mask:
        arguments["encoder_hidden_states_mask"] = draw.keep(size.batch, size.text)
    if controls:
        arguments["controlnet_block_samples"] = [
            draw.normal(size.batch, tokens, 32) for _ in range(controls)
        ]
    return arguments


FLUX: dict[str, Any] = {
    "in_channels": PACKED_CHANNELS,
    "num_layers": 2,
    "num_single_layers": 2,
    "attention_head_dim": 16,
    "num_attention_heads": 2,
    "joint_attention_dim": CROSS,
    "pooled_projection_dim": POOLED,
    "guidance_embeds": True,
    "axes_dims_rope": (4, 6, 6),
}
FLUX2: dict[str, Any] = only(
    FLUX, "pooled_projection_dim", axes_dims_rope=(4, 4, 4, 4), timestep_guidance_channels=16
)
CHROMA: dict[str, Any] = only(
    FLUX,
    "pooled_projection_dim",
    "guidance_embeds",
    approximator_num_channels=16,
    approximator_hidden_dim=32,
    approximator_layers=2,
)
QWEN: dict[str, Any] = {
    "patch_size": 2,
    "in_channels": PACKED_CHANNELS,
    "out_channels": 4,
    "num_layers": 3,
    "attention_head_dim": 16,
    "num_attention_heads": 2,
    "joint_attention_dim": CROSS,
    "axes_dims_rope": (4, 6, 6),
}


def add_packed() -> None:
    """The named transformers that take packed tokens."""
    named = partial(add, mask_shape=packed, sizes=TOKEN_SIZES, named=True, text_first=True)
    named("FluxTransformer2DModel", flux_inputs, FLUX)
    named("FluxTransformer2DModel-schnell", partial(flux_inputs, guidance=False),
          only(FLUX, guidance_embeds=False))
    named("FluxTransformer2DModel-control", partial(flux_inputs, controls=(2, 1)),
          only(FLUX, num_layers=3))
    fill = only(FLUX, in_channels=24, out_channels=PACKED_CHANNELS)
    named("FluxTransformer2DModel-fill", partial(flux_inputs, channels=24), fill)
    four = partial(flux_inputs, pooled_text=False, axes=4)
    named("Flux2Transformer2DModel", four, FLUX2)
    named("Flux2Transformer2DModel-klein", partial(four, guidance=False),
          only(FLUX2, guidance_embeds=False))
    chroma = partial(flux_inputs, pooled_text=False, guidance=False)
    named("ChromaTransformer2DModel", partial(chroma, mask="float"), CHROMA)
    named("ChromaTransformer2DModel-boolmask", partial(chroma, mask="bool"), CHROMA)
    named("ChromaTransformer2DModel-control", partial(chroma, controls=(1, 2)), CHROMA)
    named("QwenImageTransformer2DModel", qwen_inputs, QWEN)
    named("QwenImageTransformer2DModel-nomask", partial(qwen_inputs, mask=False), QWEN)
    named("QwenImageTransformer2DModel-control", partial(qwen_inputs, controls=2), QWEN)


# ---------------------------------------------------------------------------------------------
# Transformers on latents
# ---------------------------------------------------------------------------------------------


def latent_inputs(
    size: Size,
    seed: int,
    *,
    channels: int = 4,
    time_kind: str = "steps",
    text: bool = True,
    pooled_text: bool = False,
    text_mask: str = "",
    guidance: bool = False,
    controls: int = 0,
    control_key: str = "controlnet_block_samples",
    control_tokens: int = 4,
    extra: Callable[[Draw, Size], dict[str, Any]] | None = None,
) -> dict[str, Any]:
    """Inputs of a transformer that takes a latent image and text states."""
    draw = Draw(seed)
    times = {"steps": draw.steps(size.batch), "unit": draw.uniform(size.batch, low=0.01)}
    arguments: dict[str, Any] = {
        "hidden_states": draw.normal(size.batch, channels, size.height, size.width),
        "timestep": times[time_kind],
        "return_dict": False,
    }
    if text:
        arguments["encoder_hidden_states"] = draw.normal(size.batch, size.text, CROSS)
    if pooled_text:
        arguments["pooled_projections"] = draw.normal(size.batch, POOLED)
    if text_mask:
        arguments[text_mask] = draw.keep(size.batch, size.text)
    if guidance:
        arguments["guidance"] = draw.uniform(size.batch, low=1.0, high=5.0)
    if controls:
        tokens = size.height * size.width // control_tokens
        arguments[control_key] = [draw.normal(size.batch, tokens, 32) for _ in range(controls)]
    if extra is not None:
        arguments.update(extra(draw, size))
    return arguments


def pixart_sizes(draw: Draw, size: Size) -> dict[str, Any]:
    """The resolution conditions of PixArt-alpha at 1024 pixels; both are None below that."""
    return {
        "added_cond_kwargs": {
            "resolution": draw.uniform(size.batch, 2, low=64.0, high=1024.0).round(),
            "aspect_ratio": draw.uniform(size.batch, 1, low=0.5, high=2.0),
        }
    }


def no_pixart_sizes(draw: Draw, size: Size) -> dict[str, Any]:
    """What the pipeline of PixArt hands over when the model takes no resolution conditions."""
    return {"added_cond_kwargs": {"resolution": None, "aspect_ratio": None}}


HUNYUAN_TEXT, HUNYUAN_T5 = 7, 5


def hunyuan_rope(size: Size, head_dim: int = 16, patch: int = 2, base: int = 8) -> Any:
    """Rotary factors as the pipeline of Hunyuan-DiT makes them: a pair (cos, sin) of tables."""
    from diffusers.models.embeddings import get_2d_rotary_pos_embed

    rows, columns = size.height // patch, size.width // patch
    if rows > columns:
        inner = (base, round(base / rows * columns))
    else:
        inner = (round(base / columns * rows), base)
    start = tuple(round((base - side) / 2.0) for side in inner)
    stop = tuple(begin + side for begin, side in zip(start, inner, strict=True))
    return get_2d_rotary_pos_embed(head_dim, (start, stop), (rows, columns), output_type="pt")


def hunyuan_inputs(
    size: Size, seed: int, *, meta: bool = True, controls: int = 0, cond: bool = False
) -> dict[str, Any]:
    """Inputs of HunyuanDiT2DModel and of its ControlNet."""
    draw = Draw(seed)
    arguments: dict[str, Any] = {
        "hidden_states": draw.normal(size.batch, 4, size.height, size.width),
        # The embedding takes the dtype of its timestep for its own, so this has to be a float.
        "timestep": draw.steps(size.batch).float(),
        "encoder_hidden_states": draw.normal(size.batch, HUNYUAN_TEXT, CROSS),
        "text_embedding_mask": draw.keep(size.batch, HUNYUAN_TEXT).long(),
        "encoder_hidden_states_t5": draw.normal(size.batch, HUNYUAN_T5, CROSS),
        "text_embedding_mask_t5": draw.keep(size.batch, HUNYUAN_T5).long(),
        "image_rotary_emb": hunyuan_rope(size),
        "return_dict": False,
    }
    if meta:
        arguments["image_meta_size"] = draw.uniform(size.batch, 6, high=1024.0).round()
        arguments["style"] = torch.zeros(size.batch, dtype=torch.long)
    if controls:
        tokens = size.height * size.width // 4
        # The model pops from this list, so it must not be used twice.
        arguments["controlnet_block_samples"] = [
            draw.normal(size.batch, tokens, 32) for _ in range(controls)
        ]
    if cond:
        arguments["controlnet_cond"] = draw.normal(size.batch, 4, size.height, size.width)
        arguments["conditioning_scale"] = 0.75
    return arguments


HEADS: dict[str, Any] = {"num_attention_heads": 2, "attention_head_dim": 16}
SD3: dict[str, Any] = {
    **HEADS,
    "sample_size": 16,
    "in_channels": 4,
    "out_channels": 4,
    "num_layers": 3,
    "joint_attention_dim": CROSS,
    "caption_projection_dim": 32,
    "pooled_projection_dim": POOLED,
    "pos_embed_max_size": 32,
}
PIXART: dict[str, Any] = {
    **HEADS,
    "in_channels": 4,
    "out_channels": 8,
    "num_layers": 3,
    "cross_attention_dim": 32,
    "caption_channels": CROSS,
    "sample_size": 16,
    "patch_size": 2,
}
HUNYUAN: dict[str, Any] = {
    **HEADS,
    "in_channels": 4,
    "patch_size": 2,
    "sample_size": 16,
    "hidden_size": 32,
    "num_layers": 6,
    "cross_attention_dim": CROSS,
    "cross_attention_dim_t5": CROSS,
    "pooled_projection_dim": POOLED,
    "text_len": HUNYUAN_TEXT,
    "text_len_t5": HUNYUAN_T5,
}
AURA: dict[str, Any] = {
    **HEADS,
    "sample_size": 16,
    "in_channels": 4,
    "num_mmdit_layers": 2,
    "num_single_dit_layers": 2,
    "joint_attention_dim": CROSS,
    "caption_projection_dim": 32,
    "out_channels": 4,
    "pos_embed_max_size": 1024,
}
SANA: dict[str, Any] = {
    **HEADS,
    "in_channels": 4,
    "out_channels": 4,
    "num_layers": 3,
    "num_cross_attention_heads": 2,
    "cross_attention_head_dim": 16,
    "cross_attention_dim": 32,
    "caption_channels": CROSS,
    "sample_size": 16,
    "patch_size": 1,
}


def add_latent() -> None:
    """The named transformers that take a latent image."""
    named = partial(add, named=True)
    sd3 = partial(latent_inputs, pooled_text=True)
    named("SD3Transformer2DModel", sd3, SD3, text_first=False)
    named("SD3Transformer2DModel-sd35", sd3,
          only(SD3, dual_attention_layers=(0, 1), qk_norm="rms_norm"), text_first=False)
    named("SD3Transformer2DModel-control",
          partial(sd3, controls=2, control_key="block_controlnet_hidden_states"), SD3,
          text_first=False)
    sigma = partial(latent_inputs, text_mask="encoder_attention_mask")
    named("PixArtTransformer2DModel", partial(sigma, extra=no_pixart_sizes),
          only(PIXART, use_additional_conditions=False))
    named("PixArtTransformer2DModel-alpha", partial(sigma, extra=pixart_sizes),
          only(PIXART, use_additional_conditions=True, num_attention_heads=3,
               cross_attention_dim=48))  # this one needs a width that 3 divides
    named("HunyuanDiT2DModel", hunyuan_inputs, HUNYUAN, sizes=fixed_text(PATCH_SIZES))
    named("HunyuanDiT2DModel-v12", partial(hunyuan_inputs, meta=False),
          only(HUNYUAN, use_style_cond_and_image_meta_size=False), sizes=fixed_text(PATCH_SIZES))
    named("HunyuanDiT2DModel-control", partial(hunyuan_inputs, controls=2), HUNYUAN,
          sizes=fixed_text(PATCH_SIZES))
    named("AuraFlowTransformer2DModel", partial(latent_inputs, time_kind="unit"), AURA,
          text_first=True)
    sana = partial(latent_inputs, text_mask="encoder_attention_mask")
    named("SanaTransformer2DModel", sana, SANA, sizes=TOKEN_SIZES)
    named("SanaTransformer2DModel-sprint", partial(sana, guidance=True, time_kind="unit"),
          only(SANA, guidance_embeds=True, qk_norm="rms_norm_across_heads", timestep_scale=1000.0,
               interpolation_scale=None), sizes=TOKEN_SIZES)
    named("SanaTransformer2DModel-pos", sana, only(SANA, interpolation_scale=1.0),
          sizes=tuple(Size(s.batch, 16, 16, s.text) for s in TOKEN_SIZES[:1]) + TOKEN_SIZES)


# ---------------------------------------------------------------------------------------------
# Other UNets
# ---------------------------------------------------------------------------------------------


def kandinsky_inputs(size: Size, seed: int) -> dict[str, Any]:
    """Inputs of the UNet of Kandinsky 2.2, which is conditioned on image embeddings alone."""
    arguments = unet_inputs(size, seed, added={"image_embeds": (POOLED,)})
    arguments["encoder_hidden_states"] = None
    return arguments


def latent_consistency_inputs(size: Size, seed: int) -> dict[str, Any]:
    """Inputs of a UNet whose timestep embedding takes the guidance as well."""
    arguments = unet_inputs(size, seed)
    arguments["timestep_cond"] = Draw(seed + 100).normal(size.batch, 8)
    return arguments


def text_mask_inputs(size: Size, seed: int) -> dict[str, Any]:
    """Inputs of Kandinsky3UNet."""
    arguments = unet_inputs(size, seed, text_mask=True)
    arguments["encoder_attention_mask"] = arguments["encoder_attention_mask"].float()
    return arguments


def union_inputs(size: Size, seed: int, *, kinds: tuple[int, ...] = (1, 3)) -> dict[str, Any]:
    """Inputs of ControlNetUnionModel: a list of control images and of their kinds."""
    arguments = unet_inputs(size, seed, control=3, text_time=True)
    draw = Draw(seed + 100)
    shape = arguments["controlnet_cond"].shape
    arguments["controlnet_cond"] = [draw.uniform(*shape) for _ in kinds]
    flags = torch.zeros(size.batch, 6)
    flags[:, list(kinds)] = 1.0
    arguments["control_type"] = flags
    arguments["control_type_idx"] = list(kinds)
    return arguments


def cascade_inputs(size: Size, seed: int, *, decoder: bool = False) -> dict[str, Any]:
    """Inputs of StableCascadeUNet."""
    draw = Draw(seed)
    arguments: dict[str, Any] = {
        "sample": draw.normal(size.batch, 4, size.height, size.width),
        "timestep_ratio": draw.uniform(size.batch, low=0.01),
        "clip_text_pooled": draw.normal(size.batch, 1, POOLED),
        "return_dict": False,
    }
    if decoder:
        arguments["effnet"] = draw.normal(size.batch, 8, size.height // 2, size.width // 2)
    else:
        arguments["clip_text"] = draw.normal(size.batch, size.text, CROSS)
        arguments["clip_img"] = draw.normal(size.batch, 1, POOLED)
    return arguments


def uvit_inputs(size: Size, seed: int) -> dict[str, Any]:
    """Inputs of UVit2DModel: a grid of token numbers; its output is logits, not in a tuple."""
    draw = Draw(seed)
    return {
        "input_ids": draw.integers(size.batch, size.height, size.width, high=40),
        "encoder_hidden_states": draw.normal(size.batch, size.text, CROSS),
        "pooled_text_emb": draw.normal(size.batch, POOLED),
        "micro_conds": draw.uniform(size.batch, 5, high=512.0).round(),
    }


def add_other_unets() -> None:
    """UNets outside the named set, and unusual configs of the named classes."""
    other = partial(add, sizes=UNET_SIZES)
    other("UNet2DConditionModel-classes", partial(unet_inputs, classes=5),
          only(SD15, num_class_embeds=5, class_embeddings_concat=True))
    other("UNet2DConditionModel-classtime", partial(unet_inputs, classes=300),
          only(SD15, class_embed_type="timestep"))
    other("UNet2DConditionModel-classproj", partial(unet_inputs, class_width=12),
          only(SD15, class_embed_type="projection", projection_class_embeddings_input_dim=12))
    other("UNet2DConditionModel-upscaler", partial(unet_inputs, channels=7, classes=300),
          only(SD15, in_channels=7, num_class_embeds=300,
               only_cross_attention=(True, True, False)))
    other("UNet2DConditionModel-nomid", unet_inputs,
          only(SD15, mid_block_type=None, layers_per_block=1))
    other("UNet2DConditionModel-lcm", latent_consistency_inputs,
          only(SD15, time_cond_proj_dim=8))
    other("UNet2DConditionModel-scaleshift", partial(unet_inputs, time_kind="int"),
          only(SD15, resnet_time_scale_shift="scale_shift", conv_in_kernel=1, conv_out_kernel=1,
               center_input_sample=True, act_fn="mish"))
    other("UNet2DConditionModel-kolors",
          partial(unet_inputs, text_time=True, text_width=24),
          only(SDXL, encoder_hid_dim=24, encoder_hid_dim_type="text_proj"))
    simple = only(
        UNET_BASE,
        down_block_types=("ResnetDownsampleBlock2D", "SimpleCrossAttnDownBlock2D",
                          "SimpleCrossAttnDownBlock2D"),
        up_block_types=("SimpleCrossAttnUpBlock2D", "SimpleCrossAttnUpBlock2D",
                        "ResnetUpsampleBlock2D"),
        mid_block_type="UNetMidBlock2DSimpleCrossAttn",
        resnet_time_scale_shift="scale_shift",
        attention_head_dim=8,
    )
    # The blocks of these two upsample by 2 whatever the size they should reach.
    even = partial(add, sizes=EVEN_UNET_SIZES)
    even("UNet2DConditionModel-kandinsky22", kandinsky_inputs,
         only(simple, out_channels=8, addition_embed_type="image", encoder_hid_dim=POOLED,
              encoder_hid_dim_type="image_proj"))
    even("UNet2DConditionModel-deepfloyd",
         partial(unet_inputs, channels=3, text_mask=True, text_width=24),
         only(simple, in_channels=3, out_channels=6, addition_embed_type="text",
              addition_embed_type_num_heads=2, encoder_hid_dim=24, act_fn="gelu",
              encoder_hid_dim_type="text_proj", cross_attention_norm="group_norm",
              resnet_skip_time_act=True, resnet_out_scale_factor=1.5))
    dream = {
        **UNET_BASE,
        "down_block_types": ("DreamLiteCrossAttnNoSelfAttnDownBlock2D",
                             "DreamLiteCrossAttnNoSelfAttnDownBlock2D",
                             "DreamLiteCrossAttnDownBlock2D"),
        "up_block_types": ("DreamLiteCrossAttnUpBlock2D",
                           "DreamLiteCrossAttnNoSelfAttnUpBlock2D", "DreamLiteUpBlock2D"),
        "attention_head_dim": 2,
        "ff_mult": 2,
    }
    other("DreamLiteUNetModel", partial(unet_inputs, text_mask=True), dream)
    other("ControlNetModel-guess", partial(guess_inputs),
          only(SD15, "sample_size", "up_block_types",
               conditioning_embedding_out_channels=(8, 8, 16, 16)))
    union = only(SDXL, "sample_size", "up_block_types", num_control_type=6,
                 conditioning_embedding_out_channels=(8, 8, 16, 16), num_trans_channel=16,
                 num_trans_head=2, num_proj_channel=16, addition_time_embed_dim=8,
                 projection_class_embeddings_input_dim=POOLED + 6 * 8)
    other("ControlNetUnionModel", union_inputs, union)
    other("ControlNetUnionModel-single", partial(union_inputs, kinds=(2,)), union)
    xs = only(SD21, "attention_head_dim", "layers_per_block", num_attention_heads=2,
              ctrl_conditioning_embedding_out_channels=(8, 8, 16, 16),
              ctrl_block_out_channels=(8, 16, 16), ctrl_num_attention_heads=2,
              ctrl_max_norm_num_groups=4, time_embedding_mix=0.7, ctrl_learn_time_embedding=True,
              upcast_attention=False)
    even("UNetControlNetXSModel", partial(unet_inputs, control=3), xs)

    adm: dict[str, Any] = {
        "sample_size": 16,
        "block_out_channels": (16, 32, 32),
        "layers_per_block": 2,
        "norm_num_groups": 8,
        "attention_head_dim": 8,
        "down_block_types": ("ResnetDownsampleBlock2D", "AttnDownBlock2D", "AttnDownBlock2D"),
        "up_block_types": ("AttnUpBlock2D", "AttnUpBlock2D", "ResnetUpsampleBlock2D"),
        "downsample_type": "resnet",
        "upsample_type": "resnet",
        "resnet_time_scale_shift": "scale_shift",
        "num_class_embeds": 5,
        "attn_norm_num_groups": 8,
    }
    even("UNet2DModel-adm", partial(plain_unet_inputs, classes=5), adm)
    even("UNet2DModel-ncsnpp", partial(plain_unet_inputs, time_kind="sigma"),
         only(adm, "downsample_type", "upsample_type", "resnet_time_scale_shift",
              "num_class_embeds", "attn_norm_num_groups", time_embedding_type="fourier",
              block_out_channels=(32, 64, 64), layers_per_block=1,
              down_block_types=("SkipDownBlock2D", "AttnSkipDownBlock2D", "SkipDownBlock2D"),
              up_block_types=("SkipUpBlock2D", "AttnSkipUpBlock2D", "SkipUpBlock2D"),
              center_input_sample=True, mid_block_scale_factor=math.sqrt(2)))

    eights = tuple(Size(s.batch, 2 * s.height, 2 * s.width, s.text) for s in EVEN_UNET_SIZES[:4])
    add("Kandinsky3UNet", text_mask_inputs,
        {"time_embedding_dim": 32, "groups": 8, "attention_head_dim": 8, "layers_per_block": 2,
         "block_out_channels": (16, 16, 32, 32), "cross_attention_dim": 32,
         "encoder_hid_dim": CROSS}, sizes=eights)
    cascade: dict[str, Any] = {
        "in_channels": 4,
        "out_channels": 4,
        "timestep_ratio_embedding_dim": 16,
        "conditioning_dim": 32,
        "block_out_channels": (16, 32),
        "num_attention_heads": (2, 4),
        "down_num_layers_per_block": (1, 2),
        "up_num_layers_per_block": (2, 1),
        "clip_text_pooled_in_channels": POOLED,
        "clip_seq": 2,
        "dropout": (0.0, 0.0),
    }
    add("StableCascadeUNet-prior", cascade_inputs,
        only(cascade, clip_text_in_channels=CROSS, clip_image_in_channels=POOLED,
             switch_level=(False,)), sizes=EVEN_UNET_SIZES, text_first=False)
    add("StableCascadeUNet-decoder", partial(cascade_inputs, decoder=True),
        only(cascade, patch_size=2, effnet_in_channels=8, pixel_mapper_in_channels=3,
             timestep_conditioning_type=("sca",), down_blocks_repeat_mappers=(1, 2),
             up_blocks_repeat_mappers=(2, 1), self_attn=(True, False)),
        sizes=EVEN_UNET_SIZES, text_first=False)
    add("UVit2DModel", uvit_inputs,
        {"hidden_size": 32, "cond_embed_dim": POOLED, "micro_cond_encode_dim": 8,
         "micro_cond_embed_dim": 40, "encoder_hidden_size": CROSS, "vocab_size": 48,
         "codebook_size": 40, "in_channels": 16, "block_out_channels": 16, "num_res_blocks": 1,
         "downsample": True, "upsample": True, "block_num_heads": 2, "num_hidden_layers": 2,
         "num_attention_heads": 2, "intermediate_size": 64, "sample_size": 16})


def guess_inputs(size: Size, seed: int) -> dict[str, Any]:
    """Inputs of ControlNetModel in guess mode, which scales each residual on its own."""
    return {**unet_inputs(size, seed, control=3), "guess_mode": True}


# ---------------------------------------------------------------------------------------------
# Other transformers on packed tokens
# ---------------------------------------------------------------------------------------------


def fibo_inputs(size: Size, seed: int) -> dict[str, Any]:
    """Inputs of BriaFiboTransformer2DModel: one set of text states for each block."""
    arguments = flux_inputs(size, seed, pooled_text=False, guidance=False)
    draw = Draw(seed + 100)
    layers = [draw.normal(size.batch, size.text, 24) for _ in range(4)]
    return {**arguments, "text_encoder_layers": layers}


def flux_control_inputs(size: Size, seed: int, *, modes: int = 0) -> dict[str, Any]:
    """Inputs of FluxControlNetModel: the control image is packed like the latent."""
    arguments = flux_inputs(size, seed)
    draw = Draw(seed + 100)
    arguments["controlnet_cond"] = draw.normal(*arguments["hidden_states"].shape)
    arguments["conditioning_scale"] = 0.75
    if modes:
        arguments["controlnet_mode"] = draw.integers(size.batch, 1, high=modes)
    return arguments


def qwen_control_inputs(size: Size, seed: int) -> dict[str, Any]:
    """Inputs of QwenImageControlNetModel."""
    arguments = qwen_inputs(size, seed)
    draw = Draw(seed + 100)
    arguments["controlnet_cond"] = draw.normal(*arguments["hidden_states"].shape)
    arguments["conditioning_scale"] = 0.75
    return arguments


def nucleus_inputs(size: Size, seed: int) -> dict[str, Any]:
    """Inputs of NucleusMoEImageTransformer2DModel."""
    arguments = qwen_inputs(size, seed)
    arguments["img_shapes"] = [shapes[0] for shapes in arguments["img_shapes"]]
    return arguments


def krea_inputs(size: Size, seed: int) -> dict[str, Any]:
    """Inputs of Krea2Transformer2DModel: text states of several layers, one table of positions."""
    draw = Draw(seed)
    tokens = size.height * size.width
    return {
        "hidden_states": draw.normal(size.batch, tokens, PACKED_CHANNELS),
        "encoder_hidden_states": draw.normal(size.batch, size.text, 3, CROSS),
        "timestep": draw.uniform(size.batch, low=0.01),
        "position_ids": torch.cat([torch.zeros(size.text, 3), grid_ids(size)]),
        "encoder_attention_mask": draw.keep(size.batch, size.text),
        "return_dict": False,
    }


def ideogram_inputs(size: Size, seed: int) -> dict[str, Any]:
    """Inputs of Ideogram4Transformer2DModel for its unconditional pass: image tokens alone."""
    from diffusers.models.transformers import transformer_ideogram4

    draw = Draw(seed)
    tokens = size.height * size.width
    indicator = int(transformer_ideogram4.OUTPUT_IMAGE_INDICATOR)
    return {
        "hidden_states": draw.normal(size.batch, tokens, PACKED_CHANNELS),
        "timestep": draw.uniform(size.batch, low=0.01),
        "encoder_hidden_states": torch.zeros(size.batch, tokens, CROSS),
        "position_ids": grid_ids(size).long().expand(size.batch, -1, -1),
        "segment_ids": torch.ones(size.batch, tokens, dtype=torch.long),
        "indicator": torch.full((size.batch, tokens), indicator),
        "return_dict": False,
    }


def flux3_inputs(
    size: Size, seed: int, *, reference: Size | None = None, jumps: bool = False
) -> dict[str, Any]:
    """Inputs of Flux 3 with a reference picture, as large as the picture unless given.

    Each picture attends to itself before the two meet.
    """
    draw, other = Draw(seed + 1), reference or size
    tokens = other.height * other.width
    arguments = flux_inputs(size, seed, pooled_text=False, guidance=False, axes=4)
    arguments["image_cond_hidden_states"] = draw.normal(size.batch, tokens, PACKED_CHANNELS)
    arguments["image_cond_ids"] = grid_ids(other, 4, first=1)
    if jumps:
        arguments["target_timestep"] = draw.uniform(size.batch, high=0.01)
    return arguments


def add_other_packed() -> None:
    """Transformers outside the named set that take packed tokens."""
    other = partial(add, mask_shape=packed, sizes=TOKEN_SIZES, text_first=True)
    bare = partial(flux_inputs, pooled_text=False, guidance=False)
    no_pool = only(FLUX, "pooled_projection_dim", "guidance_embeds")
    other("BriaTransformer2DModel", bare, no_pool)
    other("BriaFiboTransformer2DModel", fibo_inputs, only(no_pool, text_encoder_dim=24))
    other("LongCatImageTransformer2DModel", bare, no_pool)
    other("OvisImageTransformer2DModel", bare, only(no_pool, out_channels=PACKED_CHANNELS))
    flux3 = only(no_pool, cond_in_channels=PACKED_CHANNELS, timestep_channels=16, num_layers=1,
                 axes_dims_rope=(4, 4, 4, 4))
    other("Flux3Transformer2DModel", partial(bare, axes=4), flux3)
    other("Flux3Transformer2DModel-referenced", flux3_inputs, flux3)
    other("Flux3Transformer2DModel-distilled",
          partial(flux3_inputs, reference=Size(1, 5, 3), jumps=True), only(flux3, flow_map=True))
    other("Flux3Transformer2DModel-jumping", partial(flux3_inputs, jumps=True),
          only(flux3, flow_map=True))
    other("FluxControlNetModel", flux_control_inputs, FLUX)
    other("FluxControlNetModel-union", partial(flux_control_inputs, modes=4),
          only(FLUX, num_mode=4))
    other("QwenImageControlNetModel", qwen_control_inputs, only(QWEN, num_layers=2))
    nucleus = only(QWEN, num_key_value_heads=1, num_layers=3, moe_enabled=False)
    other("NucleusMoEImageTransformer2DModel-dense", nucleus_inputs, nucleus, text_first=False)
    other("NucleusMoEImageTransformer2DModel", nucleus_inputs,
          only(nucleus, num_layers=5, moe_enabled=True, num_experts=4, moe_intermediate_dim=32,
               capacity_factors=2.0), text_first=False)
    other("NucleusMoEImageTransformer2DModel-grouped", nucleus_inputs,
          only(nucleus, moe_enabled=True, num_experts=6, moe_intermediate_dim=16, use_sigmoid=True,
               use_grouped_mm=True, capacity_factors=[2.0, 1.5, 3.0],
               dense_moe_strategy="leave_first_block_dense"), text_first=False)
    other("Krea2Transformer2DModel", krea_inputs,
          {"in_channels": PACKED_CHANNELS, "num_layers": 2, "attention_head_dim": 16,
           "num_attention_heads": 2, "num_key_value_heads": 1, "intermediate_size": 64,
           "timestep_embed_dim": 16, "text_hidden_dim": CROSS, "num_text_layers": 3,
           "text_num_attention_heads": 2, "text_num_key_value_heads": 2,
           "text_intermediate_size": 64, "num_layerwise_text_blocks": 1,
           "num_refiner_text_blocks": 1, "axes_dims_rope": (4, 6, 6)})
    other("Ideogram4Transformer2DModel-uncond", ideogram_inputs,
          {"in_channels": PACKED_CHANNELS, "num_layers": 2, "attention_head_dim": 16,
           "num_attention_heads": 2, "intermediate_size": 64, "adaln_dim": 16,
           "llm_features_dim": CROSS, "mrope_section": (4, 2, 2)}, text_first=None)


# ---------------------------------------------------------------------------------------------
# Other transformers on latents
# ---------------------------------------------------------------------------------------------


def classes(draw: Draw, size: Size) -> dict[str, Any]:
    """Class labels."""
    return {"class_labels": draw.integers(size.batch, high=5)}


def image_sizes(draw: Draw, size: Size) -> dict[str, Any]:
    """The size conditions of CogView."""
    names = ("original_size", "target_size", "crop_coords")
    return {name: draw.uniform(size.batch, 2, high=512.0).round() for name in names}


def glm_extra(draw: Draw, size: Size) -> dict[str, Any]:
    """The conditions of GLM-Image: a token number for each patch, none of them dropped."""
    shape = (size.batch, size.height * size.width // 4)
    return {
        "prior_token_id": draw.integers(*shape, high=20),
        "prior_token_drop": torch.zeros(shape, dtype=torch.bool),
        "target_size": draw.uniform(size.batch, 2, low=64.0, high=512.0).round(),
        "crop_coords": torch.zeros(size.batch, 2),
    }


LUMINA2: dict[str, Any] = {
    "sample_size": 16, "in_channels": 4, "hidden_size": 32, "num_layers": 2,
    "num_refiner_layers": 1, "num_attention_heads": 2, "num_kv_heads": 1, "multiple_of": 16,
    "axes_dim_rope": (4, 6, 6), "axes_lens": (128, 32, 32), "cap_feat_dim": CROSS,
}
Z_IMAGE: dict[str, Any] = {
    "in_channels": 4, "dim": 32, "n_layers": 2, "n_refiner_layers": 1, "n_heads": 2,
    "n_kv_heads": 2, "cap_feat_dim": CROSS, "axes_dims": [4, 6, 6], "axes_lens": [128, 32, 32],
}


def lumina_inputs(size: Size, seed: int) -> dict[str, Any]:
    """Inputs of LuminaNextDiT2DModel: a table of complex rotary factors, larger than the image."""
    from diffusers.models.embeddings import get_2d_rotary_pos_embed_lumina

    arguments = latent_inputs(size, seed, time_kind="unit", text_mask="encoder_mask")
    arguments["encoder_mask"] = arguments["encoder_mask"].long()
    sides = max(24, size.height // 2), max(24, size.width // 2)
    arguments["image_rotary_emb"] = get_2d_rotary_pos_embed_lumina(16, *sides)
    arguments["cross_attention_kwargs"] = {}  # None is the default, but its blocks unpack it
    return arguments


def omnigen_inputs(size: Size, seed: int, *, picture: bool = False) -> dict[str, Any]:
    """Inputs of OmniGenTransformer2DModel: text causal, image tokens see everything."""
    draw = Draw(seed)
    text = size.text + 5 if picture else size.text
    image = size.height * size.width // 4
    length = text + 1 + image  # the middle one is the token of the timestep
    mask = torch.tril(torch.ones(length, length))
    mask[text + 1 :] = 1.0
    latents: list[Tensor] = []
    places: dict[int, list[list[int]]] = {}
    if picture:  # each sample has a 4x4 latent among its text
        mask[2:6, 2:6] = 1.0
        latents = [draw.normal(1, 4, 4, 4) for _ in range(size.batch)]
        places = {sample: [[2, 6]] for sample in range(size.batch)}
    return {
        "hidden_states": draw.normal(size.batch, 4, size.height, size.width),
        "timestep": draw.uniform(size.batch, low=0.01),
        "input_ids": draw.integers(size.batch, text, low=1, high=50),
        "input_img_latents": latents,
        "input_image_sizes": places,
        "attention_mask": mask.expand(size.batch, -1, -1),
        "position_ids": torch.arange(length).expand(size.batch, -1),
        "return_dict": False,
    }


def hidream_inputs(size: Size, seed: int) -> dict[str, Any]:
    """Inputs of HiDreamImageTransformer2DModel: text states of every layer, and another text."""
    draw = Draw(seed)
    return {
        "hidden_states": draw.normal(size.batch, 4, size.height, size.width),
        "timesteps": draw.steps(size.batch),
        "encoder_hidden_states_t5": draw.normal(size.batch, size.text, CROSS),
        "encoder_hidden_states_llama3": draw.normal(4, size.batch, size.text, CROSS),
        "pooled_embeds": draw.normal(size.batch, POOLED),
        "return_dict": False,
    }


def whole_texts(
    inputs: Callable[[Size, int], dict[str, Any]], size: Size, seed: int
) -> dict[str, Any]:
    """Inputs with a text mask that keeps every token."""
    arguments = inputs(size, seed)
    return {n: torch.ones_like(v) if "mask" in n else v for n, v in arguments.items()}


def z_image_inputs(size: Size, seed: int, *, step: int = 1) -> dict[str, Any]:
    """Inputs of ZImageTransformer2DModel: lists with an item for each sample.

    The texts differ in length by `step` tokens.
    """
    draw = Draw(seed)
    return {
        "x": [draw.normal(4, 1, size.height, size.width) for _ in range(size.batch)],
        "t": draw.uniform(size.batch, low=0.01),
        "cap_feats": [draw.normal(size.text + i * step, CROSS) for i in range(size.batch)],
        "return_dict": False,
    }


def fibo2_inputs(size: Size, seed: int, *, context: bool = False) -> dict[str, Any]:
    """Inputs of BriaFibo2Transformer2DModel: text states for the perceiver and one injection."""
    draw = Draw(seed)
    arguments: dict[str, Any] = {
        "hidden_states": draw.normal(size.batch, 4, size.height, size.width),
        "timestep": draw.uniform(size.batch, low=0.01),
        "encoder_hidden_states": draw.normal(size.batch, 2, size.text, CROSS),
        "return_dict": False,
    }
    if context:
        arguments["context_latents"] = [draw.normal(size.batch, 4, 4, 8)]
    return arguments


def kandinsky5_inputs(size: Size, seed: int) -> dict[str, Any]:
    """Inputs of Kandinsky5Transformer3DModel: channels last, one frame; output not in a tuple."""
    draw = Draw(seed)
    return {
        "hidden_states": draw.normal(size.batch, 1, size.height, size.width, 4),
        "encoder_hidden_states": draw.normal(size.batch, size.text, CROSS),
        "timestep": draw.steps(size.batch).float(),
        "pooled_projections": draw.normal(size.batch, POOLED),
        "visual_rope_pos": [
            torch.arange(1),
            torch.arange(size.height // 2),
            torch.arange(size.width // 2),
        ],
        "text_rope_pos": torch.arange(size.text),
        "return_dict": False,
    }


def ernie_inputs(size: Size, seed: int) -> dict[str, Any]:
    """Inputs of ErnieImageTransformer2DModel."""
    arguments = latent_inputs(size, seed, text=False)
    draw = Draw(seed + 100)
    arguments["text_bth"] = draw.normal(size.batch, size.text, CROSS)
    arguments["text_lens"] = draw.keep(size.batch, size.text).sum(1)
    return arguments


def hunyuan_image_inputs(size: Size, seed: int, *, second: bool = False) -> dict[str, Any]:
    """Inputs of HunyuanImageTransformer2DModel, with one text or two."""
    arguments = latent_inputs(size, seed, text_mask="encoder_attention_mask", guidance=second)
    arguments["timestep"] = arguments["timestep"].float()
    if second:
        draw = Draw(seed + 100)
        arguments["encoder_hidden_states_2"] = draw.normal(size.batch, 4, 12)
        arguments["encoder_attention_mask_2"] = draw.keep(size.batch, 4)
        arguments["guidance"] = arguments["guidance"] * 1000.0
        arguments["timestep_r"] = draw.steps(size.batch).float()
    return arguments


def one_frame(size: Size, seed: int, **options: Any) -> dict[str, Any]:
    """Inputs of a video model with a single frame."""
    arguments = latent_inputs(size, seed, **options)
    arguments["hidden_states"] = arguments["hidden_states"].unsqueeze(2)
    return arguments


def conditioned(size: Size, seed: int, **options: Any) -> dict[str, Any]:
    """Inputs of a ControlNet whose control image is a latent like the sample."""
    arguments = latent_inputs(size, seed, **options)
    shape = arguments["hidden_states"].shape
    arguments["controlnet_cond"] = Draw(seed + 100).normal(*shape)
    arguments["conditioning_scale"] = 0.75
    return arguments


def add_other_latent() -> None:
    """Transformers outside the named set that take a latent image."""
    # DiT takes its output to be square.
    square = tuple(Size(b, n, n, 7) for b, n in ((1, 8), (2, 8), (1, 12), (1, 16)))
    add("DiTTransformer2DModel", partial(latent_inputs, text=False, extra=classes),
        {**HEADS, "in_channels": 4, "out_channels": 8, "num_layers": 2, "sample_size": 16,
         "num_embeds_ada_norm": 5, "norm_num_groups": 8}, sizes=square)
    block: dict[str, Any] = {**HEADS, "in_channels": 16, "num_layers": 2, "norm_num_groups": 8,
                             "cross_attention_dim": CROSS}
    untimed = partial(without, "timestep", partial(latent_inputs, channels=16))
    add("Transformer2DModel", untimed, block, sizes=TOKEN_SIZES)
    add("Transformer2DModel-linear", untimed, only(block, use_linear_projection=True,
                                                   double_self_attention=True,
                                                   attention_bias=True), sizes=TOKEN_SIZES)
    add("LuminaNextDiT2DModel", lumina_inputs,
        {"sample_size": 16, "patch_size": 2, "in_channels": 4, "hidden_size": 32,
         "num_layers": 2, "num_attention_heads": 2, "num_kv_heads": 1, "multiple_of": 16,
         "cross_attention_dim": CROSS})
    several = (*PATCH_SIZES, Size(3, 8, 8, 5))
    ragged = partial(latent_inputs, time_kind="unit", text_mask="encoder_attention_mask")
    add("Lumina2Transformer2DModel", ragged, LUMINA2, sizes=several, named=True, text_first=True)
    add("Lumina2Transformer2DModel-whole", partial(whole_texts, ragged), LUMINA2, sizes=several,
        text_first=True)
    cogview: dict[str, Any] = {
        **HEADS, "in_channels": 4, "out_channels": 4, "num_layers": 2, "text_embed_dim": CROSS,
        "time_embed_dim": 16, "condition_dim": 8, "pos_embed_max_size": 32, "sample_size": 16,
    }
    add("CogView3PlusTransformer2DModel", partial(latent_inputs, extra=image_sizes), cogview,
        text_first=True)
    add("CogView4Transformer2DModel", partial(latent_inputs, extra=image_sizes),
        only(cogview, rope_axes_dim=(16, 16)), text_first=True)
    add("GlmImageTransformer2DModel", partial(latent_inputs, extra=glm_extra),
        only(cogview, "pos_embed_max_size", "sample_size",
             prior_vq_quantizer_codebook_size=20), text_first=True)
    omnigen: dict[str, Any] = {
        "in_channels": 4, "hidden_size": 32, "num_attention_heads": 2, "num_key_value_heads": 1,
        "intermediate_size": 48, "num_layers": 2, "pad_token_id": 0, "vocab_size": 50,
        "rope_scaling": {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8},
        "pos_embed_max_size": 32, "time_step_dim": 16,
    }
    add("OmniGenTransformer2DModel", omnigen_inputs, omnigen, text_first=True)
    add("OmniGenTransformer2DModel-picture", partial(omnigen_inputs, picture=True), omnigen,
        text_first=True)
    add("HiDreamImageTransformer2DModel", hidream_inputs,
        {**HEADS, "patch_size": 2, "in_channels": 4, "out_channels": 4, "num_layers": 2,
         "num_single_layers": 2, "caption_channels": [CROSS, CROSS], "text_emb_dim": POOLED,
         "num_routed_experts": 4, "num_activated_experts": 2, "axes_dims_rope": (8, 4, 4),
         "max_resolution": (16, 16), "llama_layers": [0, 1, 2, 3],
         "force_inference_output": True}, text_first=False)
    add("HiDreamImageTransformer2DModel-experts", hidream_inputs,
         {**HEADS, "patch_size": 2, "in_channels": 4, "out_channels": 4, "num_layers": 1,
          "num_single_layers": 1, "caption_channels": [CROSS, CROSS], "text_emb_dim": POOLED,
          "num_routed_experts": 6, "num_activated_experts": 3, "axes_dims_rope": (8, 4, 4),
          "max_resolution": (16, 16), "llama_layers": [0, 3]}, text_first=False)
    add("ZImageTransformer2DModel", z_image_inputs, Z_IMAGE, sizes=several, text_first=False)
    add("ZImageTransformer2DModel-equal", partial(z_image_inputs, step=0), Z_IMAGE, sizes=several,
        text_first=False)
    fibo2: dict[str, Any] = {
        "in_channels": 4, "dim": 32, "n_layers": 3, "n_refiner_layers": 1, "n_heads": 2,
        "cap_feat_dim": CROSS, "injection_layer_ids": (1,), "perceiver_num_layers": 1,
        "min_num_gist_tokens": 4, "max_num_gist_tokens": 8, "gist_step": 2,
        "gist_min_text_len": 2, "gist_max_text_len": 16, "axes_dims": (4, 6, 6),
        "axes_lens": (64, 32, 32),
    }
    add("BriaFibo2Transformer2DModel", fibo2_inputs, fibo2, text_first=True)
    add("BriaFibo2Transformer2DModel-context", partial(fibo2_inputs, context=True), fibo2,
        text_first=True)
    add("Kandinsky5Transformer3DModel", kandinsky5_inputs,
        {"in_text_dim": CROSS, "in_text_dim2": POOLED, "time_dim": 16, "model_dim": 32,
         "ff_dim": 64, "num_text_blocks": 1, "num_visual_blocks": 2, "axes_dims": (4, 6, 6)})
    add("PRXTransformer2DModel",
        partial(latent_inputs, time_kind="unit", text_mask="attention_mask"),
        {"in_channels": 4, "context_in_dim": CROSS, "hidden_size": 32, "mlp_ratio": 2.0,
         "num_heads": 2, "depth": 2, "axes_dim": [8, 8]}, text_first=True)
    hunyuan: dict[str, Any] = {
        **HEADS, "in_channels": 4, "out_channels": 4, "num_layers": 2, "num_single_layers": 2,
        "num_refiner_layers": 1, "mlp_ratio": 2.0, "text_embed_dim": CROSS,
        "rope_axes_dim": (8, 8),
    }
    add("HunyuanImageTransformer2DModel", hunyuan_image_inputs, hunyuan, sizes=TOKEN_SIZES,
        text_first=False)
    add("HunyuanImageTransformer2DModel-refiner", partial(hunyuan_image_inputs, second=True),
        only(hunyuan, patch_size=(2, 2), text_embed_2_dim=12, guidance_embeds=True,
             use_meanflow=True), text_first=False)
    add("ErnieImageTransformer2DModel", ernie_inputs,
        {"hidden_size": 32, "num_attention_heads": 2, "num_layers": 2, "ffn_hidden_size": 64,
         "in_channels": 4, "out_channels": 4, "text_in_dim": CROSS, "rope_axes_dim": (4, 6, 6)},
        sizes=TOKEN_SIZES, text_first=False)
    add("JoyImageEditTransformer3DModel", one_frame,
        {"patch_size": [1, 2, 2], "in_channels": 4, "hidden_size": 32, "num_attention_heads": 2,
         "text_dim": CROSS, "mlp_width_ratio": 2.0, "num_layers": 2, "rope_dim_list": [4, 6, 6]},
        text_first=False)
    wan: dict[str, Any] = {**HEADS, "in_channels": 4, "out_channels": 4, "text_dim": CROSS,
                           "freq_dim": 16, "ffn_dim": 64, "num_layers": 2,
                           "rope_max_seq_len": 32}
    add("WanTransformer3DModel-image", one_frame, wan)
    add("CosmosTransformer3DModel-image", one_frame,
        {**HEADS, "in_channels": 4, "out_channels": 4, "num_layers": 2, "mlp_ratio": 2.0,
         "text_embed_dim": CROSS, "adaln_lora_dim": 8, "max_size": (4, 64, 64),
         "concat_padding_mask": False,  # resizing that mask takes torchvision
         "extra_pos_embed_type": "learnable"})
    add("HunyuanVideoTransformer3DModel-image",
        partial(one_frame, text_mask="encoder_attention_mask", pooled_text=True, guidance=True),
        only(hunyuan, pooled_projection_dim=POOLED, rope_axes_dim=(4, 6, 6)), text_first=False)

    add("SD3ControlNetModel", partial(conditioned, pooled_text=True),
        only(SD3, num_layers=2), text_first=False)
    add("HunyuanDiT2DControlNetModel", partial(hunyuan_inputs, cond=True),
        only(HUNYUAN, "num_layers", transformer_num_layers=6), sizes=fixed_text(PATCH_SIZES))
    add("SanaControlNetModel", partial(conditioned, text_mask="encoder_attention_mask"),
        only(SANA, num_layers=2), sizes=TOKEN_SIZES)


def without(
    key: str, inputs: Callable[[Size, int], dict[str, Any]], size: Size, seed: int
) -> dict[str, Any]:
    """Inputs less one."""
    arguments = inputs(size, seed)
    del arguments[key]
    return arguments


add_unets()
add_packed()
add_latent()
add_other_unets()
add_other_packed()
add_other_latent()


# ---------------------------------------------------------------------------------------------
# Self-check
# ---------------------------------------------------------------------------------------------


def marked(names: Iterable[str]) -> list[Any]:
    """Names of cases as parameters of a long test: those that aren't quick are marked slow."""
    slow = pytest.mark.slow
    return [n if n.startswith(QUICK) else pytest.param(n, marks=slow) for n in names]


def tensors(value: object) -> Iterator[Tensor]:
    """Every tensor in an input or output, in order."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from tensors(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from tensors(item)


def idle_inputs(case: Case, model: nn.Module, size: Size, usual: list[Tensor]) -> set[str]:
    """The inputs that can be swapped for those of another seed without a change in the output."""
    idle = set()
    for key, value in case.inputs(size, 0).items():
        swapped = case.inputs(size, 1)[key]
        pairs = zip(tensors(value), tensors(swapped), strict=True)
        if all(torch.equal(one, two) for one, two in pairs):
            continue  # no tensor, or the same for both seeds
        with torch.no_grad():
            output = tensors(model(**{**case.inputs(size, 0), key: swapped}))
        if all(torch.equal(one, two) for one, two in zip(usual, output, strict=True)):
            idle.add(key)
    return idle


def check(case: Case, sizes: int = 2) -> str:
    """Build a case, run it at some sizes, and describe its output; raise if it looks idle."""
    started = time.perf_counter()
    model = case.build()
    twin = case.build().state_dict()
    if any(not torch.equal(value, twin[key]) for key, value in model.state_dict().items()):
        raise ValueError("two builds differ")
    shapes: list[str] = []
    idle: set[str] = set()
    for index in range(len(case.sizes)) if sizes < 0 else range(sizes):
        size = case.sizes[index]
        with torch.no_grad():
            first = list(tensors(model(**case.inputs(size, 0))))
            again = list(tensors(model(**case.inputs(size, 0))))
            other = list(tensors(model(**case.inputs(size, 1))))
        if not first or len(case.mask_shape(size)) not in (1, 2):
            raise ValueError("no output, or a mask of the wrong rank")
        for one, same, two in zip(first, again, other, strict=True):
            if not math.isfinite(float(one.abs().sum())):
                raise ValueError(f"not finite at {size}")
            if not bool(one.any()) or torch.equal(one, two):
                raise ValueError(f"zero, or does not depend on the inputs, at {size}")
            if not torch.equal(one, same):
                raise ValueError(f"two equal calls differ at {size}")
        idle |= idle_inputs(case, model, size, first)
        spread = max(float(one.std()) for one in first)
        ends = first if len(first) == 1 else [first[0], first[-1]]
        shapes.append(" ".join(str(tuple(one.shape)) for one in ends) + f" std {spread:.2g}")
    count = sum(parameter.numel() for parameter in model.parameters())
    took = time.perf_counter() - started
    note = f"  idle: {sorted(idle)}" if idle else ""
    return f"{count / 1e3:8.0f}k {took:5.1f}s  {'; '.join(shapes)}{note}"


def main(arguments: list[str]) -> int:
    """Check the cases whose name contains an argument (all without one; --all: every size)."""
    sizes = -1 if "--all" in arguments else 2
    wanted = [argument for argument in arguments if not argument.startswith("--")]
    failed = 0
    for name, case in ZOO.items():
        if wanted and not any(part in name for part in wanted):
            continue
        try:
            kind = "named" if case.named else "other"
            print(f"{kind} {name:44s} {check(case, sizes)}", flush=True)
        except Exception as error:  # a report of every case, not only up to the first bad one
            failed += 1
            print(f"FAIL  {name:44s} {type(error).__name__}: {error}", flush=True)
    print(f"{len(ZOO)} cases, {failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

# their cases belong to the zoo, and they read this file
import tests.factories.more_denoisers  # noqa: E402
import tests.factories.videos  # noqa: E402, F401
