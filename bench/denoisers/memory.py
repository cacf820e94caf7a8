"""Peak memory of a dense call, a recording and an edit: run in a process of its own.

`measure` starts that process; it prints one line of JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from typing import Any

from bench.harness import ROOT, peak_growth


def measure(name: str, small: bool, kind: str, ratio: float, threads: int) -> dict[str, Any]:
    """The figures of one shape and mask, from a fresh process that gives memory back at once."""
    command = [sys.executable, "-m", "bench.denoisers.memory", "--shape", name, "--kind", kind]
    command += ["--ratio", str(ratio), "--threads", str(threads)]
    command += ["--small"] if small else []
    # every larger tensor is mapped by itself, so that the peak is what is held, not what is pooled
    settings = dict.fromkeys(("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_"), "65536")
    done = subprocess.run(
        command,
        cwd=ROOT,
        env={**os.environ, **settings},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(done.stderr.strip().splitlines()[-1])
    figures: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return figures


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", required=True)
    parser.add_argument("--kind", default="square")
    parser.add_argument("--ratio", type=float, default=0.2)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--small", action="store_true")
    options = parser.parse_args(arguments)

    import torch

    import maskfx
    from bench import masks, shapes

    torch.set_num_threads(options.threads)
    shape = shapes.choose(options.shape, options.small)
    module, inputs = shape.build(), shape.inputs(0)
    weights = sum(p.nbytes for p in module.parameters())
    with torch.no_grad():
        module(**inputs)
        dense = peak_growth(lambda: module(**inputs))
    denoiser = maskfx.compile(module)
    cache = denoiser.record(**inputs)[1]
    held: list[Any] = []
    recording = peak_growth(lambda: held.append(denoiser.record(**inputs)))
    held.clear()
    grid = masks.make(options.kind, shape.size.height, shape.size.width, options.ratio)
    steps = [maskfx.EditStep(inputs, shape.as_mask(grid), cache)]
    denoiser.edit(steps)
    edit = peak_growth(lambda: denoiser.edit(steps))
    figures = {
        "mask": f"{options.kind} {options.ratio}",
        "weights_bytes": weights,
        "cache_bytes": cache.nbytes(),
        "dense_peak_bytes": dense,
        "record_peak_bytes": recording,  # the cache that it returns included
        "edit_peak_bytes": edit,
    }
    print(json.dumps(figures))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
