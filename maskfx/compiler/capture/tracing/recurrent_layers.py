"""Recurrent layers during a capture: one over many tokens is refused, as no rule narrows it.

Each token depends on all before it. A light run, and torch's own export, go through them one by one
in Python, which takes minutes.

This file knows nothing about lanes, passes or the runtime.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch.overrides import TorchFunctionMode

from maskfx.compiler.capture.tracing.branches import Unexportable
from maskfx.ir.geometry.lanes import int_hint

LAYERS = ("gru", "lstm", "rnn_tanh", "rnn_relu")
MOST = 64  # tokens that a graph may compute one after the other


class RecurrentLayers(TorchFunctionMode):
    """Refuses recurrent layers over more than a few tokens."""

    def __torch_function__(
        self,
        func: Callable[..., object],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        name = getattr(func, "__name__", "")
        if name in LAYERS and isinstance(args[2], (list, tuple)):  # else its input is packed
            count = int_hint(args[0].shape[1 if args[-1] else 0])
            if count > MOST:
                raise Unexportable(f"{name} computes {count} tokens one after the other")
        return func(*args, **(kwargs or {}))
