"""BufferStates: buffers that each run of a module changes, set back after runs for a capture."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

LARGEST = 1 << 20  # bytes of a buffer that is set back


class BufferStates:
    """The buffers of a module before it is run for a capture.

    Counters and moving averages are written by each run. A table that the first run fills is not:
    it stays filled. Buffers above `LARGEST`, such as quantized weights, are not copied.
    """

    def __init__(self, module: nn.Module) -> None:
        small = (b for b in module.buffers() if b.nbytes <= LARGEST)
        usable = [b for b in small if not (b.is_meta or b.is_inference())]
        self._kept = [(buffer, buffer._version, buffer.detach().clone()) for buffer in usable]

    def restore(self, run: Callable[[], object]) -> None:
        """Set back what changes at each run; `run` runs the module again, if any has changed."""
        if all(buffer._version == version for buffer, version, _ in self._kept):
            return
        before = [buffer._version for buffer, _, _ in self._kept]
        run()
        for (buffer, _, numbers), version in zip(self._kept, before, strict=True):
            if buffer._version != version:
                with torch.no_grad():
                    buffer.copy_(numbers)
