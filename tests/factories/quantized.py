"""Weights of eight bits in a class that acts as one tensor, as packages for quantization have."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

aten = torch.ops.aten
COPIES = (aten.detach.default, aten.alias.default, aten.clone.default)


class EightBits(Tensor):
    """Integers, and a scale for each row; linear layers are all that it knows."""

    integers: Tensor
    scales: Tensor

    @staticmethod
    def __new__(cls, integers: Tensor, scales: Tensor) -> EightBits:
        return Tensor._make_wrapper_subclass(
            cls, integers.shape, dtype=scales.dtype, device=integers.device
        )

    def __init__(self, integers: Tensor, scales: Tensor) -> None:
        self.integers, self.scales = integers, scales

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["integers", "scales"], None

    @classmethod
    def __tensor_unflatten__(cls, parts: Any, meta: Any, size: Any, stride: Any) -> EightBits:
        return cls(parts["integers"], parts["scales"])

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None):
        if function is F.linear:
            return product(*args, **(kwargs or {}))
        with torch._C.DisableTorchFunctionSubclass():
            return function(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None):  # type: ignore[override]
        if function in COPIES:
            return cls(function(args[0].integers), function(args[0].scales))
        return NotImplemented  # PyTorch names the operator


def product(rows: Tensor, weight: EightBits, bias: Tensor | None = None) -> Tensor:
    flat = rows.reshape(-1, rows.shape[-1])
    found = torch.mm(flat, weight.integers.t().to(rows.dtype)) * weight.scales
    found = found.reshape(*rows.shape[:-1], found.shape[-1])
    return found if bias is None else found + bias


def quantize(module: nn.Module) -> int:
    """Give all linear layers such weights; return how many there are."""
    found = [part for part in module.modules() if type(part) is nn.Linear]
    for part in found:
        scales = part.weight.detach().abs().amax(1) / 127
        integers = (part.weight.detach() / scales[:, None]).round().to(torch.int8)
        part.weight = nn.Parameter(EightBits(integers, scales), requires_grad=False)
    return len(found)


def unpacked(module: nn.Module, into: nn.Module, names: list[str]) -> nn.Module:
    """Give a module as it was before packing the numbers that the packed layers compute with."""
    for name in names:
        layer, plain = module.get_submodule(name), into.get_submodule(name)
        assert isinstance(plain, nn.Linear)
        with torch.no_grad():
            whole = layer(torch.eye(plain.in_features))
            zero = layer(torch.zeros(1, plain.in_features))
            plain.weight.copy_((whole - zero).t())
    return into
