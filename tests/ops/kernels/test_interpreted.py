"""Runs the tests of kernels in a process with Triton's interpreter, where there is no GPU."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from maskfx.ops.kernels.serves import triton_is_there
from tests.ops.kernels.tools import HERE, REASON

ROOT = Path(__file__).resolve().parents[3]

# marks and names of the tests, and how many there are at least; slow ones apart, for their time
PARTS = [
    ("not slow", "test", 5),
    pytest.param("slow", "test_attend", 10, marks=pytest.mark.slow),
    pytest.param("slow", "UNet2D", 1, marks=pytest.mark.slow),
    pytest.param("slow", "not test_attend and not UNet2D", 2, marks=pytest.mark.slow),
]


@pytest.mark.skipif(HERE, reason="the kernels' tests run in this process")
@pytest.mark.skipif(not triton_is_there(), reason=REASON)
@pytest.mark.parametrize(("marked", "named", "least"), PARTS)
def test_kernels_in_the_interpreter(marked: str, named: str, least: int) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-m", marked, "--tb=short", "-n", "0"]
    command += ["-k", named]
    command += ["-p", "no:cacheprovider", str(Path(__file__).parent)]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    environment.pop("PYTEST_ADDOPTS", None)
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=550
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed is not None, done.stdout
    assert int(passed[1]) >= least
