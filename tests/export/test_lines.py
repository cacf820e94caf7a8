"""Exports of denoisers that work along the lines of a picture, or in each frame of a video."""

from pathlib import Path

import pytest

from maskfx.export.exporter import export
from tests.export.test_host_step import check_steps
from tests.factories.own_cases import OWN
from tests.factories.zoo import ZOO

QUICK = "motion-text-for-each-frame"
NAMES = (QUICK, "film-in-turn", "motion-one-text", "motion-one-key", "axial")
names = pytest.mark.parametrize(
    "name", [n if n == QUICK else pytest.param(n, marks=pytest.mark.slow) for n in NAMES]
)


@names
def test_onnxruntime_agrees_with_the_denoiser(name: str, tmp_path: Path) -> None:
    case = OWN[name]
    inputs = case.inputs(case.sizes[0], 0)
    found = export(case.build(), tmp_path / "x", example_inputs=inputs)
    verdicts = found.verdicts["denoiser"]
    assert {v.graph for v in verdicts} == {"edit", "record", "dense"}
    assert len({str(v.sizes) for v in verdicts}) == 2
    assert max(v.error for v in verdicts) < 1e-4


@names
@pytest.mark.parametrize("low", [False, True])
def test_the_host_makes_tables_of_lines(
    name: str, low: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(ZOO, name, OWN[name])
    check_steps(name, OWN[name].sizes[:2], low)
