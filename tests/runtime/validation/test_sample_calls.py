"""Calls of a batch that run sample by sample: texts of unequal lengths, cut out by their masks."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import maskfx
from maskfx.runtime.cache.rolling.rolling_pool import RollingPool
from maskfx.runtime.cache.rows import whole
from tests.passes.tools import TOLERANCE, error, numbers

Inputs = dict[str, Any]


class Ragged(nn.Module):
    """Registers, then each sample's text up to its length, then its image: padded at the end."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.registers = nn.Parameter(torch.randn(2, 8))
        self.image, self.text, self.level = nn.Linear(16, 8), nn.Linear(6, 8), nn.Linear(1, 8)
        self.q, self.k, self.v, self.out = (nn.Linear(8, 8) for _ in range(4))
        self.last = nn.Linear(8, 16)

    def forward(
        self,
        hidden_states: Tensor,
        timestep: Tensor,
        encoder_hidden_states: Tensor,
        encoder_attention_mask: Tensor,
    ) -> tuple[Tensor]:
        batch, channels, height, width = hidden_states.shape
        parts = hidden_states.view(batch, channels, height // 2, 2, width // 2, 2)
        image = self.image(parts.permute(0, 2, 4, 3, 5, 1).flatten(3).flatten(1, 2))
        text = self.text(encoder_hidden_states)
        count = image.shape[1]
        texts = encoder_attention_mask.sum(1).tolist()
        lengths = [2 + n + count for n in texts]
        joint = image.new_zeros(batch, max(lengths), 8)
        valid = torch.zeros(batch, max(lengths), dtype=torch.bool)
        for i, (n, length) in enumerate(zip(texts, lengths, strict=True)):
            joint[i, :2] = self.registers
            joint[i, 2 : 2 + n] = text[i, :n]
            joint[i, 2 + n : length] = image[i]
            valid[i, :length] = True
        tokens = joint * (1 + self.level(timestep[:, None] / 1000).tanh()[:, None])
        q, k, v = (
            f(tokens).unflatten(-1, (2, 4)).transpose(1, 2) for f in (self.q, self.k, self.v)
        )
        mask = valid[:, None, None] if len(set(lengths)) > 1 else None
        mixed = F.scaled_dot_product_attention(q, k, v, mask).transpose(1, 2).flatten(2)
        rows = self.last(tokens + self.out(mixed))
        out = []
        for i, (n, length) in enumerate(zip(texts, lengths, strict=True)):
            own = rows[i][2 + n : length].view(height // 2, width // 2, 2, 2, channels)
            out.append(own.permute(4, 0, 2, 1, 3).flatten(3, 4).flatten(1, 2))
        return (torch.stack(out),)


def make(
    lengths: Sequence[int], padded: int, seed: int = 0, size: tuple[int, int] = (8, 12)
) -> Inputs:
    batch = len(lengths)
    return {
        "hidden_states": numbers(batch, 4, *size, seed=seed),
        "timestep": torch.full((batch,), 7.0),
        "encoder_hidden_states": numbers(batch, padded, 6, seed=seed + 50),
        "encoder_attention_mask": (torch.arange(padded) < torch.tensor(lengths)[:, None]).long(),
    }


@cache
def denoiser() -> maskfx.CompiledDenoiser:
    return maskfx.compile(Ragged().eval())


def a_mask(height: int = 8, width: int = 12) -> Tensor:
    mask = torch.zeros(height, width, dtype=torch.bool)
    mask[1:3, 2:5] = mask[-1, -1] = True
    return mask


CALLS = [([7, 4], 9), ([5, 5], 5), ([5], 5), ([6], 9), ([3, 8, 5], 8)]
EACH = [*CALLS[:3], *(pytest.param(call, marks=pytest.mark.slow) for call in CALLS[3:])]


@pytest.mark.parametrize("call", EACH, ids=str)
def test_calls_narrow_whatever_their_texts(call: tuple[list[int], int]) -> None:
    inputs, found = make(*call), denoiser()
    wanted = found.module(**inputs)
    output, kept = found.record(**inputs)
    assert error(output, wanted) < TOLERANCE
    again = found.edit([maskfx.EditStep(inputs, a_mask(), kept)])[0]
    assert error(again, wanted) < TOLERANCE
    assert all(one.program is not None for one in found.compilations)
    assert len(found.programs) == 1


def test_an_edit_means_what_it_says() -> None:
    """Active tokens attend to themselves as they are and to the rest as recorded."""
    before, after = make([7, 4], 9), make([7, 4], 9, seed=9)
    after["encoder_hidden_states"] = before["encoder_hidden_states"]
    mask = torch.zeros(8, 12, dtype=torch.bool)
    mask[2:6, 4:8] = True
    pictures = after["hidden_states"], before["hidden_states"]
    mixed = {**after, "hidden_states": torch.where(mask, *pictures)}
    output, kept = denoiser().record(**before)
    found = denoiser().edit([maskfx.EditStep(after, mask, kept)])[0]
    wanted = torch.where(mask, denoiser().module(**mixed)[0], output[0])
    assert error(found[0], wanted) < TOLERANCE
    assert error(found[0], output[0]) > TOLERANCE


def test_all_calls_in_one_batch() -> None:
    steps: list[maskfx.AnyStep] = []
    wanted: list[Any] = []
    for seed, call in enumerate(CALLS):
        inputs = make(*call, seed=seed)
        output, kept = denoiser().record(**inputs)
        steps.append(maskfx.EditStep(inputs, a_mask(), kept))
        wanted.append(output)
    inputs = make([4, 6], 7, seed=90)
    found = denoiser().step([*steps, maskfx.DenseStep(inputs), maskfx.RecordStep(inputs)])
    for one, two in zip(found, [*wanted, denoiser().module(**inputs)], strict=False):
        assert error(one, two) < TOLERANCE
    assert error(found[-1][0], denoiser().module(**inputs)) < TOLERANCE


def test_a_recording_has_the_batch_of_its_call() -> None:
    """Elements of it serve calls of fewer samples, as those of any recording."""
    inputs = make([7, 4, 6], 9, seed=3)
    output, kept = denoiser().record(**inputs)
    assert {len(whole(rows)) for rows in kept.rows.values()} == {3}
    assert kept.output[0].shape == output[0].shape
    few = {name: value[1:] for name, value in inputs.items()}
    step = maskfx.EditStep(few, a_mask(), kept.of_elements([1, 2]))
    assert error(denoiser().edit([step])[0][0], output[0][1:]) < TOLERANCE


def test_nothing_masked_gives_the_recording() -> None:
    output, kept = denoiser().record(**make([7, 4], 9))
    empty = torch.zeros(8, 12, dtype=torch.bool)
    [found] = denoiser().edit([maskfx.EditStep(make([7, 4], 9, seed=5), empty, kept)])
    assert torch.equal(found[0], output[0])


def test_a_rolling_cache_is_written_sample_by_sample() -> None:
    """The second step reads what the first has replaced, in both samples."""
    first, second = make([7, 4], 9, seed=1), make([7, 4], 9, seed=2)
    second["encoder_hidden_states"] = first["encoder_hidden_states"]
    found, everything = denoiser(), torch.ones(8, 12, dtype=torch.bool)
    kept = found.record(**make([7, 4], 9, seed=7))[1]
    [program] = found.programs.values()
    rolling = RollingPool(1 << 24).start(program, kept)
    found.edit([maskfx.EditStep(first, everything, rolling, record=True)])
    own = found.record(**first)[1]
    steps = [maskfx.EditStep(second, a_mask(), cache) for cache in (rolling, own)]
    one, two = found.edit(steps)
    assert error(one, two) < TOLERANCE
    assert error(one, found.edit([maskfx.EditStep(second, a_mask(), kept)])[0]) > TOLERANCE


def test_what_belongs_to_the_request_is_computed_once() -> None:
    """The same text gives the same tensors for each sample in every step."""
    found, inputs = denoiser(), make([7, 4], 9, seed=40)
    kept = found.record(**inputs)[1]
    results = set(found._executor.sides.kept)
    for seed in range(3):
        later = {**inputs, "hidden_states": numbers(2, 4, 8, 12, seed=seed)}
        found.edit([maskfx.EditStep(later, a_mask(), kept)])
    assert set(found._executor.sides.kept) == results


class Unmasked(Ragged):
    """Tokens that the mask leaves out count, too."""

    def forward(
        self,
        hidden_states: Tensor,
        timestep: Tensor,
        encoder_hidden_states: Tensor,
        encoder_attention_mask: Tensor,
    ) -> tuple[Tensor]:
        (out,) = super().forward(
            hidden_states, timestep, encoder_hidden_states, encoder_attention_mask
        )
        return (out + encoder_hidden_states.mean((1, 2))[:, None, None, None],)


def test_texts_that_count_beyond_their_mask_run_dense() -> None:
    found, inputs = maskfx.compile(Unmasked().eval()), make([7, 4], 9)
    wanted = found.module(**inputs)
    output, kept = found.record(**inputs)
    assert error(output, wanted) < TOLERANCE
    again = found.edit([maskfx.EditStep(inputs, a_mask(), kept)])[0]
    assert error(again, wanted) < TOLERANCE
    reasons = " ".join(r for c in found.compilations for r in c.reasons.values())
    assert "other results one by one" in reasons


def test_rows_of_each_sample_are_loaded_ahead() -> None:
    found = maskfx.compile(denoiser().module, loader=maskfx.Loader(), plans=True)
    inputs = make([7, 4], 9)
    output, kept = found.record(**inputs)
    step = maskfx.EditStep(inputs, a_mask(), kept)
    [(_, [member])] = found.members([step])
    assert member.batch == 2
    [(_, _, parts)] = found.batches([step])
    assert [part.batch for part in parts] == [1, 1]
    for loading in found.ahead([step]):
        loading.wait()
    plan = {
        number: torch.ones(8, 12, dtype=torch.bool) for number in range(1, len(found.regions) + 1)
    }
    for chosen in ({}, plan):
        again = found.edit([maskfx.EditStep(inputs, a_mask(), kept, plan=chosen)])[0]
        assert error(again, output) < TOLERANCE
