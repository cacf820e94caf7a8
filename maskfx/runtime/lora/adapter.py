"""Adapter: the low-rank updates that a LoRA file makes to the layers of a pipeline's modules."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, eq=False)
class LowRank:
    """The update of one layer's weight: `scale * up @ down`.

    Args:
        down: (rank, inputs), or (rank, inputs, height, width) for a convolution.
        up: (outputs, rank).
        scale: Alpha divided by the rank.
    """

    down: Tensor
    up: Tensor
    scale: float

    @property
    def rank(self) -> int:
        return self.up.shape[1]

    @property
    def nbytes(self) -> int:
        return self.down.nbytes + self.up.nbytes


Layers = Mapping[str, LowRank]  # by the path of the layer in its module


@dataclass(frozen=True, eq=False)
class Adapter:
    """A LoRA, parsed and checked against a pipeline.

    Args:
        name: Name of the file, or of its registration.
        digest: Hash of the updates; equal for adapters that change pictures alike.
        parts: By the name of the pipeline's component, its layers' updates.
    """

    name: str
    digest: str
    parts: Mapping[str, Layers]

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
