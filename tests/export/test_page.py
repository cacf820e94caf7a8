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
    exec(compile(once, "without-torch", "exec"), vars(page))
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
    template, sigmas, request = page["call"], page["sigmas"], page["request"]
    call = {**template, **{name: torch.from_numpy(value) for name, value in request.items()}}
    for sigma, then in zip(sigmas, sigmas[1:], strict=False):
        now = {"timestep": torch.full((1,), float(sigma))}
        kept = page["den"].record(**{**template, **now})[1]
        step = maskfx.EditStep({**call, **now}, torch.from_numpy(page["mask"]), kept)
        [result] = page["den"].edit([step])
        call["hidden_states"] = call["hidden_states"] + float(then - sigma) * result[0]
    return call["hidden_states"]
