"""The page on editing without PyTorch: its second script runs where torch can't be imported."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

import maskfx

ROOT = Path(__file__).resolve().parent.parent.parent
BLOCK = re.compile(r"^```python\n(.*?)^```", re.M | re.S)
BLOCKED = (
    "import sys\nfor name in ('torch', 'diffusers', 'safetensors'): sys.modules[name] = None\n"
)


def blocks(page: str) -> list[str]:
    return BLOCK.findall((ROOT / "docs" / "how-to" / f"{page}.md").read_text(encoding="utf-8"))


def test_the_request_takes_thirty_lines():
    _, request = blocks("without-torch")
    assert len([line for line in request.splitlines() if line.strip()]) <= 30
    assert "torch" not in request.replace("onnxruntime", "")


@pytest.mark.slow
def test_a_request_is_answered_without_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    pytest.importorskip("onnxruntime")
    monkeypatch.chdir(tmp_path)
    page = ModuleType("page")
    monkeypatch.setitem(sys.modules, "page", page)
    once, request = blocks("without-torch")
    for block in (blocks("denoisers")[0], once):
        exec(compile(block, "without-torch", "exec"), vars(page))
    done = subprocess.run(
        [sys.executable, "-c", BLOCKED + request],
        env={"PYTHONPATH": str(ROOT), "PATH": "", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    found = np.load("latents.npy")
    wanted = edited(vars(page)).numpy()
    assert np.linalg.norm(found - wanted) / np.linalg.norm(wanted) < 1e-4


def edited(page: dict[str, Any]) -> torch.Tensor:
    """The same request, by the compiled denoiser."""
    denoiser, timesteps, sample = page["den"], page["timesteps"], page["edit"]["sample"]
    for step, (now, then) in enumerate(zip(timesteps, timesteps[1:], strict=False)):
        template = {**page["template"], "timestep": int(now)}
        kept = denoiser.record(**template)[1]
        call = {**page["edit"], "sample": sample, "timestep": int(now)}
        [result] = denoiser.edit([maskfx.EditStep(call, page["sites"], kept)])
        sample = sample + (then - now) / 1000 * result[0]
        assert step < 3
    return sample
