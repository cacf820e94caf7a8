"""Attention by kernels of other packages: captures hold PyTorch's, and edits run on rows."""

from __future__ import annotations

import copy
import sys
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from diffusers.models.attention_dispatch import (
    AttentionBackendName,
    _AttentionBackendRegistry,
    dispatch_attention_fn,
)
from torch import Tensor, nn

import maskfx
from maskfx.compiler.capture.tracing.plain_attention import XFORMERS, plain_attention
from maskfx.compiler.capture.tracing.twin import Twin
from tests.factories.own_transformers import Mixing, Tokens
from tests.factories.zoo import ZOO
from tests.passes.tools import error

CASE = ZOO["FluxTransformer2DModel"]


@torch.library.custom_op("maskfx_tests::opaque_attention", mutates_args=())
def opaque(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attention of (sample, token, head, feature) in a kernel that no graph can look into."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    rows = F.scaled_dot_product_attention(q, k, v)
    return rows.transpose(1, 2).contiguous()


def of_package(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    found: Tensor = opaque(query, key, value)
    return found


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The backend "flash" is a package's kernel that takes no masks."""
    name, registry = AttentionBackendName.FLASH, _AttentionBackendRegistry
    monkeypatch.setitem(registry._backends, name, of_package)
    monkeypatch.setitem(registry._constraints, name, [])
    monkeypatch.setitem(registry._supported_arg_names, name, {"query", "key", "value"})


def choose(module: nn.Module, backend: str) -> None:
    """What `set_attention_backend` does once it has found the package."""
    for part in module.modules():
        processor: Any = getattr(part, "processor", None)
        if hasattr(processor, "_attention_backend"):
            processor._attention_backend = AttentionBackendName(backend)


def check_edit(denoiser: maskfx.CompiledDenoiser, inputs: dict[str, Any]) -> None:
    wanted = denoiser.module(**inputs)
    _, cache = denoiser.record(**inputs)
    mask = torch.zeros(denoiser.mask_shape(inputs), dtype=torch.bool)
    mask.view(-1)[3:9] = True
    got = denoiser.edit([maskfx.EditStep(inputs, mask, cache)])[0]
    assert error(got, wanted) < 1e-4
    assert all(c.program is not None and not c.reasons for c in denoiser.compilations)


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize("backend", ["flash", "_native_math"])
def test_a_backend_of_diffusers_narrows(backend: str) -> None:
    module = CASE.build()
    choose(module, backend)
    check_edit(maskfx.compile(module), CASE.inputs(CASE.sizes[0], 0))


@pytest.mark.usefixtures("installed")
def test_backends_are_as_before_after_a_capture() -> None:
    rows = torch.randn(1, 5, 2, 4)
    with plain_attention():
        plain = torch.fx.experimental.proxy_tensor.make_fx(
            lambda x: dispatch_attention_fn(x, x, x, backend=AttentionBackendName.FLASH)
        )(rows)
    chosen = torch.fx.experimental.proxy_tensor.make_fx(
        lambda x: dispatch_attention_fn(x, x, x, backend=AttentionBackendName.FLASH)
    )(rows)
    assert "opaque" not in plain.code
    assert "opaque" in chosen.code
    assert torch.allclose(plain(rows), chosen(rows), atol=1e-6)


def test_a_mask_of_one_backend_is_left_to_it(monkeypatch: pytest.MonkeyPatch) -> None:
    class Blocks:
        """A mask that isn't a tensor."""

    def own(query: Tensor, key: Tensor, value: Tensor, attn_mask: object = None) -> Tensor:
        assert isinstance(attn_mask, Blocks)
        return query + 1

    registry, name = _AttentionBackendRegistry, AttentionBackendName.FLEX
    monkeypatch.setitem(registry._backends, name, own)
    arguments = {"query", "key", "value", "attn_mask"}
    monkeypatch.setitem(registry._supported_arg_names, name, arguments)
    rows, mask = torch.randn(1, 5, 2, 4), Blocks()
    with plain_attention():
        found = dispatch_attention_fn(rows, rows, rows, attn_mask=mask, backend=name)  # type: ignore[arg-type]
    assert torch.equal(found, rows + 1)


@pytest.mark.parametrize("heads", [True, False])
def test_attention_of_xformers_narrows(monkeypatch: pytest.MonkeyPatch, heads: bool) -> None:
    """The package needs a GPU; a module of its name stands in, whose attention is as opaque."""

    def attention(
        query: Tensor, key: Tensor, value: Tensor, attn_bias: Any = None, **_: Any
    ) -> Tensor:
        assert attn_bias is None
        if query.dim() == 4:
            return of_package(query, key, value)
        return of_package(*(x[:, :, None] for x in (query, key, value)))[:, :, 0]

    package = ModuleType(XFORMERS)
    package.memory_efficient_attention = attention  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, XFORMERS, package)

    class Attends(Mixing):
        def mix(self, x: Tensor, size: tuple[int, int]) -> Tensor:
            q, k, v = (y.transpose(1, 2) for y in self.heads(x))
            if not heads:
                q, k, v = (y.transpose(1, 2).flatten(0, 1) for y in (q, k, v))
            rows = package.memory_efficient_attention(q, k, v)
            if not heads:
                rows = rows.unflatten(0, (len(x), -1)).transpose(1, 2)
            return self.joined(rows.transpose(1, 2))

    torch.manual_seed(0)
    module = Tokens(Attends(), Attends()).eval().requires_grad_(False)
    inputs = {"sample": torch.randn(2, 4, 8, 12), "timestep": torch.tensor([3.0, 5.0])}
    check_edit(maskfx.compile(module), inputs)
    assert package.memory_efficient_attention is attention


def test_a_twin_leaves_members_of_enumerations_as_they_are() -> None:
    module: Any = nn.Linear(2, 2)
    module.backend = AttentionBackendName.NATIVE
    twin: Any = Twin(module).module
    assert twin.backend is AttentionBackendName.NATIVE
    assert repr(copy.copy(AttentionBackendName.NATIVE)).startswith("<AttentionBackendName.NATIVE")
