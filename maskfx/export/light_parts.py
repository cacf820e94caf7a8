"""LightParts: modules that run without their large products, to find what they are called with."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from maskfx.compiler.capture.tracing.light_run import LightProducts
from maskfx.compiler.capture.tracing.twin import Twin


class LightParts:
    """Twins of a pipeline's modules.

    Args:
        parts: the modules by name; nothing that runs changes them.
    """

    def __init__(self, parts: Mapping[str, nn.Module]) -> None:
        self._twin = Twin(nn.ModuleDict(parts))
        self._light = LightProducts(self._twin)
        self.modules: dict[str, nn.Module] = dict(self._twin.module.named_children())

    @contextmanager
    def running(self) -> Iterator[None]:
        """Leave out large products of the twins in this block, and what is computed of them."""
        with torch.no_grad(), self._light:
            yield

    def settled(self, value: Any) -> object:
        """Return zeros for a value that wasn't computed, and any other value as it is."""
        left_out = isinstance(value, Tensor) and self._light.is_left_out(value)
        return torch.zeros_like(value) if left_out else value
