"""Packs the weights of linear layers as diffusers holds them: of GGUF files, or by bitsandbytes.

The weights are packed integers in a class of their own, which each layer unpacks in each call.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


def pack_gguf(module: nn.Module) -> list[str]:
    """Give linear layers weights of 8 bits in blocks of 32; return the layers' names."""
    import gguf
    from diffusers.quantizers.gguf import utils

    of_file: Any = utils  # not typed
    kind = gguf.GGMLQuantizationType.Q8_0
    found = {n: p for n, p in linear_layers(module) if p.in_features % 32 == 0}
    packed = {
        f"{name}.weight": of_file.GGUFParameter(
            torch.from_numpy(gguf.quants.quantize(part.weight.detach().numpy(), kind).copy()),
            quant_type=kind,
        )
        for name, part in found.items()
    }
    of_file._replace_with_gguf_linear(module, torch.float32, packed)
    for name, part in found.items():
        new: Any = module.get_submodule(name)
        new.weight, new.bias = packed[f"{name}.weight"], part.bias
    return list(found)


def pack_bitsandbytes(module: nn.Module) -> list[str]:
    """Give linear layers weights of 4 bits; return the layers' names."""
    import bitsandbytes

    found = dict(linear_layers(module))
    for name, part in found.items():
        new = bitsandbytes.nn.Linear4bit(
            part.in_features,
            part.out_features,
            bias=part.bias is not None,
            compute_dtype=torch.float32,
            quant_type="nf4",
        )
        new.weight = bitsandbytes.nn.Params4bit(
            part.weight.detach().clone(), requires_grad=False, quant_type="nf4"
        )
        new.bias = part.bias
        module.set_submodule(name, new.to("cpu"))
    return list(found)


def linear_layers(module: nn.Module) -> list[tuple[str, nn.Linear]]:
    return [(name, part) for name, part in module.named_modules() if type(part) is nn.Linear]


def pack_quanto(module: nn.Module) -> list[str]:
    """Give linear layers weights of 8 bits; return the layers' names."""
    from optimum import quanto

    names = [name for name, _ in linear_layers(module)]
    quanto.quantize(module, weights=quanto.qint8, include=names)
    quanto.freeze(module)
    return names
