"""What an actor checks of its node before it becomes a worker. No cluster is started."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import maskfx

pytest.importorskip("ray", reason="needs the extra `ray`")

from maskfx.serve.workers.ray_actor import actor_class, label_of


def test_a_node_with_the_same_version_is_accepted() -> None:
    actor_class()(maskfx.__version__)


def test_a_node_with_another_version_states_both_and_what_to_do() -> None:
    with pytest.raises(RuntimeError) as caught:
        actor_class()("9.9")
    text = str(caught.value)
    assert text.startswith("node ")
    assert f"has maskfx {maskfx.__version__}, the server has 9.9" in text
    assert text.endswith("install maskfx 9.9 there, with its extras serve and ray")


def test_a_node_without_maskfx_gets_the_class_and_states_that(tmp_path: Path) -> None:
    """In a process that can't import maskfx: the class is sent as code."""
    from ray import cloudpickle

    sent = tmp_path / "class"
    sent.write_bytes(cloudpickle.dumps(actor_class()))
    code = "import sys; sys.modules['maskfx'] = None\n"
    code += "import pickle; made = pickle.load(open(sys.argv[1], 'rb'))\n"
    code += "try:\n    made('9.9')\nexcept RuntimeError as error:\n    print(error)"
    found = subprocess.run(
        [sys.executable, "-P", "-c", code, str(sent)],
        env={**os.environ, "PYTHONPATH": ""},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert "has no maskfx" in found.stdout
    assert "install maskfx 9.9 there" in found.stdout


def test_a_nodes_label_is_short() -> None:
    assert label_of("26aab8510f" * 5) == "26aab851"
