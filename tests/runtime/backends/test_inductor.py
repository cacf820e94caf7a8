"""Inductor: one compile serves every mask, size and number of requests."""

from contextlib import closing
from typing import Any

import pytest
import torch
import torch._inductor.config as inductor_config
from torch import Tensor, nn
from torch._dynamo.utils import counters

import maskfx
from maskfx.ir.programs.sources import Rest
from maskfx.runtime.backends import inductor
from maskfx.runtime.backends.pieces import PieceRunner
from maskfx.runtime.execution.prefetch import Stopwatch
from tests.passes.test_cut_keys import Block
from tests.passes.tools import error


class Stack(nn.Module):
    """Blocks of attention over pictures, more than a pyramid has levels."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.into, self.out = nn.Conv2d(4, 8, 3, padding=1), nn.Conv2d(8, 4, 3, padding=1)
        self.blocks = nn.ModuleList(Block() for _ in range(count))

    def forward(self, sample: Tensor, timestep: Tensor) -> Tensor:
        wide = self.into(sample)
        rows = wide.flatten(2).transpose(1, 2)
        for block in self.blocks:
            rows = block(rows, timestep)
        return sample + self.out(rows.transpose(1, 2).reshape(wide.shape))


def inputs(batch: int, height: int, width: int, seed: int = 0) -> dict[str, Tensor]:
    torch.manual_seed(seed)
    steps = torch.arange(batch, dtype=torch.float32)
    return {"sample": torch.randn(batch, 4, height, width), "timestep": steps}


MASKS = {
    "one site": lambda size: torch.arange(size[0] * size[1]).view(size) == 3,
    "full": lambda size: torch.ones(size, dtype=torch.bool),
    "some": lambda size: torch.arange(size[0] * size[1]).view(size) % 3 == 0,
    "corner": lambda size: (torch.arange(size[0])[:, None] < 2) & (torch.arange(size[1]) < 2),
}
SIZES = ((8, 8), (6, 10), (10, 7))


@pytest.mark.parametrize("prepack", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_one_compile_serves_every_mask_size_and_batch(prepack: bool) -> None:
    module, before = Stack(2).eval(), inductor.compiles
    counters["aot_autograd"].clear()
    denoiser = maskfx.compile(module, inductor=True, prepack=prepack)
    members, wanted = [], []
    for batch, size in ((1, SIZES[0]), (2, SIZES[1]), (1, SIZES[2])):
        arguments = inputs(batch, *size)
        _, cache = denoiser.record(**arguments)
        for mask in MASKS.values():
            members.append(maskfx.EditStep(arguments, mask(size), cache))
            wanted.append(module(**arguments))
    for step, expected in zip(members, wanted, strict=True):
        assert error(denoiser.edit([step])[0], expected) < 1e-5
    assert error(denoiser.edit(members[:8]), wanted[:8]) < 1e-5
    assert inductor.compiles == before + 1
    with torch.no_grad():
        module.get_parameter("into.weight").mul_(1.5)
    found = denoiser.step([maskfx.DenseStep(arguments)])
    assert error(found, [module(**arguments)]) < 1e-5, "it follows its weights"
    bypassed = counters["aot_autograd"]["autograd_cache_bypass"]
    assert bool(bypassed) is prepack, "kept on disk for later processes, unless weights are packed"


def test_stretches_share_one_compile() -> None:
    module, before = Stack(3).eval(), inductor.compiles
    denoiser = maskfx.compile(module, inductor=True, stretches=True)
    arguments = inputs(1, 8, 8)
    _, cache = denoiser.record(**arguments)
    assert len(denoiser.stretches) >= 3
    mask = MASKS["some"]((8, 8))
    for chosen in ((), (1, 2), (2, 3), range(1, len(denoiser.stretches) + 1)):
        wide = {stretch: mask | True for stretch in chosen}
        found = denoiser.edit([maskfx.EditStep(arguments, mask, cache, wide=wide)])[0]
        assert error(found, module(**arguments)) < 1e-5
    assert inductor.compiles == before + 1


def test_with_a_loader_code_is_cut_where_it_reads_loaded_rows() -> None:
    """A piece runs before the rows of the next one are asked for, at every size and mask."""
    module = Stack(3).eval()
    with closing(maskfx.Loader()) as loader:
        denoiser = maskfx.compile(module, inductor=True, loader=loader)
        for batch, size in ((1, SIZES[0]), (2, SIZES[1]), (1, SIZES[2])):
            arguments = inputs(batch, *size)
            _, cache = denoiser.record(**arguments)
            for mask in MASKS.values():
                found = denoiser.edit([maskfx.EditStep(arguments, mask(size), cache)])[0]
                assert error(found, module(**arguments)) < 1e-5
        (runner,) = (
            r for r in denoiser._executor.graphs.runners.values() if isinstance(r, PieceRunner)
        )
        assert len(runner.pieces) >= 3
        asked: list[str] = []
        for number, run in enumerate(runner._runs):
            runner._runs[number] = marked(run, f"piece {number}", asked)
        denoiser.watch = watch = Stopwatch()
        denoiser.edit([maskfx.EditStep(arguments, MASKS["some"](size), cache)])
    loads = {name for name, source in denoiser_inputs(denoiser) if isinstance(source, Rest)}
    places = [name if name in loads else "" for name, _, _ in watch.marks]
    assert [name for name in places if name], "nothing was loaded"
    read = [piece.inputs for piece in runner.pieces]
    assert sum(bool(loads & set(names)) for names in read) >= 3, "one piece reads all loads"
    assert asked == [f"piece {number}" for number in range(len(runner.pieces))]


def marked(run: Any, name: str, asked: list[str]) -> Any:
    def ran(fetch: Any) -> Any:
        asked.append(name)
        return run(fetch)

    return ran


def denoiser_inputs(denoiser: maskfx.CompiledDenoiser) -> Any:
    (program,) = denoiser.programs.values()
    return program.interface.inputs.items()


@pytest.mark.slow
def test_plans_of_many_regions_share_one_compile() -> None:
    module, before = Stack(18).eval(), inductor.compiles
    denoiser = maskfx.compile(module, inductor=True, plans=True)
    arguments = inputs(1, 8, 8)
    _, cache = denoiser.record(**arguments)
    assert len(denoiser.regions) == 18
    mask = MASKS["some"]((8, 8))
    for chosen in ((), (1, 2, 18), tuple(range(1, 19))):
        plan = {region: mask | True for region in chosen}
        found = denoiser.edit([maskfx.EditStep(arguments, mask, cache, plan=plan)])[0]
        assert error(found, module(**arguments)) < 1e-5
    assert inductor.compiles == before + 1


def test_code_without_vectors_is_told_of_and_kept_apart(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    inductor.vector_bits.cache_clear()
    wide = inductor.vector_bits()
    inductor.vector_bits.cache_clear()
    monkeypatch.setattr(inductor, "pick_vec_isa", lambda: None)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX2")
    try:
        assert inductor.vector_bits() == 1 != wide
        assert "vector instructions failed" in caplog.text
        seen = []
        real = torch._inductor.standalone_compile

        def watched(*args: Any, **kwargs: Any) -> Any:
            seen.append(inductor_config.cpp.simdlen)
            return real(*args, **kwargs)

        monkeypatch.setattr(torch._inductor, "standalone_compile", watched)
        denoiser = maskfx.compile(Stack(1).eval(), inductor=True)
        arguments = inputs(1, *SIZES[0])
        wanted, cache = denoiser.record(**arguments)
        edit = maskfx.EditStep(arguments, MASKS["some"](SIZES[0]), cache)
        assert error(denoiser.edit([edit])[0], wanted) < 1e-4
        assert seen
        assert set(seen) == {1}
    finally:
        inductor.vector_bits.cache_clear()
