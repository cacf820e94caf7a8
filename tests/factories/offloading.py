"""A hook that moves a module about, as diffusers' offloading does."""

from __future__ import annotations

from typing import Any

import torch
from accelerate.hooks import CpuOffload  # type: ignore[import-untyped,unused-ignore]
from torch import nn


class Elsewhere(CpuOffload):  # type: ignore[misc]
    """Brings a module to other memory each time that it was sent away, as a move and back does."""

    def __init__(self) -> None:
        super().__init__("cpu")
        self.brought, self.away = 0, True

    def init_hook(self, module: nn.Module) -> nn.Module:
        return module

    def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if self.away:
            self.away = False
            self.brought += 1
            module._apply(torch.clone)
        return args, kwargs
