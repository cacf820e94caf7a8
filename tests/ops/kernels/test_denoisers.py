"""The oracle with kernels in place of all operators that have one, through compiled denoisers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

import maskfx
from maskfx.ops.kernels import cuda, serves
from tests.factories import masks
from tests.factories.zoo import ZOO
from tests.ops.kernels.tools import DEVICE, needs_kernels

pytestmark = [needs_kernels, pytest.mark.slow]
TOLERANCE = 1e-4


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> Iterator[Counter[str]]:
    """Counts calls of the implementations; on a CPU operators choose them inside of this."""
    calls = Counter[str]()
    monkeypatch.setattr(serves, "_failed", set())
    library = torch.library.Library("maskfx", "IMPL")
    for name, function in cuda.IMPLEMENTATIONS.items():

        def counted(*args: Any, name: str = name, function: Any = function) -> Any:
            calls[name] += 1
            return function(*args)

        if DEVICE.type == "cpu":
            library.impl(name, counted, "CPU")
    yield calls
    library._destroy()


@pytest.mark.parametrize(
    ("name", "operators"),
    [
        ("UNet2DConditionModel-sdxl", {"window_product", "norm_activation", "gated", "attend"}),
        ("SD3Transformer2DModel-sd35", {"modulate", "add_gated", "attend"}),
        ("FluxTransformer2DModel", {"modulate", "add_gated", "attend"}),
    ],
)
def test_an_edit_reproduces_the_dense_run(
    name: str, operators: set[str], served: Counter[str]
) -> None:
    case = ZOO[name]
    module = case.build().to(DEVICE)
    denoiser = maskfx.compile(module)
    steps, wanted = [], []
    for seed, size in enumerate(case.sizes[:2]):
        inputs = pytree.tree_map_only(Tensor, lambda v: v.to(DEVICE), case.inputs(size, seed))
        wanted.append(module(**inputs))
        _, kept = denoiser.record(**inputs)
        for value in pytree.tree_leaves(kept.output):
            if isinstance(value, Tensor):
                value.zero_()  # what the edit doesn't compute isn't compared
        mask = masks.MASKS[("random", "stroke")[seed]](case.mask_shape(size), seed)
        steps.append((maskfx.EditStep(inputs, mask, kept), mask.to(DEVICE)))
    found = denoiser.edit([step for step, _ in steps])
    for one, two, (_, mask) in zip(found, wanted, steps, strict=True):
        got, expected = (next(v for v in pytree.tree_leaves(x) if isinstance(v, Tensor))
                         for x in (one, two))  # fmt: skip
        if mask.dim() == 2:
            got, expected = got[:, :, mask], expected[:, :, mask]
        else:
            got, expected = got[:, mask], expected[:, mask]
        assert float((got - expected).norm() / expected.norm()) < TOLERANCE
    assert not serves._failed
    if DEVICE.type == "cpu":
        assert operators <= set(served), served
