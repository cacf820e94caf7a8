"""WeightPatch: low-rank updates written into a module's own weights, and taken out bit for bit.

For a run whose calls all have the same adapters: layers then cost what they cost without. The
touched weights' originals stay in host memory meanwhile, so that un-patching is a copy; nothing is
subtracted, which would leave rounding behind.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from maskfx.errors import InputError
from maskfx.ir.values import PLAIN_TENSORS
from maskfx.runtime.lora.adapter import Updates
from maskfx.runtime.lora.layers import check_updates, digests_of


class WeightPatch:
    """The updates of one module's weights.

    A compiled denoiser sees that the weights have other values: what is derived from them is made
    again before its next step, and recordings made with other weights don't serve.

    Args:
        module: The module.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self._originals: list[tuple[Tensor, Tensor]] = []  # weight, its value on the host
        self._lock = threading.Lock()

    @property
    def patched(self) -> bool:
        return bool(self._originals)

    @property
    def nbytes(self) -> int:
        """Bytes of the originals in host memory."""
        return sum(original.nbytes for _, original in self._originals)

    @torch.no_grad()
    def apply(self, updates: Updates) -> None:
        """Write updates into the weights; they add up. InputError if others are written already."""
        acting = [one for one in updates if one.weight and one.layers]
        with self._lock:
            if self._originals:
                raise InputError(
                    f"{type(self.module).__name__}: its weights are patched already; call remove() "
                    "first"
                )
            layers = check_updates(self.module, acting, digests_of(acting)).layers
            if any(type(update.weight) not in PLAIN_TENSORS for update in layers):
                raise InputError(
                    f"{type(self.module).__name__}: its weights are packed (quantized), so updates "
                    "can't be written into them; pass the adapters to each call"
                )
            try:
                for update in layers:
                    self._write(update.weight, update.whole())
            except BaseException:
                self._restore()
                raise

    @torch.no_grad()
    def remove(self) -> None:
        """Restore the weights bit for bit; without effect if nothing is written."""
        with self._lock:
            self._restore()

    def _write(self, weight: Tensor, value: Tensor) -> None:
        original = weight.detach().to("cpu", copy=True)
        self._originals.append((weight, original))
        weight.copy_(value)

    def _restore(self) -> None:
        while self._originals:
            weight, original = self._originals[-1]
            weight.copy_(original)
            self._originals.pop()


@contextmanager
def patched(module: nn.Module, updates: Updates) -> Iterator[None]:
    """Have updates in a module's weights within the context.

    Only one caller may use the module meanwhile: every call of it sees the patched weights.
    """
    patch = WeightPatch(module)
    patch.apply(updates)
    try:
        yield
    finally:
        patch.remove()
