"""The structure of results is written and read, that of a user's dataclass too."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from maskfx.compiler.artifact.specs import read_spec, spec_document


@dataclass
class Pair:
    """What a denoiser returns, registered as PyTorch's documentation shows."""

    sample: Tensor
    variance: Tensor | None = None


pytree.register_dataclass(Pair)


def test_the_structure_of_a_registered_dataclass_is_read_as_it_was_written() -> None:
    for value in (Pair(torch.ones(1), torch.zeros(1)), (Pair(torch.ones(1)), [None])):
        spec = pytree.tree_structure(value)
        document = spec_document(spec)
        assert __name__ in document["modules"]
        assert read_spec(document) == spec
