"""Steps that a kernel computes together, and graphs with them against the graphs without."""

from __future__ import annotations

import operator
from collections import Counter

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

import maskfx
from maskfx import ops
from maskfx.compiler.fuse import fused
from maskfx.passes.context import aten
from maskfx.passes.fuse_kernels import fuse_kernels
from tests.factories import masks
from tests.factories.zoo import ZOO
from tests.passes.tools import code_of, denoiser_of, operators, picture, shared, timed
from tests.runtime.test_oracle import MIXED

NAMES = {op._schema.name.split("::")[1] for op in ops.FUSED}


class Blocks(nn.Module):
    """A residual block, a modulated block with a gate, and a gated feed-forward layer."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.inner = nn.Conv2d(4, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1)
        self.norm, self.layer_norm = nn.GroupNorm(2, 8), nn.LayerNorm(8, elementwise_affine=False)
        self.time, self.project = nn.Linear(8, 24), nn.Linear(8, 32)
        self.leave, self.outer = nn.Linear(16, 8), nn.Conv2d(8, 4, 1)

    def forward(self, sample: Tensor, timestep: Tensor) -> Tensor:
        steps = torch.arange(8, dtype=sample.dtype)
        shift, scale, gate = self.time(torch.cos(timestep[:, None] * steps)).chunk(3, -1)
        hidden = F.silu(self.enter(sample))
        hidden = hidden + self.inner(F.silu(self.norm(hidden)))
        tokens = hidden.flatten(2).transpose(1, 2)
        changed = self.layer_norm(tokens) * (1 + scale[:, None]) + shift[:, None]
        value, gated = self.project(changed).chunk(2, -1)
        tokens = tokens + gate[:, None] * self.leave(value * F.gelu(gated, approximate="tanh"))
        return self.outer(tokens.transpose(1, 2).unflatten(2, sample.shape[2:]))


def program_graph(module: nn.Module) -> fx.GraphModule:
    compilation = denoiser_of(module, timed).compilations[0]
    assert compilation.program is not None, compilation.reasons
    return compilation.program.module


def test_steps_become_one_operator() -> None:
    before = program_graph(shared(Blocks))
    after = operators(fused(before).graph)
    assert {name: after[name] for name in NAMES if after[name]} == {
        "window_product": 2, "norm_activation": 1, "gated": 1, "modulate": 1, "add_gated": 1,
    }  # fmt: skip
    left = ("gather", "scale_shift", "silu", "gelu", "split_with_sizes", "index_select")
    assert not any(after[name] for name in left), after
    assert operators(before.graph)["gather"] == 2  # the pass works on a copy


def test_products_alone() -> None:
    after = operators(fused(program_graph(shared(Blocks)), pointwise=False).graph)
    assert {name: after[name] for name in NAMES if after[name]} == {"window_product": 2}
    assert (after["scale_shift"], after["gelu"]) == (1, 1)


def test_second_run_rewrites_nothing() -> None:
    graph = fused(program_graph(shared(Blocks))).graph
    code = code_of(graph)
    assert fuse_kernels(graph) == 0
    assert code_of(graph) == code


def hand_made() -> tuple[fx.Graph, dict[str, fx.Node]]:
    graph = fx.Graph()
    names = ("rows", "halo", "table", "weight", "scale", "shift", "owner")
    return graph, {name: graph.placeholder(name) for name in names}


def test_keeps_steps_that_something_else_reads() -> None:
    graph, own = hand_made()
    picked = graph.call_function(ops.gather, (own["rows"], own["halo"], own["table"]))
    product = graph.call_function(aten.linear.default, (picked, own["weight"]))
    factor = graph.call_function(aten.index_select.default, (own["scale"], 0, own["owner"]))
    scaled = graph.call_function(aten.mul.Tensor, (product, factor))
    added = graph.call_function(aten.add.Tensor, (scaled, own["rows"]))
    graph.output((added, picked, scaled))
    code = code_of(graph)
    assert fuse_kernels(graph) == 0
    assert code_of(graph) == code


def test_keeps_an_activation_whose_product_is_read_too() -> None:
    graph, own = hand_made()
    picked = graph.call_function(ops.gather, (own["rows"], own["halo"], own["table"]))
    product = graph.call_function(aten.linear.default, (picked, own["weight"]))
    graph.output((product, graph.call_function(aten.silu.default, (product,))))
    assert fuse_kernels(graph) == 1
    assert operators(graph) == Counter(window_product=1, silu=1)


@pytest.mark.parametrize("split", ["other axes", "three parts", "the same half", "scaled sum"])
def test_keeps_what_only_looks_alike(split: str) -> None:
    graph, own = hand_made()
    rows, count = own["rows"], 3 if split == "three parts" else 2
    parts = graph.call_function(aten.chunk.default, (rows, count, 1))
    others = parts
    if split == "other axes":
        others = graph.call_function(aten.chunk.default, (rows, count, 0))
    one = graph.call_function(operator.getitem, (parts, 0))
    number = 0 if split == "the same half" else 1
    two = graph.call_function(operator.getitem, (others, number))
    found = graph.call_function(
        aten.mul.Tensor, (one, graph.call_function(aten.silu.default, (two,)))
    )
    if split == "scaled sum":
        factor = graph.call_function(aten.index_select.default, (own["scale"], 0, own["owner"]))
        scaled = graph.call_function(aten.mul.Tensor, (rows, factor))
        found = graph.call_function(aten.add.Tensor, (scaled, rows), {"alpha": 2})
    graph.output(found)
    assert fuse_kernels(graph) == 0


def test_a_recording_emits_what_it_did(monkeypatch: pytest.MonkeyPatch) -> None:
    module, inputs = shared(Blocks), timed(3)
    denoiser = maskfx.compile(module)
    wanted, kept = denoiser.record(**inputs)
    monkeypatch.setattr(ops, "has_kernels", lambda device: True)
    denoiser._executor.graphs.runners.clear()
    found, again = denoiser.record(**inputs)
    assert torch.equal(found, wanted)
    assert kept.rows.keys() == again.rows.keys()
    for name, rows in kept.rows.items():
        other = again.rows[name]
        assert isinstance(rows, Tensor)
        assert isinstance(other, Tensor)
        assert torch.equal(other, rows), name


FAMILIES = [
    pytest.param(name, marks=() if name.startswith("SD3") else pytest.mark.slow)
    for name in dict.fromkeys(
        (*MIXED, "LuminaNextDiT2DModel", "Flux2Transformer2DModel", "AuraFlowTransformer2DModel",
         "HunyuanDiT2DModel", "UNet2DModel")
    )
    if name in ZOO
]  # fmt: skip


@pytest.mark.parametrize("name", FAMILIES)
def test_denoisers_compute_the_same(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Edits and recordings of several sizes in one batch, bit for bit as without fusing."""
    case = ZOO[name]
    denoiser = maskfx.compile(case.build())
    steps = []
    for seed, size in enumerate(case.sizes[:2]):
        inputs = case.inputs(size, seed)
        _, kept = denoiser.record(**inputs)
        mask = masks.MASKS["random"](case.mask_shape(size), seed)
        steps.append(maskfx.EditStep(case.inputs(size, seed + 5), mask, kept, any_step=True))
    wanted = denoiser.edit(steps)
    counts = [operators(fused(p.module).graph) for p in denoiser.programs.values()]
    assert sum(count[fused_name] for count in counts for fused_name in NAMES)
    monkeypatch.setattr(ops, "has_kernels", lambda device: True)
    denoiser._executor.graphs.runners.clear()
    found = denoiser.edit(steps)
    for one, two in zip(pytree.tree_leaves(found), pytree.tree_leaves(wanted), strict=True):
        assert torch.equal(one, two)


def test_a_picture_alone_has_its_windows_fused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The oracle through `compile`, on a device that has kernels."""
    monkeypatch.setattr(ops, "has_kernels", lambda device: True)
    module = nn.Sequential(nn.Conv2d(4, 6, 3, padding=1), nn.SiLU(), nn.Conv2d(6, 4, 3, padding=1))
    ran = Counter[str]()
    product = ops.window_product

    def counted(*args: object) -> Tensor:
        ran["windows"] += 1
        return product(*args)

    monkeypatch.setattr(ops, "window_product", counted)
    denoiser = maskfx.compile(Named(module))
    inputs = picture(1)
    wanted, kept = denoiser.record(**inputs)
    mask = torch.zeros(8, 12, dtype=torch.bool)
    mask[2:4, 3:9] = True
    found = denoiser.edit([maskfx.EditStep(inputs, mask, kept)])[0]
    assert torch.allclose(found, wanted, atol=1e-5)
    assert torch.allclose(wanted, module(inputs["sample"]), atol=1e-5)
    assert ran["windows"] >= 4


class Named(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, sample: Tensor) -> Tensor:
        return self.inner(sample)
