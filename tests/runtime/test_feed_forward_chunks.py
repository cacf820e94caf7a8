"""Layers that diffusers computes in parts: feed-forward in chunks, attention in slices."""

from __future__ import annotations

from typing import Any

import torch
from diffusers.models.attention import BasicTransformerBlock
from diffusers.models.attention_processor import SlicedAttnProcessor
from torch import Tensor, nn

import maskfx
from maskfx.compiler.compile import Compilation
from tests.factories.masks import MASKS
from tests.runtime.test_oracle import assert_near


class Chunked(nn.Module):
    """A block of diffusers over packed tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 16), nn.Linear(16, 4)
        self.block = BasicTransformerBlock(16, 2, 8, activation_fn="gelu")

    def forward(self, hidden_states: Tensor, timestep: Tensor) -> Tensor:
        x = self.first(hidden_states) + timestep.float()[:, None, None] / 10
        out: Tensor = self.last(self.block(x))
        return out


def call(tokens: int, seed: int) -> dict[str, Any]:
    draw = torch.Generator().manual_seed(seed)
    return {
        "hidden_states": torch.randn(1, tokens, 4, generator=draw),
        "timestep": torch.tensor([seed]),
    }


def captured_once(module: nn.Module) -> Compilation:
    """Return the one compilation by which edits of two sizes are right."""
    denoiser = maskfx.compile(module)
    for seed, tokens in enumerate((24, 40)):
        output, kept = denoiser.record(**call(tokens, seed))
        wanted = module(**call(tokens, seed))
        mask = MASKS["random"]((tokens,), seed)
        assert_near(output, wanted)
        got = denoiser.edit([maskfx.EditStep(call(tokens, seed), mask, kept)])[0]
        assert_near(got, wanted)
    (found,) = denoiser.compilations
    assert found.program is not None
    assert found.capture.frozen is None
    return found


def test_one_capture_serves_any_number_of_chunks() -> None:
    torch.manual_seed(0)
    module: Any = Chunked().eval().requires_grad_(False)
    module.block.set_chunk_feed_forward(4, 1)
    nodes = captured_once(module).capture.nodes
    assert sum("gelu" in str(node.target) for node in nodes) == 1
    assert module.block._chunk_size == 4


def test_attention_in_slices_is_captured_as_one() -> None:
    torch.manual_seed(0)
    module: Any = Chunked().eval().requires_grad_(False)
    module.block.attn1.set_processor(SlicedAttnProcessor(1))
    nodes = captured_once(module).capture.nodes
    assert sum("softmax" in str(node.target) for node in nodes) == 1
    assert module.block.attn1.processor.slice_size == 1
