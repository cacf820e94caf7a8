"""WeightPatch: low-rank updates written into a module's own weights, and taken out bit for bit.

For a run whose calls all have the same adapters: layers then cost what they cost without. The
touched weights' originals stay in host memory meanwhile, so that un-patching is a copy; nothing is
subtracted, which would leave rounding behind. Weights that other processes read get memory of this
process's own for that time, and the originals are the shared memory.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version

from maskfx.errors import InputError
from maskfx.ir.values import PLAIN_TENSORS
from maskfx.runtime.hardware.private_memory import PrivateMemory
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
        # weight, its value on the host; None if other processes share it
        self._originals: list[tuple[Tensor, Tensor | None]] = []
        self._private = PrivateMemory()
        self._lock = threading.Lock()

    @property
    def patched(self) -> bool:
        return bool(self._originals)

    @property
    def nbytes(self) -> int:
        """Bytes of the originals in host memory, and of copies of weights in shared memory."""
        copies = sum(one.nbytes for _, one in self._originals if one is not None)
        return copies + self._private.nbytes

    @torch.no_grad()
    def apply(self, updates: Updates, private: bool = False) -> None:
        """Write updates into the weights; they add up. InputError if others are written already.

        Args:
            updates: The updates.
            private: Let other processes that share the weights keep theirs as they are.
        """
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
                    self._write(update.weight, update.whole(), private)
            except BaseException:
                self._restore()
                raise

    @torch.no_grad()
    def remove(self) -> None:
        """Restore the weights bit for bit; without effect if nothing is written."""
        with self._lock:
            self._restore()

    def _write(self, weight: Tensor, value: Tensor, private: bool) -> None:
        if private and weight.is_shared():
            self._private.take(weight)
            self._originals.append((weight, None))
        else:
            self._originals.append((weight, weight.detach().to("cpu", copy=True)))
        weight.copy_(value)

    def _restore(self) -> None:
        self._private.release()
        while self._originals:
            weight, original = self._originals[-1]
            if original is None:
                increment_version(weight)
            else:
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
