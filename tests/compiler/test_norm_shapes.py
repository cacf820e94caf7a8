"""Norms of an export have results of the shapes, types and strides that torch computes."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.source import ConstantSource
from torch._subclasses import fake_impls
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

from maskfx.compiler.capture.tracing import norm_shapes as norms
from maskfx.compiler.capture.tracing.norm_shapes import norm_shapes

LAYOUTS = {
    "contiguous": lambda x: x,
    "channels last": lambda x: x.to(memory_format=torch.channels_last),
    "turned": lambda x: x.transpose(2, 3),
}


def results(kind: str, layout: str, dtype: torch.dtype, weights: bool) -> list[str]:
    """What is known about the results of a norm; what isn't normalized is symbolic."""
    mode = FakeTensorMode(shape_env=ShapeEnv())
    free = [DimDynamic.DYNAMIC, DimDynamic.STATIC, DimDynamic.DYNAMIC, DimDynamic.DYNAMIC]
    if kind == "layer":
        free[1], free[3] = DimDynamic.DYNAMIC, DimDynamic.STATIC
        free[2] = DimDynamic.STATIC if layout == "turned" else DimDynamic.DYNAMIC
    real = LAYOUTS[layout](torch.ones(2, 8, 6, 10, dtype=dtype))
    context: Any = StatelessSymbolicContext(dynamic_sizes=free)
    value = mode.from_tensor(real, source=ConstantSource("value"), symbolic_context=context)
    width = 8 if kind == "group" else value.shape[-1]
    with mode:
        own = [torch.ones(width, dtype=dtype) for _ in range(2)] if weights else [None, None]
        if kind == "group":
            sides = value.shape[0], 8, value.shape[2] * value.shape[3]
            found = torch.ops.aten.native_group_norm(value, *own, *sides, 4, 1e-5)
        else:
            found = torch.ops.aten.native_layer_norm(value, [width], *own, 1e-5)
    return [described(one) for one in found]


def described(value: Tensor) -> str:
    return f"{tuple(value.shape)} {value.stride()} {value.dtype} {value.device}"


@pytest.mark.parametrize("kind", ["group", "layer"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("weights", [True, False])
def test_results_are_those_of_the_formula(
    kind: str, layout: str, dtype: torch.dtype, weights: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = results(kind, layout, dtype, weights)
    made: list[Tensor] = []
    own = norms.made

    def noted(*given: Any) -> Any:
        made.append(own(*given))
        return made[-1]

    monkeypatch.setattr(norms, "made", noted)
    before = dict(fake_impls.get_fast_op_impls())
    with norm_shapes():
        assert results(kind, layout, dtype, weights) == wanted
    assert bool(made) == (layout == "contiguous")
    assert fake_impls.get_fast_op_impls() == before


def test_another_torch_without_this_table_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(norms, "TABLE", "absent")
    before = dict(fake_impls.get_fast_op_impls())
    with norm_shapes():
        assert fake_impls.get_fast_op_impls() == before
