"""mode="mask_cache": whole pictures of several sizes share steps the way that measures faster."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

import maskfx
from maskfx.pipelines.compile import pipeline_state_of
from maskfx.pipelines.runs.dense_members import run_by_module
from maskfx.pipelines.runs.step_members import CallMember
from maskfx.runtime.denoiser import CompiledDenoiser
from maskfx.runtime.dense_ways import TRIES, DenseBatch, DenseWay, DenseWays
from maskfx.runtime.steps import DenseStep, EditStep
from tests.factories.pipelines import PIPES, call_of, distance, latents, noise
from tests.passes.tools import error
from tests.runtime.backends.test_inductor import Stack, inputs

NAME = "FluxPipeline"
SIZES = ((8, 8), (6, 10), (8, 8))


def members(sizes: Any = SIZES, runs: int | None = None) -> list[CallMember]:
    """Dense members, each of its own run, or of `runs` in turn."""
    own = [object() for _ in range(runs or len(sizes))]
    found: list[Any] = [
        CallMember(SimpleNamespace(run=own[n % len(own)]), SimpleNamespace(), DenseStep(given))  # type: ignore[arg-type]
        for n, given in enumerate(inputs(1, *size) for size in sizes)
    ]
    return found


def recorded(module: Any) -> CompiledDenoiser:
    """A denoiser that a recording made a program of."""
    found: CompiledDenoiser = maskfx.compile(module)
    found.record(**inputs(1, 8, 8))
    assert found.programs
    return found


@pytest.fixture(scope="module")
def module() -> Any:
    return Stack(1).eval()


@pytest.mark.parametrize("faster", list(DenseWay))
def test_either_way_gives_the_modules_results(
    module: Any, faster: DenseWay, monkeypatch: pytest.MonkeyPatch
) -> None:
    add = DenseWays.add

    def faked(own: DenseWays, batch: DenseBatch, way: DenseWay, took: float, n: int) -> None:
        add(own, batch, way, 1.0 if way is faster else 2.0, n)

    monkeypatch.setattr(DenseWays, "add", faked)
    denoiser = recorded(module)
    assert "one call of the module per size" not in denoiser.explain()
    for _ in range(2 * TRIES + 3):
        own = members()
        assert run_by_module(denoiser, own) == []
        for member in own:
            assert error(member.result, module(**member.step.inputs)) < 1e-5
    slower = next(way for way in DenseWay if way is not faster)
    assert denoiser.dense_ways.steps == {faster: TRIES + 3, slower: TRIES}
    assert "per size, as measured, if their sizes differ:" in denoiser.explain()
    assert f"runs as {faster}" in denoiser.explain()


@pytest.mark.parametrize(
    ("sizes", "runs"), [(SIZES, 1), (((8, 8),) * 3, None)], ids=["one run", "one size"]
)
def test_the_module_runs_one_run_and_one_size(module: Any, sizes: Any, runs: int | None) -> None:
    """A run alone is the module itself, bit for bit."""
    denoiser = recorded(module)
    for _ in range(2 * TRIES):
        own = members(sizes, runs)
        assert run_by_module(denoiser, own) == []
        if runs == 1:
            for member in own:
                assert torch.equal(member.result, module(**member.step.inputs))  # type: ignore[arg-type]
    assert not denoiser.dense_ways.steps


def test_nothing_is_captured_for_them(module: Any) -> None:
    denoiser = maskfx.compile(module)
    for _ in range(2 * TRIES):
        assert run_by_module(denoiser, members()) == []
    assert not denoiser.programs
    assert not denoiser.dense_ways.steps


def test_an_edit_beside_them_stays(module: Any) -> None:
    denoiser = recorded(module)
    given = inputs(1, 8, 8)
    _, cache = denoiser.record(**given)
    own = members()
    edit = EditStep(given, torch.ones(8, 8, dtype=torch.bool), cache)
    own.append(CallMember(SimpleNamespace(run=object()), SimpleNamespace(), edit))  # type: ignore[arg-type]
    assert run_by_module(denoiser, own) == own[3:]
    assert denoiser.dense_ways.steps.total() == 1


def test_requests_of_several_sizes_in_an_engine() -> None:
    """Both ways, in turn until both are measured: each picture is the one it is alone."""
    pipe = maskfx.compile(PIPES[NAME].build(), quality="all-steps")
    (denoiser,) = pipeline_state_of(pipe).denoisers.values()

    def call(seed: int) -> dict[str, Any]:
        given = {**call_of(PIPES[NAME], seed), "generator": noise(seed), "num_inference_steps": 6}
        return given | ({"height": 48} if seed % 2 else {})

    latents(pipe, **call(0), record=True)  # makes the program

    wanted = [latents(pipe, **call(seed)) for seed in range(3)]
    assert not denoiser.dense_ways.steps
    with maskfx.Engine(maskfx.BatchPolicy(patience=1.0)) as engine:
        tickets = [
            engine.submit(pipe, **call(seed), output_type="latent", return_dict=False)
            for seed in range(3)
        ]
        found = [ticket.result()[0] for ticket in tickets]
        assert max(step.requests for step in engine.steps) == 3
    for one, other in zip(found, wanted, strict=True):
        assert one.shape == other.shape
        assert distance(one, other) < 1e-4
    assert denoiser.dense_ways.steps.keys() == set(DenseWay)
