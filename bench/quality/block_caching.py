"""Block-Caching's fixed profile: each block is computed at calls that are chosen beforehand.

A run that computes everything measures how far each block's residual changes from call to call,
relative to its size. A block is computed again once the changes since its last computation add up
to a bound, and adds its last residual in between. The schedule is the same for all pictures. The
first and last calls compute all blocks. The scales and shifts that its authors train afterwards are
left out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

Profile = list[list[float]]  # by block and call: the change since the call before; the first is inf


@dataclass
class Block:
    """A block of a denoiser and what it computed last."""

    module: nn.Module
    calls: int = 0
    residual: tuple[Tensor, ...] | None = None
    changes: list[float] = field(default_factory=list)

    def reset(self) -> None:
        self.calls, self.residual = 0, None


def blocks_of(denoiser: nn.Module) -> list[nn.Module]:
    """The blocks whose outputs have their inputs' shapes: of transformers, or levels' parts."""
    names = ("transformer_blocks", "single_transformer_blocks")
    found = [list(getattr(denoiser, name)) for name in names if hasattr(denoiser, name)]
    if found:
        return [block for row in found for block in row]
    kinds = ("ResnetBlock2D", "Transformer2DModel")
    return [part for part in denoiser.modules() if type(part).__name__ in kinds]


def tensors_of(value: object) -> tuple[Tensor, ...]:
    """The tensors of a block's output, in order."""
    if isinstance(value, Tensor):
        return (value,)
    parts: Sequence[object] = list(value) if isinstance(value, tuple | list) else []
    return tuple(part for part in parts if isinstance(part, Tensor))


def inputs_of(args: Sequence[object], kwargs: dict[str, Any], like: Sequence[Tensor]) -> list[Any]:
    """For each output the input that it has the shape of; None if there is none, as in joins."""
    given = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
    return [next((v for v in given if v.shape == one.shape), None) for one in like]


def rebuilt(value: Any, parts: Sequence[Tensor]) -> Any:
    left = iter(parts)
    if isinstance(value, Tensor):
        return next(left)
    return type(value)(next(left) if isinstance(part, Tensor) else part for part in value)


@contextmanager
def replaced(
    blocks: Sequence[Block], run: Callable[[Block, int, Any, Any, Any], Any]
) -> Iterator[None]:
    """Run blocks by another function: of the block, its number, its forward and arguments."""
    for number, block in enumerate(blocks):
        original: Any = block.module.forward

        def forward(
            *args: Any, _b: Block = block, _n: int = number, _o: Any = original, **kwargs: Any
        ) -> Any:
            return run(_b, _n, _o, args, kwargs)

        block.module.__dict__["forward"] = forward
    try:
        yield
    finally:
        for block in blocks:
            del block.module.__dict__["forward"]


def measure(denoiser: nn.Module, run: Callable[[], object]) -> Profile:
    """The profile of a denoiser in a run that calls it at every step."""
    blocks = [Block(module) for module in blocks_of(denoiser)]

    def watch(block: Block, number: int, original: Any, args: Any, kwargs: Any) -> Any:
        found = original(*args, **kwargs)
        parts = tensors_of(found)
        inputs = inputs_of(args, kwargs, parts)
        new = tuple(
            (part if before is None else part - before).detach()
            for part, before in zip(parts, inputs, strict=True)
        )
        change = float("inf")
        if block.residual is not None:
            moved = sum(
                float((a - b).abs().sum()) for a, b in zip(new, block.residual, strict=True)
            )
            change = moved / max(sum(float(b.abs().sum()) for b in block.residual), 1e-12)
        block.changes.append(change)
        block.residual = new
        return found

    with replaced(blocks, watch):
        run()
    return [block.changes for block in blocks]


def schedule(profile: Profile, bound: float) -> list[list[bool]]:
    """By block and call: whether the block is computed."""
    found = []
    for changes in profile:
        row, total = [], 0.0
        for call, change in enumerate(changes):
            total += change
            computes = call in (0, len(changes) - 1) or total >= bound
            total = 0.0 if computes else total
            row.append(computes)
        found.append(row)
    return found


@contextmanager
def scheduled(denoiser: nn.Module, plan: Sequence[Sequence[bool]]) -> Iterator[None]:
    """The schedule on a denoiser for one request."""
    blocks = [Block(module) for module in blocks_of(denoiser)]
    shapes: dict[int, Any] = {}

    def run(block: Block, number: int, original: Any, args: Any, kwargs: Any) -> Any:
        call, block.calls = block.calls, block.calls + 1
        row = plan[number]
        if block.residual is not None and call < len(row) and not row[call]:
            like = tensors_of(shapes[number])
            inputs = inputs_of(args, kwargs, like)
            summed = [
                kept if before is None else before + kept
                for kept, before in zip(block.residual, inputs, strict=True)
            ]
            return rebuilt(shapes[number], summed)
        found = original(*args, **kwargs)
        parts = tensors_of(found)
        inputs = inputs_of(args, kwargs, parts)
        block.residual = tuple(
            part if before is None else part - before
            for part, before in zip(parts, inputs, strict=True)
        )
        shapes[number] = found
        return found

    with torch.no_grad(), replaced(blocks, run):
        yield
