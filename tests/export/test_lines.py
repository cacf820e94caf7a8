"""Exports of denoisers that work along lines, in each frame of a video, or between samples."""

from pathlib import Path

import pytest

from tests.export.hosted import check_export
from tests.export.test_host_step import check_steps
from tests.factories.own_cases import OWN
from tests.factories.zoo import ZOO

QUICK = "motion-text-for-each-frame"
NAMES = (QUICK, "film-in-turn", "motion-one-text", "motion-one-key", "axial", "companions")
names = pytest.mark.parametrize(
    "name", [n if n == QUICK else pytest.param(n, marks=pytest.mark.slow) for n in NAMES]
)


@names
def test_onnxruntime_agrees_with_the_denoiser(name: str, tmp_path: Path) -> None:
    check_export(OWN[name], tmp_path / "x")


@names
@pytest.mark.parametrize("low", [False, True])
def test_the_host_makes_tables_of_lines(
    name: str, low: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(ZOO, name, OWN[name])
    check_steps(name, OWN[name].sizes[:2], low)
