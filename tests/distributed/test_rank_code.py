"""Graphs of ranks as code of Inductor: compiled beside the ranks, and run by all of them."""

from __future__ import annotations

import os
import pickle
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import maskfx
from maskfx import CompiledDenoiser, DenseStep, EditStep
from maskfx.compiler.fuse import fused
from maskfx.config import Settings
from maskfx.distributed.messages import PartResult, WholeResult
from maskfx.distributed.rank_code import RankCode
from maskfx.distributed.rank_group import RankGroup
from maskfx.distributed.rank_step import RankPrograms
from maskfx.ir.programs.head_sources import WAYS, AttentionWay
from maskfx.ir.programs.sources import Cached
from maskfx.runtime.backends import eager
from maskfx.runtime.backends.code_run import CodeKey, CodeRun
from maskfx.runtime.backends.saved_code import SavedPiece, load_code, save_code
from tests.distributed import tiny
from tests.distributed.test_rank_group import EVEN, edit_and_dense, worst
from tests.distributed.test_ranks import BOUND, error, shares
from tests.factories.lora import update_of
from tests.factories.masks import MASKS
from tests.factories.thread_ranks import ThreadRanks

SECONDS = 400.0  # for a compile beside other processes


class CodeHere(RankCode):
    """Code that was compiled in this process; counts how often it runs."""

    runs = 0

    def ran(self, key: CodeKey) -> None:
        self.runs += 1


def compiled_for(
    denoiser: CompiledDenoiser, way: AttentionWay, folder: Path, prepack: bool = False
) -> CodeHere:
    """Return the code of the graph with exchanges, compiled for one dense step of two ranks."""
    code, programs = CodeHere(), RankPrograms(Settings())
    ((program, frame, members),) = denoiser.prepared([DenseStep(tiny.inputs(1, batch=2))])
    own, inputs = programs.example(program, frame, members, way, True)
    waited = [n for n, source in own.interface.inputs.items() if isinstance(source, Cached)]
    save_code(folder, own, fused(own.module, pointwise=False), inputs, waited, prepack)
    code.places[CodeKey(program.code, way, True)] = str(folder)
    return code


@pytest.mark.parametrize(
    ("kind", "way"),
    [
        (tiny.Tiny, "gathered"),
        *(
            pytest.param(kind, way, marks=pytest.mark.slow)
            for kind in (tiny.Tiny, tiny.Joint)
            for way in WAYS
            if (kind, way) != (tiny.Tiny, "gathered")
        ),
    ],
)
def test_one_compile_serves_every_mask_size_batch_and_number_of_ranks(
    kind: Callable[[], nn.Module], way: AttentionWay, tmp_path: Path
) -> None:
    """A UNet's graph and a transformer's, whose edits equal the module's dense run."""
    denoiser = tiny.compiled(kind)
    code = compiled_for(denoiser, way, tmp_path / "code")
    split = ThreadRanks(denoiser.settings, shares("equal", 2, 1), way)
    split.programs = RankPrograms(denoiser.settings, code)
    masks = ("random", "stroke", "one_site", "border")
    for number, (ranks, mask) in enumerate(zip((2, 2, 3, 4), masks, strict=True)):
        for size in ((8, 8, 1), (12, 8, 2)):
            inputs = tiny.inputs(number, *size)
            steps: list[Any] = [
                EditStep(inputs, MASKS[mask](size[:2], number), denoiser.record(**inputs)[1]),
                DenseStep(inputs),
            ]
            split.partition = shares("unequal" if number % 2 else "equal", ranks, 2)
            for found in run_by_code(lambda: denoiser.step(steps, split), code, ranks):  # noqa: B023
                assert error(found, denoiser.module(**inputs)) < 1e-4


def test_code_multiplies_with_the_packed_weights_of_the_operators(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(eager, "WORTH", 0)
    denoiser, inputs = maskfx.compile(tiny.build(), prepack=True), tiny.inputs(3)
    step = EditStep(inputs, MASKS["stroke"]((8, 8), 1), denoiser.record(**inputs)[1])
    code = compiled_for(denoiser, "gathered", tmp_path / "code", prepack=True)
    pieces: list[SavedPiece] = pickle.loads((tmp_path / "code" / "pieces").read_bytes())
    names = {name for piece in pieces for name in piece.packed}
    assert len(names) > 5
    split = ThreadRanks(denoiser.settings, shares("equal", 2, 1))
    programs = split.programs = RankPrograms(denoiser.settings, code)
    denoiser.step([step], split)
    packed = len(programs._packed)
    for _ in range(2):
        (found,) = run_by_code(partial(denoiser.step, [step], split), code, 2)
        assert error(found, denoiser.module(**inputs)) < 1e-4
        assert len(programs._packed) == packed, "the code packs weights of its own"
        denoiser.module.get_parameter("qkv.weight").mul_(1.5)
        programs.follow_weights()
        step = replace(step, cache=denoiser.record(**inputs)[1])


def run_by_code(run: Callable[[], list[Any]], code: CodeHere, ranks: int) -> list[Any]:
    """Run a step until all of its ranks have loaded the code; return its results then."""
    until = time.monotonic() + 60
    while True:
        code.runs = 0
        found = run()
        if code.runs == ranks:
            return found
        assert time.monotonic() < until


def test_code_that_cannot_be_loaded_leaves_the_operators(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "pieces").write_bytes(b"")
    code, key = RankCode(), CodeKey("a", "gathered")
    run = CodeRun(code, key, nn.Module(), lambda fetch: fetch("x") + 1, partial(load_code, {}))
    assert run(lambda name: torch.ones(1)) == 2
    code.begin({key: str(tmp_path)})
    until = time.monotonic() + 60
    while not code.use(tiny.compiled()).failed:
        assert run(lambda name: torch.ones(1)) == 2
        assert time.monotonic() < until
        time.sleep(0.01)
    assert "runs operator by operator, because its code fails: EOFError" in caplog.text
    assert code.place(key) is None


def ran(found: list[PartResult | WholeResult | None]) -> bool:
    return all(one is None or one.code.ran for one in found)


def wait_for_code(
    denoiser: CompiledDenoiser, group: RankGroup, runs: list[Callable[[], list[Any]]]
) -> list[list[Any]]:
    """Repeat steps until ranks run code in all of them; return the results of the last ones."""
    until, done = time.monotonic() + SECONDS, [False] * len(runs)
    results: list[list[Any]] = [[] for _ in runs]
    while not all(done):
        for number, run in enumerate(runs):
            results[number] = run()
            done[number] = ran(group.last)
        assert time.monotonic() < until, denoiser.explain()
        time.sleep(0.2)
    return results


@pytest.mark.slow
def test_ranks_run_code_that_another_process_compiles_while_they_compute() -> None:
    denoiser, plain = maskfx.compile(tiny.build(), inductor=True), tiny.compiled()
    steps, group = edit_and_dense(denoiser), RankGroup(denoiser, 2)
    wanted = plain.step(edit_and_dense(plain))
    try:
        for _ in range(2):  # the second asks for the code
            assert worst(denoiser.step(steps, group.on(2, EVEN)), wanted) < BOUND
            assert not any(part is None or part.code.ran for part in group.last)
        assert "operator by operator: its code is compiled meanwhile" in denoiser.explain()
        code = group.pool.code
        assert code is not None
        until = time.monotonic() + SECONDS
        while code._process is None:
            assert time.monotonic() < until
            time.sleep(0.01)
        os.kill(code._process.child.pid, signal.SIGKILL)  # another one compiles it
        runs = [
            lambda: denoiser.step(steps, group.on(2, EVEN)),
            lambda: group.run(denoiser, steps),
        ]
        for found in wait_for_code(denoiser, group, runs):
            assert worst(found, wanted) < BOUND
        explained = denoiser.explain()
        assert "Ranks run divided members (gathered) by code that Inductor compiled" in explained
        assert "Ranks run whole members by code that Inductor compiled" in explained
        assert group.failures == group.computed_here == 0
        assert all(one.seconds > 0 and one.nbytes > 1 << 20 for one in code.results.values())
        # it follows the weights, and serves sizes that it wasn't compiled for
        other = [DenseStep(tiny.inputs(5, 12, 8, batch=2))]
        found = denoiser.step(other, group.on(2))
        assert ran(group.last)
        assert worst(found, [denoiser.module(**tiny.inputs(5, 12, 8, batch=2))]) < 1e-4
    finally:
        group.stop()
    assert denoiser.code.source is None


@pytest.mark.slow
def test_code_of_a_batch_with_adapters() -> None:
    denoiser, plain = maskfx.compile(tiny.build(), inductor=True), tiny.compiled()
    own, inputs = (update_of(denoiser.module, 4, 1),), tiny.inputs(3)
    mask, group = MASKS["stroke"]((8, 8), 1), RankGroup(denoiser, 2)
    edit = EditStep(inputs, mask, denoiser.record(**inputs)[1], adapters=own)
    (wanted,) = plain.step([EditStep(inputs, mask, plain.record(**inputs)[1], adapters=own)])
    try:
        split = group.on(2, shares("equal", 2, 1))
        runs = [lambda: denoiser.step([edit], split), lambda: group.run(denoiser, [edit])]
        for found in wait_for_code(denoiser, group, runs):
            assert error(found[0], wanted) < BOUND
    finally:
        group.stop()


@pytest.mark.slow
def test_a_compile_that_fails_leaves_the_operators(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("CXX", "/nonexistent")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    denoiser, plain = maskfx.compile(tiny.build(), inductor=True), tiny.compiled()
    steps, group = edit_and_dense(denoiser), RankGroup(denoiser, 2)
    wanted = plain.step(edit_and_dense(plain))
    try:
        until = time.monotonic() + SECONDS
        while "its compile failed" not in denoiser.explain():
            assert worst(denoiser.step(steps, group.on(2, EVEN)), wanted) < BOUND
            assert time.monotonic() < until
            time.sleep(0.2)
        assert "operator by operator" in caplog.text
        assert worst(denoiser.step(steps, group.on(2, EVEN)), wanted) < BOUND
        assert group.failures == group.computed_here == 0
    finally:
        group.stop()
