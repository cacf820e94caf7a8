"""LateTensor: a tensor of known shape whose numbers are computed elsewhere and waited for."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.utils import _pytree as pytree


class LateTensor(Tensor):
    """A tensor whose numbers arrive later. Any operator that reads them waits.

    Args:
        like: a tensor of its shape, strides and dtype, such as a meta tensor.
        device: its device.
        value: waits for the numbers and returns them; raises if they can't be computed.
        arrived: returns True if `value` returns without waiting.
    """

    value: Callable[[], Tensor]
    arrived: Callable[[], bool]

    @staticmethod
    def __new__(cls, like: Tensor, device: torch.device, *_: object) -> LateTensor:
        made: LateTensor = torch.Tensor._make_wrapper_subclass(
            cls, like.shape, strides=like.stride(), dtype=like.dtype, device=device
        )
        return made

    def __init__(
        self,
        like: Tensor,
        device: torch.device,
        value: Callable[[], Tensor],
        arrived: Callable[[], bool],
    ) -> None:
        self.value, self.arrived = value, arrived

    def __repr__(self, *, tensor_contents: object = None) -> str:  # type: ignore[override]
        return f"LateTensor({tuple(self.shape)}, {self.dtype})"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: Callable[..., object],
        types: object,
        args: tuple[object, ...] = (),
        kwargs: dict[str, object] | None = None,
    ) -> object:
        args, kwargs = pytree.tree_map(wait_for, (args, kwargs or {}))
        return func(*args, **kwargs)


def wait_for(value: object) -> object:
    """Return a late tensor's numbers as a tensor, and any other value as it is."""
    return value.value() if isinstance(value, LateTensor) else value


def is_late(value: object) -> bool:
    """Return True if reading a value may wait."""
    return isinstance(value, LateTensor) and not value.arrived()
