"""Exported graphs of windows of many kinds: the host reads them as the runtime does."""

from __future__ import annotations

from pathlib import Path

import pytest

from maskfx.export.exporter import export
from tests.factories.own_cases import OWN

NAMES = ["paddings", "bilinear", "strided", "cbam", "shifted-windows", "multiple", "far-rolls"]


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_graphs_of_own_denoisers_agree_with_them(name: str, tmp_path: Path) -> None:
    case = OWN[name]
    found = export(case.build(), tmp_path / "x", example_inputs=case.inputs(case.sizes[0], 0))
    verdicts = found.verdicts["denoiser"]
    assert {v.graph for v in verdicts} == {"edit", "record", "dense"}
    assert max(v.error for v in verdicts) < 1e-4
