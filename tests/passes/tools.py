"""What the tests of passes share: a graph just before and just after one pass, and its values.

A case is a tiny module and a maker of its inputs, `make(seed, wide)`; `wide` gives another size.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

import maskfx
from maskfx.compiler.annotate import fresh_copy
from maskfx.ir.geometry.pyramid import Pyramid
from maskfx.ir.programs.program import Interface
from maskfx.passes.context import PassContext, op_name
from maskfx.passes.pipeline import PIPELINE, PassFunction, run_passes
from maskfx.runtime.programs.shared_programs import shared_programs
from tests.factories import twin

Inputs = dict[str, Any]
Make = Callable[..., Inputs]

TOLERANCE = 1e-4


def numbers(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def picture(seed: int = 0, wide: bool = False) -> Inputs:
    """A latent of four channels."""
    return {"sample": numbers(2, 4, 8, 16 if wide else 12, seed=seed)}


def token_numbers(seed: int = 0, wide: bool = False) -> Inputs:
    """A picture of token numbers below six."""
    noise = numbers(2, 8, 16 if wide else 12, seed=seed)
    return {"input_ids": (noise.sigmoid() * 6).long()}


def timed(seed: int = 0, wide: bool = False) -> Inputs:
    """A latent and its timesteps."""
    return {**picture(seed, wide), "timestep": torch.tensor([3.0, 7.0]) + seed}


def tokens(seed: int = 0, wide: bool = False) -> Inputs:
    """Packed image tokens of eight features."""
    return {"hidden_states": numbers(2, 26 if wide else 20, 8, seed=seed)}


def joint(seed: int = 0, wide: bool = False) -> Inputs:
    """Packed image tokens, and text tokens that stay the same in all steps."""
    return {**tokens(seed, wide), "encoder_hidden_states": numbers(2, 5, 8, seed=50)}


@dataclass
class Run:
    """One pass on one graph."""

    function: PassFunction
    module: fx.GraphModule
    ctx: PassContext
    rewrites: int
    code_before: str
    code: str
    before: Counter[str]
    after: Counter[str]

    @property
    def graph(self) -> fx.Graph:
        return self.module.graph

    @property
    def unchanged(self) -> bool:
        """The pass found nothing and left the graph alone."""
        return self.rewrites == 0 and self.code == self.code_before

    def second_run_is_idle(self) -> bool:
        """The pass finds nothing in what it wrote."""
        rewrites = self.function(self.graph, self.ctx)
        return rewrites == 0 and code_of(self.graph) == self.code

    def gained(self, name: str) -> int:
        """How many more operators of this name there are after the pass."""
        return self.after[name] - self.before[name]


def code_of(graph: fx.Graph) -> str:
    return graph.python_code("self").src


def operators(graph: fx.Graph) -> Counter[str]:
    return Counter(op_name(n) for n in graph.nodes if n.op == "call_function")


def nodes_of(graph: fx.Graph, name: str) -> list[fx.Node]:
    return [n for n in graph.nodes if op_name(n) == name]


_denoisers: WeakKeyDictionary[nn.Module, maskfx.CompiledDenoiser] = WeakKeyDictionary()


def denoiser_of(module: nn.Module, make: Make) -> maskfx.CompiledDenoiser:
    """The compiled module, one per module, since capture is the slow part."""
    if module not in _denoisers:
        shared_programs().clear()  # one that was read has no symbols that passes could run on
        _denoisers[module] = maskfx.compile(module)
        _denoisers[module].batch([make(0)])
    return _denoisers[module]


def run_pass(
    function: PassFunction,
    module: nn.Module,
    make: Make,
    plans: bool = False,
    stretches: bool = False,
) -> Run:
    """The pipeline up to `function`, with what the compiler runs in full, and then `function`."""
    compilation = denoiser_of(module, make).compilations[0]
    found = compilation.capture
    assert found.module is not None, found.notes
    place = next(i for i, p in enumerate(PIPELINE) if p.run is function)
    graph_module = fresh_copy(found.module)
    ctx = PassContext(
        interface=Interface(pyramid=copy.deepcopy(found.pyramid)),
        symbols=found.symbols,
        dense=dict(compilation.reasons),
        plans=plans,
        stretches=stretches,
    )
    run_passes(graph_module.graph, ctx, PIPELINE[:place])
    return apply(function, graph_module, ctx)


def apply(function: PassFunction, module: fx.GraphModule, ctx: PassContext) -> Run:
    """`function`, and the cleanup that the runner does after it."""
    graph = module.graph
    before, code_before = operators(graph), code_of(graph)
    rewrites = function(graph, ctx)
    if rewrites:
        graph.eliminate_dead_code()
    graph.lint()
    code, after = code_of(graph), operators(graph)
    return Run(function, module, ctx, rewrites, code_before, code, before, after)


def plain_context() -> PassContext:
    """For graphs that no capture made."""
    return PassContext(interface=Interface(pyramid=Pyramid(batch=2)), symbols={})


def error(found: Any, wanted: Any) -> float:
    """The largest difference, in units of the largest wanted value."""
    a, b = pytree.tree_leaves(found), pytree.tree_leaves(wanted)
    assert len(a) == len(b)
    worst = 0.0
    for x, y in zip(a, b, strict=True):
        assert x.shape == y.shape, (x.shape, y.shape)
        assert x.dtype == y.dtype
        gap = ((x - y).abs().max() / y.abs().max().clamp(min=1e-6)).item()
        worst = max(worst, gap if gap == gap else float("inf"))
    return worst


def a_mask(inputs: Mapping[str, Any]) -> Tensor:
    """Some sites of the first argument: a corner and a few in the middle."""
    value = next(iter(inputs.values()))
    grid = value.dim() == 4 or not value.is_floating_point()
    shape = value.shape[-2:] if grid else value.shape[1:2]
    mask = torch.zeros(shape, dtype=torch.bool).view(-1)
    mask[0], mask[len(mask) // 2 : len(mask) // 2 + 3], mask[-4] = True, True, True
    return mask.view(shape)


def check_values(
    module: nn.Module,
    make: Make,
    *,
    dense: int = 0,
    text_first: bool | None = None,
    oracle: bool = True,
) -> None:
    """Dense, recorded and edited results are the module's, and `dense` operators ran in full."""
    denoiser = denoiser_of(module, make)
    first, second = make(0), make(1, wide=True)
    wanted = module(**first)
    small, large = denoiser.batch([first, second])
    compilation = denoiser.compilations[0]
    assert all(one.program is not None for one in denoiser.compilations), compilation.reasons
    assert len(compilation.reasons) == dense, compilation.reasons
    assert error(small, wanted) < TOLERANCE
    assert error(large, module(**second)) < TOLERANCE
    output, kept = denoiser.record(**first)
    assert error(output, wanted) < TOLERANCE
    mask = a_mask(first)
    again = denoiser.edit([maskfx.EditStep(first, mask, kept)])[0]
    assert error(again, wanted) < TOLERANCE
    if not oracle:
        return
    changed = make(2)
    _, recording = twin.record(module, first)
    expected = twin.edit(module, changed, mask, recording, text_first=text_first)
    found = denoiser.edit([maskfx.EditStep(changed, mask, kept, any_step=True)])[0]
    assert error(found, expected) < TOLERANCE
    assert error(found, wanted) > TOLERANCE  # the changed inputs count


@cache
def shared(make_module: Callable[[], nn.Module]) -> nn.Module:
    """One module for all tests of a class, so that it is captured once."""
    return make_module()
