"""The host's part of a step that is replayed from a CUDA graph, without a GPU.

    OMP_NUM_THREADS=1 python -m bench.host_steps --shape sdxl flux

The models have their real depth and a small width. A replay does nothing here, and no kernel copies
rows; everything else that the host does for a step is done: it checks arguments and weights, copies
what changed, adds up the addresses of cached rows, and writes the result over the recording's.
Beside it the same step runs operator by operator, and the module computes its own; with rows this
narrow their time is mostly the host's, too. Each step has other latents and another recording.
Operators that would start a kernel are counted. Writes host-steps.json to --out.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import maskfx
from bench import harness, shapes
from bench.harness import alternate, figure, ratio
from bench.report import columns, milliseconds
from bench.shapes import Shape, Size
from maskfx.ops.kernels import rows
from maskfx.runtime.backends import cuda_graphs
from maskfx.runtime.batch import captured_inputs

NARROW: dict[str, tuple[dict[str, Any], Size]] = {
    "sdxl": (
        {
            "block_out_channels": (32, 64, 128),
            "attention_head_dim": (1, 2, 4),
            "cross_attention_dim": 64,
            "addition_time_embed_dim": 16,
            "projection_class_embeddings_input_dim": 160,
        },
        Size(32, 32, 77),
    ),
    "flux": (
        {"num_attention_heads": 2, "joint_attention_dim": 64, "pooled_projection_dim": 32},
        Size(16, 16, 32),
    ),
}
RECORDINGS = 5
SHARE = 5  # one site in this number is masked
VIEWS = ("view", "expand", "slice", "select", "squeeze", "permute", "transpose", "aten.t.")
VIEWS += ("detach", "as_strided", "alias", "split", "unbind", "lift_fresh", "empty")


class NothingRuns:
    """Takes the place of a CUDA device: captures run once, replays and copies do nothing."""

    def capture(self, run: Callable[[], list[Tensor]], pool: object = None) -> Any:
        return run(), lambda: None

    def pool(self) -> object:
        return object()

    def __getitem__(self, grid: object) -> Callable[..., None]:
        return lambda *given, **named: None


@contextmanager
def replaced() -> Iterator[None]:
    device = NothingRuns()
    with (
        mock.patch.object(cuda_graphs, "recorder_on", return_value=device),
        mock.patch.object(captured_inputs, "has_kernels", return_value=True),
        mock.patch.object(rows, "copy_kernel", device),
    ):
        yield


class Launches(TorchDispatchMode):
    """Counts operators that would start a kernel."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        self.count += not any(word in str(func) for word in VIEWS)
        return func(*args, **(kwargs or {}))


def measure(shape: Shape, rounds: int) -> dict[str, Any]:
    module, inputs = shape.build(), shape.inputs(0)
    latents = "sample" if "sample" in inputs else "hidden_states"
    replayed = maskfx.compile(module)
    plain = maskfx.compile(module, cuda_graphs=False)
    recorded = [plain.record(**inputs)[1] for _ in range(RECORDINGS)]
    mask = torch.zeros(plain.mask_shape(inputs), dtype=torch.bool)
    mask.view(-1)[: mask.numel() // SHARE] = True
    numbers = count()

    def given() -> dict[str, Any]:
        return {**inputs, latents: inputs[latents] + 0.01 * next(numbers)}

    def edit(denoiser: Any) -> Callable[[int], Any]:
        def run(number: int) -> Any:
            kept = recorded[number % RECORDINGS]
            return denoiser.edit([maskfx.EditStep(given(), mask, kept, any_step=True)])

        return run

    sides: dict[str, Callable[[int], Any]] = {
        "module": lambda _: module(**given()),
        "operators": edit(plain),
        "replayed": edit(replayed),
    }
    launches = {}
    with torch.no_grad():
        for name, run in sides.items():
            for number in range(RECORDINGS):
                run(number)
            with Launches() as seen:
                run(0)
            launches[name] = seen.count
        seconds = alternate(sides, rounds)
    return {
        "title": shape.title,
        "parameters": len(list(module.parameters())),
        "seconds": {name: figure(samples) for name, samples in seconds.items()},
        "launches": launches,
        "times": ratio(seconds["operators"], seconds["replayed"]),
    }


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="bench.host_steps", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--shape", nargs="+", choices=sorted(NARROW), default=sorted(NARROW))
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--out", type=Path, default=harness.ROOT / "bench" / "results")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    result: dict[str, Any] = {**harness.header("bench.host_steps", arguments), "shapes": {}}
    known = {shape.name: shape for shape in shapes.FULL_DEPTH}
    lines = [["model", "module", "operators", "replayed", "launches"]]
    for name in options.shape:
        config, size = NARROW[name]
        shape = known[name]
        with replaced():
            found = measure(
                replace(shape, config={**shape.config, **config}, size=size), options.rounds
            )
        result["shapes"][name] = found
        each = [milliseconds(one) for one in found["seconds"].values()]
        lines.append([name, *each, ", ".join(map(str, found["launches"].values()))])
        harness.write_json(options.out / "host-steps.json", result)
    print(columns(lines))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
