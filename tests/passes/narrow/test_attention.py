"""narrow_attention: active queries, all keys."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from maskfx.compiler.lower import lower
from maskfx.compiler.rank_twins import split_program
from maskfx.errors import CompileError
from maskfx.passes.narrow.attention import narrow_attention
from tests.passes.tools import (
    Inputs,
    check_values,
    denoiser_of,
    joint,
    picture,
    run_pass,
    shared,
    timed,
    tokens,
)

NAME = "scaled_dot_product_attention"


class Attention(nn.Module):
    """Self-attention with two heads; keys of the text too, where there is one."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.q, self.kv, self.out = nn.Linear(8, 8), nn.Linear(8, 16), nn.Linear(8, 8)
        self.options = options

    def forward(self, hidden_states: Tensor, encoder_hidden_states: Tensor | None = None) -> Tensor:
        source = hidden_states
        if encoder_hidden_states is not None:
            source = torch.cat([encoder_hidden_states, hidden_states], 1)
        k, v = self.kv(source).chunk(2, -1)
        q, k, v = (x.unflatten(-1, (2, 4)).transpose(1, 2) for x in (self.q(hidden_states), k, v))
        mixed = F.scaled_dot_product_attention(q, k, v, **self.options)
        return self.out(mixed.transpose(1, 2).flatten(2))


class Cross(nn.Module):
    """Attention over the text, padded."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.kv = nn.Linear(8, 8), nn.Linear(8, 16)

    def forward(
        self, hidden_states: Tensor, encoder_hidden_states: Tensor, encoder_attention_mask: Tensor
    ) -> Tensor:
        k, v = self.kv(encoder_hidden_states).chunk(2, -1)
        q, k, v = (x.unflatten(-1, (2, 4)).transpose(1, 2) for x in (self.q(hidden_states), k, v))
        bias = (1 - encoder_attention_mask)[:, None, None] * -1e4
        return F.scaled_dot_product_attention(q, k, v, attn_mask=bias).transpose(1, 2).flatten(2)


def padded(seed: int = 0, wide: bool = False) -> Inputs:
    mask = torch.ones(2, 5)
    mask[1, 3:] = 0
    return {**joint(seed, wide), "encoder_attention_mask": mask}


class Times(nn.Module):
    """Attention over numbers of the timestep: no sites."""

    def forward(self, sample: Tensor, timestep: Tensor) -> Tensor:
        table = torch.sin(timestep[:, None, None] * torch.ones(3, 4))
        mixed = F.scaled_dot_product_attention(table, table, table)
        return sample + mixed.mean(1)[:, :, None, None]


def test_narrows_self_attention() -> None:
    module = shared(Attention)
    run = run_pass(narrow_attention, module, tokens)
    assert run.rewrites == run.gained("attend") == 1
    assert (run.before[NAME], run.after[NAME]) == (1, 0)
    assert run.after["from_rows"] == 1
    check_values(module, tokens)


def test_narrows_joint_attention() -> None:
    module = Attention(scale=0.2)
    run = run_pass(narrow_attention, module, joint)
    assert run.rewrites == run.gained("attend") == 1
    check_values(module, joint, text_first=True)


def test_narrows_attention_over_padded_text() -> None:
    module = shared(Cross)
    run = run_pass(narrow_attention, module, padded)
    assert run.rewrites == run.gained("attend") == 1
    check_values(module, padded)


HEADS = torch.tensor([-9.0, 0.3]).view(2, 1, 1)
Bias = Callable[[Tensor], Tensor]


class Masked(nn.Module):
    """Attention over the text with a mask; `joint`: the batch and the heads are one axis."""

    def __init__(self, bias: Bias, joint: bool) -> None:
        super().__init__()
        self.q, self.kv = nn.Linear(8, 8), nn.Linear(8, 16)
        self.bias, self.joint = bias, joint

    def forward(
        self, hidden_states: Tensor, encoder_hidden_states: Tensor, encoder_attention_mask: Tensor
    ) -> Tensor:
        k, v = self.kv(encoder_hidden_states).chunk(2, -1)
        q, k, v = (x.unflatten(-1, (2, 4)).transpose(1, 2) for x in (self.q(hidden_states), k, v))
        bias = self.bias(encoder_attention_mask)
        if self.joint:
            q, k, v = (x.flatten(0, 1) for x in (q, k, v))
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=bias)
        mixed = mixed.unflatten(0, (-1, 2)) if self.joint else mixed
        return mixed.transpose(1, 2).flatten(2)


def of_places(mask: Tensor) -> Tensor:
    return torch.arange(mask.shape[1])[None] * 0.5


def of_each_head(mask: Tensor) -> Tensor:
    """Of a batch of heads."""
    return ((1 - mask)[:, None, None] * HEADS).flatten(0, 1)


@pytest.mark.parametrize(
    ("bias", "joint"),
    [
        (of_places, False),
        (lambda m: of_places(m) * HEADS, False),
        (lambda m: (1 - m)[:, None, None] * HEADS, False),
        (of_places, True),
        (lambda m: of_places(m)[None], True),
        (of_each_head, True),
    ],
    ids=["keys", "heads", "pictures and heads", "joint, keys", "joint, one", "joint, each"],
)
def test_a_masks_leading_axes_are_those_of_the_queries(bias: Bias, joint: bool) -> None:
    module = Masked(bias, joint)
    assert run_pass(narrow_attention, module, padded).rewrites == 1
    check_values(module, padded)


def test_keeps_attention_without_sites() -> None:
    module = shared(Times)
    run = run_pass(narrow_attention, module, timed)
    assert run.before[NAME] == 1
    assert run.unchanged
    check_values(module, timed, oracle=False)  # the twin takes all keys for sites


def test_masks_causal_attention() -> None:
    module = Attention(is_causal=True)
    assert run_pass(narrow_attention, module, tokens).rewrites == 1
    check_values(module, tokens, oracle=False)  # the twin knows no order


class Latents(nn.Module):
    """A fixed number of queries read the picture, and the picture reads the results."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.queries, self.mix = nn.Parameter(torch.randn(3, 8)), nn.Linear(8, 8)

    def forward(self, hidden_states: Tensor) -> Tensor:
        few = self.queries.expand(hidden_states.shape[0], -1, -1)
        q, kv = (x.unflatten(-1, (2, 4)).transpose(1, 2) for x in (few, hidden_states))
        mixed = F.scaled_dot_product_attention(q, kv, kv).transpose(1, 2).flatten(2)
        few, image = self.mix(mixed)[:, None], hidden_states[:, None]
        return hidden_states + F.scaled_dot_product_attention(image, few, few)[:, 0]


class Within(nn.Module):
    """Each patch of 2 x 2 sites attends to its own sites."""

    def forward(self, sample: Tensor) -> Tensor:
        b, c, h, w = sample.shape
        x = sample.view(b, c, h // 2, 2, w // 2, 2).permute(0, 2, 4, 3, 5, 1)
        x = x.reshape(b, (h // 2) * (w // 2), 4, c)
        x = F.scaled_dot_product_attention(x, x.tanh(), x, attn_mask=torch.eye(4) * 2)
        x = x.view(b, h // 2, w // 2, 2, 2, c).permute(0, 5, 1, 3, 2, 4)
        return sample + x.reshape(b, c, h, w)


class OwnWindows(nn.Module):
    """Each patch of 2 x 2 sites, of one picture after the other, has a mask of its own."""

    def forward(self, sample: Tensor) -> Tensor:
        b, c, h, w = sample.shape
        x = sample.view(b, c, h // 2, 2, w // 2, 2).permute(0, 2, 4, 3, 5, 1).reshape(-1, 1, 4, c)
        mask = torch.arange(h // 2 * (w // 2) * 16).view(-1, 1, 4, 4).sin()
        x = F.scaled_dot_product_attention(x, x.tanh(), x, attn_mask=mask.repeat(b, 1, 1, 1))
        x = x.view(b, h // 2, w // 2, 2, 2, c).permute(0, 1, 3, 2, 4, 5).reshape(b, h * w, c)
        return sample + x.transpose(1, 2).unflatten(2, (h, w))


class Lines(nn.Module):
    """Sites attend along the rows of the picture, then along its columns."""

    def forward(self, sample: Tensor) -> Tensor:
        x = sample.permute(0, 2, 3, 1)
        x = x + F.scaled_dot_product_attention(x.tanh(), x, x)
        y = x.transpose(1, 2).unflatten(-1, (2, 2)).transpose(2, 3)
        y = F.scaled_dot_product_attention(y, y.sin(), y).transpose(2, 3).flatten(3)
        return (x + y.transpose(1, 2)).permute(0, 3, 1, 2)


class Biased(nn.Module):
    """Sites attend along rows with a bias for each head, and along columns with a mask of all."""

    def forward(self, sample: Tensor) -> Tensor:
        x = sample.permute(0, 2, 3, 1)
        y = x.unflatten(-1, (2, 2)).transpose(2, 3)
        across, down = torch.arange(x.shape[2]), torch.arange(x.shape[1])
        bias = (across[:, None] - across[None]).abs() * torch.tensor([0.1, -0.3])[:, None, None]
        y = F.scaled_dot_product_attention(y.tanh(), y, y, attn_mask=bias)
        x = (x + y.transpose(2, 3).flatten(3)).transpose(1, 2)
        x = F.scaled_dot_product_attention(x, x.sin(), x, attn_mask=down[:, None] >= down)
        return x.permute(0, 3, 2, 1)


class OwnMasks(nn.Module):
    """Each row of the picture has a mask of its own."""

    def forward(self, sample: Tensor) -> Tensor:
        x, (h, w) = sample.permute(0, 2, 3, 1), sample.shape[2:]
        bias = torch.arange(h).view(-1, 1, 1) * torch.arange(w).view(-1, 1) * torch.arange(w) / 99
        return F.scaled_dot_product_attention(x, x, x.tanh(), attn_mask=bias).permute(0, 3, 1, 2)


def test_sites_attend_along_lines_with_a_mask() -> None:
    run = run_pass(narrow_attention, shared(Biased), picture)
    assert run.rewrites == run.before[NAME] == run.gained("attend") == 2
    check_values(shared(Biased), picture, oracle=False)
    program = denoiser_of(shared(Biased), picture).compilations[0].program
    assert program is not None
    found = split_program(program)
    assert isinstance(found, str)  # why it isn't split over ranks
    assert "along lines of the picture, with a mask" in found
    with pytest.raises(CompileError, match="attention along rows or columns has a mask"):
        lower(program)


def test_keeps_masks_of_each_line() -> None:
    run = run_pass(narrow_attention, shared(OwnMasks), picture)
    assert "a mask for each line" in run.ctx.dense[NAME]
    check_values(shared(OwnMasks), picture, dense=1, oracle=False)


def test_sites_attend_along_lines() -> None:
    run = run_pass(narrow_attention, shared(Lines), picture)
    assert run.rewrites == run.before[NAME] == run.gained("attend") == 2
    assert run.gained("index_select") == 6  # queries, keys, values, two of the rest, the result
    check_values(shared(Lines), picture, oracle=False)  # the twin attends to all sites


def test_a_fixed_number_of_queries_reads_sites() -> None:
    assert run_pass(narrow_attention, shared(Latents), tokens).rewrites == 2
    check_values(shared(Latents), tokens, oracle=False)


def test_rows_attend_to_their_own_features() -> None:
    run = run_pass(narrow_attention, shared(Within), picture)
    assert run.rewrites == run.before[NAME] == run.after[NAME] == 1
    check_values(shared(Within), picture, oracle=False)


def test_rows_attend_to_their_own_features_with_masks_of_their_own() -> None:
    run = run_pass(narrow_attention, shared(OwnWindows), picture)
    assert run.rewrites == run.before[NAME] == run.after[NAME] == 1
    check_values(shared(OwnWindows), picture, oracle=False)


def test_second_run_rewrites_nothing() -> None:
    assert run_pass(narrow_attention, shared(Attention), tokens).second_run_is_idle()


def test_narrows_attention_of_grouped_heads() -> None:
    class Grouped(nn.Module):
        def forward(self, hidden_states: Tensor) -> Tensor:
            q = hidden_states.unflatten(-1, (4, 2)).transpose(1, 2)
            kv = hidden_states[..., :4].unflatten(-1, (2, 2)).transpose(1, 2)
            mixed = F.scaled_dot_product_attention(q, kv, kv, enable_gqa=True)
            return mixed.transpose(1, 2).flatten(2)

    assert run_pass(narrow_attention, Grouped(), tokens).rewrites == 1
    check_values(Grouped(), tokens)
