"""Tokenizers shared by several requests: serialize their calls.

A fast tokenizer sets its padding and truncation before it encodes, so two concurrent calls may
use each other's lengths.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

from torch import nn

P = ParamSpec("P")
R = TypeVar("R")


class OneAtATime:
    """Proxy of a tokenizer that runs its methods under a lock and forwards all other access."""

    def __init__(self, part: object, lock: threading.RLock) -> None:
        self.__dict__.update(maskfx_part=part, maskfx_lock=lock)

    def __getattr__(self, name: str) -> Any:
        value = getattr(self.maskfx_part, name)
        return self._alone(value) if callable(value) else value

    def __setattr__(self, name: str, value: object) -> None:
        setattr(self.maskfx_part, name, value)

    def __call__(self, *args: object, **kwargs: object) -> object:
        return self._alone(self.maskfx_part)(*args, **kwargs)

    def __len__(self) -> int:
        return len(self.maskfx_part)

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        return type(self.maskfx_part)

    def _alone(self, method: Callable[P, R]) -> Callable[P, R]:
        def alone(*args: P.args, **kwargs: P.kwargs) -> R:
            with self.maskfx_lock:
                return method(*args, **kwargs)

        return alone


def is_tokenizer(part: object) -> bool:
    """Return True for a tokenizer or a processor that has one."""
    if isinstance(part, nn.Module) or not callable(part):
        return False
    return hasattr(part, "model_max_length") or is_tokenizer(getattr(part, "tokenizer", None))
