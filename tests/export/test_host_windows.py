"""The host reads the same windows with the same weights as the runtime, at all sizes and kinds."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest

from maskfx.export.exporter import export
from maskfx.export.host import layout as host_layout
from maskfx.export.host import windows as host
from maskfx.ir.pyramid import Window
from maskfx.runtime.sites import windows
from tests.factories.own_cases import OWN

THREE, ONE = (3, 3), (1, 1)
WINDOWS = [
    Window(0, 1, THREE, (2, 2), ONE),
    Window(0, 1, THREE, ONE, (2, 1), (2, 1), edge="reflect"),
    Window(0, 1, THREE, ONE, ONE, edge="circular"),
    Window(0, 1, THREE, ONE, ONE, edge="replicate"),
    Window(0, 1, (4, 4), ONE, (-1, -1), (-1, -1), inserted=(2, 2)),
    Window(0, 1, THREE, (2, 2), ONE, counts="inside"),
    Window(0, 1, THREE, (2, 2), ONE, counts="padded"),
    Window(0, 1, ONE, ONE, (0, 0), rounding="nearest"),
    Window(0, 1, ONE, ONE, (0, 0), rounding="nearest-exact"),
    Window(0, 1, (2, 2), ONE, (0, 0), rounding="bilinear", scale=(2.0, 2.0)),
    Window(0, 1, (4, 4), ONE, (0, 0), rounding="bicubic-aligned"),
    Window(0, 1, (9, 9), ONE, (0, 0), rounding="bicubic-antialiased"),
    Window(0, 1, THREE, ONE, (0, 0), rounding="area"),
]


@pytest.mark.parametrize("window", WINDOWS, ids=lambda w: w.name)
@pytest.mark.parametrize(("source", "target"), [((8, 6), (4, 3)), ((9, 7), (5, 4))])
def test_the_host_reads_what_the_runtime_reads(
    window: Window, source: tuple[int, int], target: tuple[int, int]
) -> None:
    own = host_layout.Window(**asdict(window))
    found = host.full_window(own, source, target)
    assert np.array_equal(found, windows.full_window(window, source, target).numpy())
    if window.weighted:
        weights = windows.window_weights(window, source, target).numpy()
        assert np.allclose(host.window_weights(own, source, target), weights)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["paddings", "bilinear", "strided", "cbam", "shifted-windows"])
def test_graphs_of_own_denoisers_agree_with_them(name: str, tmp_path: Path) -> None:
    case = OWN[name]
    found = export(case.build(), tmp_path / "x", example_inputs=case.inputs(case.sizes[0], 0))
    verdicts = found.verdicts["denoiser"]
    assert {v.graph for v in verdicts} == {"edit", "record", "dense"}
    assert max(v.error for v in verdicts) < 1e-4
