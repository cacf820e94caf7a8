"""IP-Adapters whose scale belongs to a call: each is an `Adapter` that calls name in `lora=`.

diffusers keeps the scale of an IP-Adapter in the denoiser, where all calls share it. It is a factor
of what attention adds for the reference picture, and so of the values that attention reads. Here
the layers of these values get zeros, and an adapter adds their weights back.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

from maskfx.errors import InputError
from maskfx.pipelines.adapters.lora import module_of
from maskfx.pipelines.digests import digest
from maskfx.pipelines.parts.pipeline import Pipeline
from maskfx.pipelines.parts.stand_in import find_denoisers
from maskfx.runtime.lora.adapter import Adapter, Difference, Layers

VALUES = "to_v_ip"  # layers, or lists of one per IP-Adapter, in diffusers' attention processors


def ip_adapters(pipe: Pipeline, names: Sequence[str] = ()) -> list[Adapter]:
    """Take the IP-Adapters of a pipeline out of its calls, and return one adapter for each.

    A call that names none has the picture of the pipeline without IP-Adapters. It needs a reference
    picture all the same, such as a black one, because the pipeline's code asks for it.

        pipe.load_ip_adapter(...)
        [face] = maskfx.ip_adapters(pipe)
        pipe = maskfx.compile(pipe)
        lora = [maskfx.Lora(face, 0.6, recorded=False)]  # one template for all of its scales
        pipe(prompt, image=photo, mask_image=mask, ip_adapter_image=[portrait], lora=lora)

    Call it once, before requests run: it writes into the denoiser's weights.

    Args:
        pipe: A pipeline with IP-Adapters.
        names: Their names, in the order in which they were loaded; by default ip-adapter-1, -2, …
    """
    layers: list[dict[str, dict[str, nn.Linear]]] = []
    for part, denoiser in find_denoisers(pipe.components).items():
        for path, place, layer in value_layers(module_of(denoiser)):
            layers += [{} for _ in range(place + 1 - len(layers))]
            layers[place].setdefault(part, {})[path] = layer
    if not layers:
        raise InputError(
            f"ip_adapters: {type(pipe).__name__} has none; call its load_ip_adapter first"
        )
    names = names or [f"ip-adapter-{place + 1}" for place in range(len(layers))]
    if len(names) != len(layers):
        raise InputError(
            f"ip_adapters: {type(pipe).__name__} has {len(layers)}, and names has {len(names)}; "
            "give one name for each"
        )
    scalable: Any = pipe
    # SD3's pipelines, which have one, take a number
    scalable.set_ip_adapter_scale([1.0] * len(layers) if takes_several(pipe) else 1.0)
    return [taken_out(name, own) for name, own in zip(names, layers, strict=True)]


def value_layers(module: object) -> Iterator[tuple[str, int, nn.Linear]]:
    """Yield the path, the IP-Adapter's number and the layer of each projection to values."""
    if not isinstance(module, nn.Module):
        return
    for path, layer in module.named_modules():
        owner, _, name = path.rpartition(".")
        if not isinstance(layer, nn.Linear):
            continue
        if name == VALUES:
            yield path, 0, layer
        elif name.isdecimal() and owner.rpartition(".")[2] == VALUES:
            yield path, int(name), layer


def count_of(pipe: Pipeline) -> int:
    """Return the number of a pipeline's IP-Adapters."""
    parts = map(module_of, find_denoisers(pipe.components).values())
    return len({place for part in parts for _, place, _ in value_layers(part)})


def taken_out(name: str, parts: dict[str, dict[str, nn.Linear]]) -> Adapter:
    """Move the weights of layers into an adapter, and leave zeros."""
    found: dict[str, Layers] = {}
    with torch.no_grad():
        for part, layers in parts.items():
            own: dict[str, Difference] = {}
            for path, layer in layers.items():
                bias = None if layer.bias is None else layer.bias.detach().clone()
                own[path] = Difference(layer.weight.detach().clone(), bias)
                for parameter in layer.parameters():
                    parameter.zero_()
            found[part] = own
    content = [
        [part, path, [change.weight, change.bias]]
        for part, own in found.items()
        for path, change in own.items()
        if isinstance(change, Difference)
    ]
    return Adapter(name, digest(["ip adapter", content]), found)


def takes_several(pipe: Pipeline) -> bool:
    """Return True if the pipeline takes several IP-Adapters, and several pictures for each."""
    parts = (module_of(part) for part in find_denoisers(pipe.components).values())
    projections = (getattr(part, "encoder_hid_proj", None) for part in parts)
    return any(hasattr(one, "image_projection_layers") for one in projections)
