"""TeaCache's rule on a row of transformer blocks: skip all blocks while the input changes little.

The change of the first block's modulated input from call to call is summed up; below a bound the
last residual of all blocks is added again. Its authors rescale the change by a polynomial that they
fitted per model; there is none for these models, so it is taken as it is. First and last call are
always computed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn


@dataclass
class Progress:
    """One request's calls so far."""

    bound: float
    calls: int
    done: int = 0
    total: float = 0.0
    skips: bool = False
    before: Tensor | None = None
    start: Tensor | None = None
    residual: Tensor | None = None

    def begin(self, hidden: Tensor, modulated: Tensor) -> None:
        """A call begins: is it skipped?"""
        if self.before is not None:
            changed = (modulated - self.before).abs().mean() / self.before.abs().mean()
            self.total += float(changed)
        self.done += 1
        ends = self.done == 1 or self.done == self.calls
        self.skips = not ends and self.residual is not None and self.total < self.bound
        self.before, self.start = modulated, hidden
        if not self.skips:
            self.total = 0.0

    def finish(self, hidden: Tensor) -> None:
        assert self.start is not None, "the last block before the first"
        self.residual = hidden - self.start


@contextmanager
def accumulated(blocks: Sequence[nn.Module], bound: float, calls: int) -> Iterator[None]:
    """The rule on a denoiser's blocks for one request of a number of calls."""
    progress = Progress(bound, calls)
    for index, block in enumerate(blocks):
        first, last = index == 0, index == len(blocks) - 1
        block.__dict__["forward"] = told(block, progress, first, last)
    try:
        yield
    finally:
        for block in blocks:
            del block.__dict__["forward"]


def told(block: Any, progress: Progress, first: bool, last: bool) -> Any:
    """A block's forward that skips where the rule allows it."""
    original = block.forward

    def forward(
        hidden_states: Tensor, encoder_hidden_states: Tensor, temb: Tensor, **more: Any
    ) -> tuple[Any, Tensor]:
        if first:
            progress.begin(hidden_states, block.norm1(hidden_states, emb=temb)[0])
        if progress.skips:
            residual: Any = progress.residual
            return encoder_hidden_states, hidden_states + residual if first else hidden_states
        text, hidden = original(hidden_states, encoder_hidden_states, temb, **more)
        if last:
            progress.finish(hidden)
        return text, hidden

    return forward
