"""Adapter: the updates that a file makes to the layers of a pipeline's modules.

An update of a layer is low-rank, or a full difference of its weight, its bias or both.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import isfinite

from torch import Tensor

from maskfx.ir.argument_checks import check_type, is_number, refuse


@dataclass(frozen=True, eq=False)
class LowRank:
    """The update of one layer's weight: `scale * up @ down`.

    Args:
        down: (rank, inputs), or (rank, inputs, height, width) for a convolution.
        up: (outputs, rank).
        scale: Alpha divided by the rank.
        bias: What is added to the layer's bias, which `scale` doesn't change.
    """

    down: Tensor
    up: Tensor
    scale: float
    bias: Tensor | None = None

    def __post_init__(self) -> None:
        check_type("LowRank", "down", self.down, Tensor, "a tensor")
        check_type("LowRank", "up", self.up, Tensor, "a tensor")
        check_type("LowRank", "bias", self.bias, Tensor, "a tensor, or None", or_none=True)
        if not is_number(self.scale) or not isfinite(self.scale):
            refuse("LowRank", "scale", self.scale, "a finite number")

    @property
    def rank(self) -> int:
        return self.up.shape[1]

    @property
    def nbytes(self) -> int:
        return sum(own.nbytes for own in tensors_of(self))


@dataclass(frozen=True, eq=False)
class Difference:
    """What is added to one layer's weight and bias, whole; None where nothing is.

    The layer may be of any kind that has parameters of these names.
    """

    weight: Tensor | None = None
    bias: Tensor | None = None

    def __post_init__(self) -> None:
        check_type("Difference", "weight", self.weight, Tensor, "a tensor, or None", or_none=True)
        check_type("Difference", "bias", self.bias, Tensor, "a tensor, or None", or_none=True)

    @property
    def nbytes(self) -> int:
        return sum(own.nbytes for own in tensors_of(self))


LayerChange = LowRank | Difference
KINDS = (LowRank, Difference)
Layers = Mapping[str, LayerChange]  # by the path of the layer in its module


def tensors_of(change: LayerChange) -> list[Tensor]:
    """Return the tensors of an update, in the order of its fields."""
    if isinstance(change, LowRank):
        found = [change.down, change.up, change.bias]
    else:
        found = [change.weight, change.bias]
    return [one for one in found if one is not None]


@dataclass(frozen=True, eq=False)
class Adapter:
    """A LoRA or another file of updates, parsed and checked against a pipeline.

    Args:
        name: Name of the file, or of its registration.
        digest: Hash of the updates; equal for adapters that change pictures alike.
        parts: By the name of the pipeline's component, its layers' updates.
    """

    name: str
    digest: str
    parts: Mapping[str, Layers]

    def __post_init__(self) -> None:
        check_type("Adapter", "name", self.name, str, "a name")
        check_type("Adapter", "digest", self.digest, str, "a text, equal for equal updates")
        wanted = 'a dict of layers by component, such as {"unet": {"path.of.layer": LowRank(...)}}'
        check_type("Adapter", "parts", self.parts, Mapping, wanted)
        for name, layers in self.parts.items():
            where = f"Adapter: parts[{name!r}]"
            check_type(where, "layers", layers, Mapping, "a dict of updates by path of the layer")
            for path, change in layers.items():
                check_type(where, repr(path), change, KINDS, "a LowRank or a Difference")

    @property
    def nbytes(self) -> int:
        return sum(layer.nbytes for part in self.parts.values() for layer in part.values())


@dataclass(frozen=True)
class WeightedLayers:
    """The updates of one module by one adapter, as a step applies them.

    Args:
        layers: By path of the layer in the module.
        weight: Factor of all updates.
        digest: The adapter's.
    """

    layers: Layers
    weight: float
    digest: str


Updates = Sequence[WeightedLayers]  # of one request and module; they add up
