"""mode="patch_batch": dense requests of several sizes share steps the way that measures faster."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

import maskfx
from maskfx.pipelines import execute
from maskfx.pipelines.execute import CallMember, run_by_module
from maskfx.runtime.dense_ways import TRIES, DenseWay, DenseWays
from maskfx.runtime.steps import DenseStep
from tests.passes.tools import error
from tests.runtime.backends.test_inductor import Stack, inputs

SIZES = ((8, 8), (6, 10), (8, 8))


def members() -> list[CallMember]:
    """One per request, of two sizes."""
    steps = [DenseStep(inputs(1, *size)) for size in SIZES]
    found: list[Any] = [
        CallMember(SimpleNamespace(run=object()), SimpleNamespace(), step)  # type: ignore[arg-type]
        for step in steps
    ]
    return found


@pytest.fixture(scope="module")
def module() -> Any:
    return Stack(1).eval()


@pytest.mark.parametrize("faster", list(DenseWay))
def test_either_way_gives_the_modules_results(
    module: Any, faster: DenseWay, monkeypatch: pytest.MonkeyPatch
) -> None:
    add, ran = DenseWays.add, list[DenseWay]()

    def faked(own: DenseWays, count: int, sizes: int, way: DenseWay, took: float, n: int) -> None:
        assert (count, sizes, n) == (3, 2, 8 * 8 + 6 * 10 + 8 * 8)
        assert took > 0
        ran.append(way)
        add(own, count, sizes, way, 1.0 if way is faster else 2.0, n)

    monkeypatch.setattr(DenseWays, "add", faked)
    denoiser = maskfx.compile(module, mode="patch_batch")
    for _ in range(2 * TRIES + 3):
        own = members()
        assert run_by_module(denoiser, own) == []
        for member in own:
            assert error(member.result, module(**member.step.inputs)) < 1e-5
    assert ran[2 * TRIES :] == [faster] * 3
    assert "3 dense requests of 2 sizes" in denoiser.explain()
    assert f"runs as {faster}" in denoiser.explain()


def test_a_step_in_rows_that_fails_is_left_and_the_module_takes_over(
    module: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    denoiser = maskfx.compile(module, mode="patch_batch")

    def broken(steps: object) -> Any:
        raise MemoryError("no room for rows")

    monkeypatch.setattr(denoiser, "step", broken)
    left = [len(run_by_module(denoiser, members())) for _ in range(2 * TRIES + 2)]
    assert left == [3] * TRIES + [0] * (TRIES + 2)


def test_other_modes_run_the_module_alone(module: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object) -> Any:
        raise AssertionError("nothing is measured")

    monkeypatch.setattr(execute, "run_measured", refused)
    for mode in ("dense", "mask_cache"):
        denoiser = maskfx.compile(module, mode=mode)
        own = members()
        assert run_by_module(denoiser, own) == []
        for member in own:
            assert error(member.result, module(**member.step.inputs)) < 1e-5
        assert not denoiser.programs
