"""NumberSettings: which numbers of a module's settings its graphs read as tensors.

A scale that changes a second time is a number that changes. From then on graphs read it from a
tensor, and no value of it needs a capture.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from maskfx.compiler.compile import Compilation
from maskfx.ir.modules.module_settings import settings_of
from maskfx.ir.modules.number_settings import Place, numbers_of


class NumberSettings:
    """Compares the numbers of one module's settings with those of its captures.

    `inputs` has a tensor for each number that has changed.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self.inputs: dict[Place, Tensor] = {}
        self._seen: dict[Place, float] = {}
        self._rest = ""  # of the settings, as a digest; empty before the first capture

    def noted(self) -> dict[Place, Tensor]:
        """Remember the settings that the module has now, and return `inputs` for its capture."""
        self._seen = numbers_of(self._module, self.inputs)
        self._rest = settings_of(self._module, self.inputs)
        for place in [place for place in self.inputs if place not in self._seen]:
            del self.inputs[place]
        for place, tensor in self.inputs.items():
            tensor.fill_(self._seen[place])
        return self.inputs

    def digest(self) -> str:
        """Return a digest of the numbers that graphs read; empty if there are none."""
        if not self.inputs:
            return ""
        numbers = [self._seen[place] for place in self.inputs]
        return hashlib.sha256(repr(numbers).encode()).hexdigest()

    def follow(self, captured: Iterable[Compilation]) -> bool:
        """Follow changed settings; return True if captures stay valid, because graphs read them."""
        before, rest = self._seen, self._rest
        self.noted()
        if not rest or rest != self._rest or before.keys() != self._seen.keys():
            return False
        changed = [place for place, value in self._seen.items() if value != before[place]]
        new = [place for place in changed if place not in self.inputs]
        for place in new:
            self.inputs[place] = torch.tensor(self._seen[place], device=device_of(self._module))
        for one in captured:
            one.capture.holds = all(fact.holds(self._seen) for fact in one.capture.facts)
        return not new


def device_of(module: nn.Module) -> torch.device:
    """Return the device of a module's weights."""
    weight = next(module.parameters(), None)
    return torch.device("cpu") if weight is None else weight.device
