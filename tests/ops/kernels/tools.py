"""What the tests of kernels share: where they run, random ragged batches, and bounds on errors.

Kernels run on a CUDA device, or in Triton's interpreter, which a process enters at its start:
`TRITON_INTERPRET=1 pytest tests/ops/kernels`. `test_interpreted.py` starts such a process.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from maskfx.ops.kernels.serves import interpreted, triton_is_there

DEVICE = torch.device("cuda" if torch.cuda.is_available() and not interpreted() else "cpu")
HERE = triton_is_there() and (interpreted() or DEVICE.type == "cuda")
REASON = (
    "kernels run on a CUDA device, or with TRITON_INTERPRET=1: see test_interpreted.py"
    if triton_is_there()
    else "Triton isn't installed"
)
needs_kernels = pytest.mark.skipif(not HERE, reason=REASON)

BOUNDS = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
dtypes = pytest.mark.parametrize("dtype", list(BOUNDS), ids=["fp32", "fp16", "bf16"])


class Draw:
    """Random sizes and values, the same for a seed."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.generator = torch.Generator().manual_seed(seed)

    def size(self, least: int, most: int) -> int:
        return self.random.randint(least, most)

    def values(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.randn(*shape, generator=self.generator).to(DEVICE, dtype)

    def index(self, count: int, below: int) -> Tensor:
        return torch.randint(below, (count,), generator=self.generator).to(DEVICE)

    def distinct(self, count: int, below: int) -> Tensor:
        return torch.randperm(below, generator=self.generator)[:count].to(DEVICE)

    def batch(self, requests: int, segments: int, most: int) -> list[list[int]]:
        """Return the rows of each request in each segment; some have none, some have one."""
        return [
            [self.random.choice((0, 1, self.size(2, most))) for _ in range(segments)]
            for _ in range(requests)
        ]


def by_segment(batch: Sequence[Sequence[int]]) -> Tensor:
    """Spans of rows that lie segment by segment, as those of active rows."""
    out = [[0] * (2 * len(batch[0])) for _ in batch]
    at = 0
    for segment in range(len(batch[0])):
        for request, counts in enumerate(batch):
            out[request][2 * segment : 2 * segment + 2] = [at, at + counts[segment]]
            at += counts[segment]
    return torch.tensor(out).view(len(batch), -1)


def by_request(batch: Sequence[Sequence[int]]) -> Tensor:
    """Spans of rows that lie request by request, as those of cached rows."""
    out, at = [], 0
    for counts in batch:
        row = []
        for count in counts:
            row += [at, at + count]
            at += count
        out.append(row)
    return torch.tensor(out, dtype=torch.long).view(len(batch), -1)


def total(batch: Sequence[Sequence[int]]) -> int:
    return sum(map(sum, batch))


def owners(spans: Tensor, rows: int) -> Tensor:
    found = torch.zeros(rows, dtype=torch.long)
    for request, span in enumerate(spans.tolist()):
        for start, stop in zip(span[::2], span[1::2], strict=True):
            found[start:stop] = request
    return found.to(DEVICE)


def error(found: Tensor, wanted: Tensor) -> float:
    """Return the norm of the difference over that of what is wanted; infinite for a nan."""
    assert found.shape == wanted.shape
    one, two = found.double().cpu(), wanted.double().cpu()
    size = float((one - two).norm()) / max(float(two.norm()), 1e-30) if two.numel() else 0.0
    return size if math.isfinite(size) else math.inf


def widened(values: Sequence[Any]) -> list[Any]:
    """Floating-point values in float32, so that the plain operator adds no error of its own."""
    return [
        v.float() if isinstance(v, Tensor) and v.dtype in (torch.float16, torch.bfloat16) else v
        for v in values
    ]


def check(kernel: Callable[..., Tensor], plain: Callable[..., Any], *arguments: Any) -> Tensor:
    """Compare a kernel with the plain operator in float32, and return the kernel's result."""
    dtype = next(a.dtype for a in arguments if isinstance(a, Tensor))
    found, wanted = kernel(*arguments), plain(*widened(arguments))
    assert found.is_contiguous()
    worst = error(found, wanted)
    assert worst < BOUNDS[dtype], f"error {worst:.1e}"
    return found
