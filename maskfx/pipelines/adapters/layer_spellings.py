"""How files of adapters spell the layers of a pipeline's components.

diffusers' own names, with or without the component; with underscores, as kohya's and LyCORIS's
tools write them; and the names of Stable Diffusion's first code, which ComfyUI and Fooocus keep.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping

MAIN = ("unet", "transformer")  # components that files needn't name
PREFIXES = ("", "diffusion_model.", "model.diffusion_model.")  # of the denoiser
FLAT = {  # beginnings of names with underscores
    "unet": ("lora_unet_", "lycoris_"),
    "transformer": ("lora_transformer_", "lora_unet_", "lycoris_"),
    "text_encoder": ("lora_te_", "lora_te1_"),
    "text_encoder_2": ("lora_te2_",),
    "text_encoder_3": ("lora_te3_",),
}
INNER = "text_model."  # in names of text encoders, by the release of transformers

TOP = {
    "conv_in": "input_blocks.0.0",
    "time_embedding.linear_1": "time_embed.0",
    "time_embedding.linear_2": "time_embed.2",
    "add_embedding.linear_1": "label_emb.0.0",
    "add_embedding.linear_2": "label_emb.0.2",
    "conv_norm_out": "out.0",
    "conv_out": "out.2",
}
RESNET = {
    "norm1": "in_layers.0",
    "conv1": "in_layers.2",
    "time_emb_proj": "emb_layers.1",
    "norm2": "out_layers.0",
    "conv2": "out_layers.3",
    "conv_shortcut": "skip_connection",
}


def main_part(parts: Collection[str]) -> str | None:
    """Return the component of the denoiser that files needn't name."""
    return next((name for name in MAIN if name in parts), None)


def spellings(parts: Mapping[str, Collection[str]]) -> dict[str, tuple[str, str]]:
    """Return part and layer by each spelling of a layer; a spelling of several layers is none's.

    Args:
        parts: The names of the layers of each component.
    """
    main, found = main_part(parts), dict[str, tuple[str, str]]()
    several = set[str]()
    for part, layers in parts.items():
        first = ldm_names(layers) if part == "unet" else {}
        for layer in layers:
            for name in names_of(part, layer, first.get(layer), part == main):
                if found.setdefault(name, (part, layer)) != (part, layer):
                    several.add(name)
    return {name: place for name, place in found.items() if name not in several}


def names_of(part: str, layer: str, first: str | None, main: bool) -> Iterator[str]:
    """Yield the spellings of one layer."""
    names = [layer] if first is None else [layer, first]
    names += [layer.removeprefix(INNER), INNER + layer] if part.startswith("text_") else []
    for name in dict.fromkeys(names):
        yield f"{part}.{name}"
        if main:
            yield from (prefix + name for prefix in PREFIXES)
        yield from (prefix + name.replace(".", "_") for prefix in FLAT.get(part, ()))


def ldm_names(layers: Collection[str]) -> dict[str, str]:
    """Return the first code's name of each layer of a UNet, as far as it has one."""
    blocks = block_names(set(layers))
    found = {}
    for layer in layers:
        if layer in TOP:
            found[layer] = TOP[layer]
        for block, first in blocks.items():
            if layer != block and not layer.startswith(f"{block}."):
                continue
            rest = layer.removeprefix(block).removeprefix(".")
            inner = RESNET.get(rest) if ".resnets." in f".{block}." else rest
            if inner is not None:
                found[layer] = f"{first}.{inner}" if inner else first
    return found


def block_names(layers: Collection[str]) -> dict[str, str]:
    """Return the first code's names of residual blocks, attentions and resamplings."""
    places = {layer.rsplit(".", depth)[0] for layer in layers for depth in range(layer.count("."))}
    places |= set(layers)
    found = {"mid_block.resnets.0": "middle_block.0", "mid_block.attentions.0": "middle_block.1"}
    found["mid_block.resnets.1"] = "middle_block.2"
    number = 0
    for i in range(count(places, "down_blocks.{}")):
        block = f"down_blocks.{i}"
        for j in range(count(places, f"{block}.resnets.{{}}")):
            number += 1
            found[f"{block}.resnets.{j}"] = f"input_blocks.{number}.0"
            found[f"{block}.attentions.{j}"] = f"input_blocks.{number}.1"
        if f"{block}.downsamplers.0.conv" in places:
            number += 1
            found[f"{block}.downsamplers.0.conv"] = f"input_blocks.{number}.0.op"
    number = 0
    for i in range(count(places, "up_blocks.{}")):
        block = f"up_blocks.{i}"
        for j in range(count(places, f"{block}.resnets.{{}}")):
            found[f"{block}.resnets.{j}"] = f"output_blocks.{number}.0"
            found[f"{block}.attentions.{j}"] = f"output_blocks.{number}.1"
            last = 2 if f"{block}.attentions.{j}" in places else 1
            found[f"{block}.upsamplers.0.conv"] = f"output_blocks.{number}.{last}.conv"
            number += 1
    return found


def count(places: Collection[str], pattern: str) -> int:
    """Return how many blocks there are, numbered from 0."""
    number = 0
    while pattern.format(number) in places:
        number += 1
    return number
