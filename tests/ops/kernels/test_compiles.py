"""Every kernel compiles for GPUs, which needs none: from a call's arguments to machine code."""

from __future__ import annotations

import importlib
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import Tensor

from maskfx.ops.kernels.serves import interpreted, triton_is_there
from tests.ops.kernels.test_attend import Attention
from tests.ops.kernels.test_cuda import arguments

pytestmark = [
    pytest.mark.skipif(not triton_is_there(), reason="Triton isn't installed"),
    pytest.mark.skipif(interpreted(), reason="the interpreter compiles nothing"),
    pytest.mark.slow,
]

KERNELS = {
    "window_product": ("window_product_kernel",),
    "attend": ("attend_kernel",),
    "norms": ("moments_kernel", "merge_kernel", "apply_kernel"),
    "pointwise": ("gated_kernel", "owner_kernel"),
    "low_rank": ("narrow_kernel", "widen_kernel"),
    "rows": ("pick_kernel", "put_kernel", "copy_kernel"),
}
TYPES = {
    torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16", torch.int64: "i64",
    torch.int32: "i32", torch.uint8: "u8", torch.int8: "i8",
}  # fmt: skip
CAPABILITIES = (80, 90)


def type_of(value: Any) -> str:
    if isinstance(value, Tensor):
        return "*" + TYPES[value.dtype]
    return "fp32" if isinstance(value, float) else "i32"


class Compiler:
    """Compiles a kernel for the arguments of each launch, in place of launching it."""

    def __init__(self, kernel: Any, compiled: list[str]) -> None:
        self.kernel, self.compiled = kernel, compiled

    def run(self, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        from triton.backends.compiler import GPUTarget
        from triton.compiler import ASTSource
        from triton.compiler import compile as compile_kernel

        options = {k: kwargs.pop(k) for k in ("num_warps", "num_stages") if k in kwargs}
        given = dict(zip(self.kernel.arg_names, args, strict=False)) | kwargs
        fixed = {p.name for p in self.kernel.params if p.is_constexpr}
        fixed |= {name for name, value in given.items() if type(value) is int and value == 1}
        signature = {n: "constexpr" if n in fixed else type_of(v) for n, v in given.items()}
        ordered = {name: signature[name] for name in self.kernel.arg_names}
        constants = {name: given[name] for name in fixed}
        for capability in CAPABILITIES:
            source = ASTSource(self.kernel, ordered, constants)
            found = compile_kernel(source, GPUTarget("cuda", capability, 32), options)
            assert found.asm["cubin"]
            self.compiled.append(self.kernel.__name__)


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    found: list[str] = []
    for module, names in KERNELS.items():
        for name in names:
            kernel = getattr(importlib.import_module(f"maskfx.ops.kernels.{module}"), name)
            monkeypatch.setattr(kernel, "run", Compiler(kernel, found).run)
    return found


def in_dtype(values: tuple[Any, ...], dtype: torch.dtype) -> list[Any]:
    """Rows in a dtype; the moments and scales of norms stay in float32."""
    return [v.to(dtype) if isinstance(v, Tensor) and v.is_floating_point() else v for v in values]


@pytest.mark.parametrize("dtype", [torch.bfloat16], ids=["bf16"])
def test_every_kernel_compiles(dtype: torch.dtype, compiled: list[str]) -> None:
    from maskfx.ops.kernels import attend as attention_kernel
    from maskfx.ops.kernels import low_rank, norms
    from maskfx.ops.kernels import window_product as windows
    from maskfx.ops.kernels.pointwise import add_gated, gated, modulate
    from maskfx.ops.kernels.rows import RowCopies, pick_rows, put_rows

    attend: Any = attention_kernel.attend
    group_scale: Any = norms.group_scale
    add_low_rank: Any = low_rank.add_low_rank
    Rest = attention_kernel.CachedOperand
    own: dict[str, Any] = {name: in_dtype(values, dtype) for name, values in arguments().items()}
    rows, _, table, weight, _, _ = own["window_product"]
    out, launch = rows.new_empty(len(table), len(weight)), cast(Any, windows._launch)
    launch(*own["window_product"][:5], out, "silu", windows.CONFIGS[0])
    pick_rows(*own["gather"])
    put_rows(own["gather"][0], torch.tensor([0, 1]), own["gather"][0][:2].float())
    target = torch.zeros(2, 16, dtype=dtype)
    RowCopies([target], [torch.tensor([0, 1])]).run(np.array([target.data_ptr()]))
    run(
        group_scale, *own["group_scale"][:1], own["group_scale"][1].float(), *own["group_scale"][2:]
    )
    rows, scales, owner, _ = own["norm_activation"]
    norms.norm_activation(rows, scales.float(), owner, "silu")
    gated(*own["gated"][:3])
    modulate(*own["modulate"])
    add_gated(*own["add_gated"])
    run(add_low_rank, *own["add_low_rank"][:4], own["add_low_rank"][4].tolist())
    for masked in (None, (1, True, False), (4, True, True)):
        attention: Any = Attention(5, dtype, heads=4, requests=2, depth=64)
        flat, *layout = (None, 1, False) if masked is None else attention.mask(*masked)
        q, k, v, rest_k, rest_v, *spans = attention.values()
        run(attend, q, k, v, Rest(rest_k), Rest(rest_v), *spans, flat, *layout, None)
    for stored, kind in ((torch.int8, torch.float32), (torch.uint8, torch.float16)):
        width = 256 if stored == torch.int8 else 128
        rest = Rest(
            torch.zeros(len(rest_k), width, dtype=stored), torch.ones(len(rest_k), 4).to(kind)
        )
        run(attend, q, k, v, rest, rest, *spans, None, 1, False, None)
    assert set(compiled) == {name for names in KERNELS.values() for name in names}


def run(kernel: Any, *args: Any) -> None:
    kernel(*args)
