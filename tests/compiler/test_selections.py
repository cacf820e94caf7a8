"""Boolean selections of text: what is put together again keeps its length under export."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import maskfx
from maskfx.compiler.capture.tracing.selections import Selection, Selections

WIDTH = 8


def numbers(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


class Reordered(nn.Module):
    """Valid text tokens of two texts first, sample by sample; then attention with a mask."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.first, self.text = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(
        self,
        hidden_states: Tensor,
        timestep: Tensor,
        encoder_hidden_states: Tensor,
        encoder_attention_mask: Tensor,
        encoder_hidden_states_2: Tensor,
        encoder_attention_mask_2: Tensor,
    ) -> Tensor:
        text = self.text(encoder_hidden_states) * timestep[:, None, None]
        texts, masks = [], []
        rows = zip(
            text,
            encoder_attention_mask,
            encoder_hidden_states_2,
            encoder_attention_mask_2,
            strict=True,
        )
        for one, valid, two, valid_2 in rows:
            if self.how == "valid first":
                parts = [two[valid_2], one[valid], two[~valid_2], one[~valid]]
                kept = [valid_2[valid_2], valid[valid], valid_2[~valid_2], valid[~valid]]
            elif self.how == "one text":
                rest = valid.logical_not()
                parts, kept = [one[rest], two, one[valid]], [valid[rest], valid_2, valid[valid]]
            else:  # a sum over what is selected
                total = one[valid].sum(0, keepdim=True)
                parts, kept = [one + total, two], [valid, valid_2]
            texts.append(torch.cat(parts, dim=0))
            masks.append(torch.cat(kept))
        x = self.first(hidden_states)
        tokens = torch.stack(texts)
        tokens = tokens + torch.arange(tokens.shape[1]).sin()[None, :, None]  # their order counts
        ones = torch.ones(x.shape[:2], dtype=torch.bool)
        mask = torch.cat([ones, torch.stack(masks)], 1)[:, None, None]
        both = torch.cat([x, tokens], 1).unsqueeze(1)
        found = F.scaled_dot_product_attention(both, both, both, attn_mask=mask)[:, 0]
        return x + found[:, : x.shape[1]]


def make(seed: int, batch: int = 1, tokens: int = 12) -> dict[str, Any]:
    lengths = torch.arange(batch)[:, None]
    return {
        "hidden_states": numbers(batch, tokens, WIDTH, seed=seed),
        "timestep": numbers(batch, seed=seed + 1).abs() + 0.5,
        "encoder_hidden_states": numbers(batch, 7, WIDTH, seed=90),
        "encoder_attention_mask": torch.arange(7)[None] < 4 + lengths,
        "encoder_hidden_states_2": numbers(batch, 5, WIDTH, seed=91),
        "encoder_attention_mask_2": torch.arange(5)[None] % 2 == lengths % 2,
    }


def error(found: Tensor, wanted: Tensor) -> float:
    return float((found - wanted).norm() / wanted.norm())


@pytest.mark.parametrize("how", ["valid first", "one text"])
def test_reordered_text_runs_on_rows(how: str) -> None:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        module = Reordered(how).eval().requires_grad_(False)
    denoiser = maskfx.compile(module)
    mask = torch.arange(12) % 5 == 1
    steps, wanted = [], []
    for seed, batch in ((0, 1), (10, 3), (20, 2)):
        inputs = make(seed, batch)
        output, kept = denoiser.record(**inputs)
        assert error(output, module(**inputs)) < 1e-5
        steps.append(maskfx.EditStep(inputs, mask, kept))
        wanted.append(module(**inputs))
    for found, expected in zip(denoiser.edit(steps), wanted, strict=True):
        assert error(found, expected) < 1e-5
    assert all(one.program is not None and not one.reasons for one in denoiser.compilations)
    longer = make(30, 2, tokens=14)
    assert error(denoiser.batch([longer])[0], module(**longer)) < 1e-5


def test_another_use_of_a_selection_stays_right() -> None:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        module = Reordered("a sum").eval().requires_grad_(False)
    inputs = make(0, 2)
    assert error(maskfx.compile(module).batch([inputs])[0], module(**inputs)) < 1e-5


def test_selects_when_used_otherwise() -> None:
    x, mask = numbers(5, 2, seed=0), torch.tensor([True, False, True, True, False])
    kept = x[mask]
    with Selections():
        some = x[mask]
        assert isinstance(some, Selection)
        assert torch.equal(some * 2, kept * 2)
        assert torch.equal(torch.relu(some), torch.relu(kept))
        assert some.shape == (3, 2)
        assert len(some) == 3
        both = torch.cat([x[~mask], x[mask]])
        assert torch.equal(both, x[[1, 4, 0, 2, 3]])
        twice = torch.cat([x[mask], x[mask]])
        assert torch.equal(twice, x[[0, 2, 3, 0, 2, 3]])
    assert torch.equal(torch.tensor([mask[0]]), mask[:1])  # tensors are no sequences afterwards
    assert isinstance(x[mask], Tensor)
