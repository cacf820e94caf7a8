"""The host runs where torch isn't installed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from maskfx.export.manifest import write_manifest
from maskfx.runtime.cache.serialize import encode
from tests.export.hosted import arrays, denoiser_of, host_inputs, host_of, recording_of
from tests.factories.masks import MASKS
from tests.factories.zoo import ZOO

FLUX = "FluxTransformer2DModel"

SCRIPT = """
import sys
for name in ("torch", "safetensors", "diffusers", "PIL", "xxhash"):
    sys.modules[name] = None
import numpy as np
from maskfx.export.host import Edit, Host, find_steps, read_step
from maskfx.export.host.stored import decode_step

host = Host.read(sys.argv[1])
given = dict(np.load(f"{sys.argv[1]}/arguments.npz"))
mask = given.pop("mask")
recording = decode_step(open(f"{sys.argv[1]}/step", "rb").read())

def run(graph, inputs):
    np.savez(f"{sys.argv[1]}/{graph}-inputs.npz", **inputs)
    return np.load(f"{sys.argv[1]}/{graph}.npz").values()

[result] = host.step([Edit(given, mask, recording)], run)
np.save(f"{sys.argv[1]}/result.npy", result.outputs[0])
assert not [m for m in sys.modules if m.split(".")[0] == "torch" and sys.modules[m]]
"""


@pytest.mark.slow
def test_a_step_needs_numpy_alone(tmp_path: Path):
    case, size = ZOO[FLUX], ZOO[FLUX].sizes[0]
    host, run = host_of(FLUX, (), size, True)
    inputs, kept = case.inputs(size, 0), denoiser_of(FLUX).record(**case.inputs(size, 0))[1]
    mask = MASKS["stroke"](case.mask_shape(size), 0).numpy()
    write_manifest(host.manifest, tmp_path)
    (tmp_path / "step").write_bytes(encode(kept))
    given: dict[str, Any] = {k: v for k, v in arrays(inputs).items() if isinstance(v, np.ndarray)}
    np.savez(tmp_path / "arguments.npz", mask=mask, **given)
    outputs = {}

    def saved(graph: str, values: dict[str, np.ndarray]) -> list[np.ndarray]:
        outputs[graph] = run(graph, values)
        numbered: dict[str, Any] = {f"v{i:04}": v for i, v in enumerate(outputs[graph])}
        np.savez(tmp_path / f"{graph}.npz", **numbered)
        return outputs[graph]

    from maskfx.export.host import Edit

    edit = Edit(given, mask, recording_of(kept))
    wanted = host_inputs(host, [edit], saved, "edit")
    [result] = host.step([edit], run)
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(tmp_path)], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    np.testing.assert_array_equal(np.load(tmp_path / "result.npy"), result.outputs[0])
    made = np.load(tmp_path / "edit-inputs.npz")
    for name, value in wanted.items():
        np.testing.assert_array_equal(made[name], value)
