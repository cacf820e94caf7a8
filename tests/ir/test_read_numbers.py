"""The numbers of small tensors are read once per tensor and version."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

import maskfx
from maskfx.ir.read_numbers import read_once
from tests.factories.own_cases import OWN
from tests.factories.own_denoisers import built
from tests.factories.zoo import Size
from tests.runtime.test_packed_pictures import CALLS, FORMS

READS = ("tolist", "item", "__int__", "__bool__", "numpy")


class Reads(TorchFunctionMode):
    """Counts what copies numbers from a device."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += getattr(func, "__name__", "") in READS
        return func(*args, **(kwargs or {}))


def test_a_tensor_is_read_once_per_version() -> None:
    value, other = torch.tensor([[2, 3]]), torch.tensor([[2, 3]])
    with Reads() as reads:
        assert [read_once(value) for _ in range(3)] == [[[2, 3]]] * 3
        assert reads.count == 1
        value[0, 1] = 5
        assert read_once(value) == [[2, 5]]
        assert read_once(other) == [[2, 3]]
        assert reads.count == 3


def test_changes_in_inference_mode_are_seen() -> None:
    with torch.inference_mode():
        value = torch.tensor([1, 2])
        assert read_once(value) == [1, 2]
        value += 1
        assert read_once(value) == [2, 3]


Made = tuple[torch.nn.Module, dict[str, Any]]


def sides() -> Made:
    case = OWN["sides-of-tokens"]
    return case.build(), case.inputs(Size(2, 10, 6, 7), 3)


def packed(form: str) -> Made:
    make, given = FORMS[form]
    return built(make), given(CALLS[0], 0)


@pytest.mark.parametrize("make", [sides, lambda: packed("rows"), lambda: packed("ends")])
def test_a_second_step_reads_timesteps_only(make: Callable[[], Made]) -> None:
    """Sizes in tensors, and the masks of each picture, are known from the step before."""
    module, call = make()
    denoiser = maskfx.compile(module)
    kept = denoiser.record(**call)[1]
    step = maskfx.EditStep(call, torch.rand(denoiser.mask_shape(call)) < 0.25, kept)
    first: Tensor = denoiser.edit([step])[0]
    with Reads() as reads:
        second = denoiser.edit([step])[0]
    assert torch.equal(first, second)
    assert reads.count == 1
