"""narrow_joins: along features as it is, along tokens as ranges of rows."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from maskfx.passes.narrow.joins import narrow_joins
from tests.passes.tools import (
    check_values,
    joint,
    numbers,
    picture,
    run_pass,
    shared,
    timed,
    tokens,
)


class Tokens(nn.Module):
    """Text and image joined, and cut apart by slices and by a split."""

    def __init__(self) -> None:
        super().__init__()
        self.registers = nn.Parameter(numbers(1, 3, 8, seed=4))

    def forward(self, hidden_states: Tensor, encoder_hidden_states: Tensor) -> Tensor:
        text, image = encoder_hidden_states.shape[1], hidden_states.shape[1]
        registers = self.registers.expand(hidden_states.shape[0], -1, -1)
        both = torch.cat([encoder_hidden_states, hidden_states.sigmoid(), registers], 1).tanh()
        tail = both[:, text:]
        first, _ = tail.exp().split([image, 3], 1)
        return first * both[:, text : text + image]


class Registers(nn.Module):
    """A class token and registers before the picture, taken out again one by one and in parts."""

    def __init__(self) -> None:
        super().__init__()
        self.own = nn.Parameter(numbers(1, 4, 8, seed=5))

    def forward(self, hidden_states: Tensor) -> Tensor:
        batch, many, _ = hidden_states.shape
        own = self.own.expand(batch, -1, -1)
        both = torch.cat([own[:, :1], own[:, 1:], hidden_states.sigmoid()], 1).tanh()
        rest, registers = both[:, 2:], both[:, 1:4]
        heads = both.unflatten(2, (2, 4)).transpose(1, 2)  # the tokens aren't the second axis
        gate = (both[:, 0] + rest[:, 0] + heads[:, :, 3].flatten(1)).unsqueeze(1)
        first, last = both.split([4, many], 1)
        both[:, 0] = first[:, 1]
        mixed = gate + registers.mean(1, keepdim=True) + first[:, 3:] + both[:, -many - 4, None]
        return mixed * last + rest[:, 2:]


class Places(nn.Module):
    """Tokens of the picture by their number, beside a register."""

    def __init__(self) -> None:
        super().__init__()
        self.own = nn.Parameter(numbers(1, 1, 8, seed=5))

    def forward(self, hidden_states: Tensor) -> Tensor:
        own = self.own.expand(hidden_states.shape[0], -1, -1)
        both = torch.cat([own, hidden_states.sigmoid()], 1)
        return both[:, 1:] + both[:, :1] * (both[:, 3] + both[:, -1])[:, None]


class Features(nn.Module):
    """Joined, stacked, cut and padded along channels."""

    def forward(self, sample: Tensor, timestep: Tensor) -> Tensor:
        scale = timestep[:, None, None, None].expand(-1, 1, *sample.shape[2:])
        wide = torch.cat([sample, sample.tanh()[:, 1:2], scale], 1).exp()
        a, b, c = wide.split([1, 3, 2], 1)
        pairs = torch.stack([b, b.sin()], 2)
        left, right = pairs.unbind(2)
        padded = F.pad(c, (0, 0, 0, 0, 1, 1))
        return padded + a * pairs[:, 0, 1][:, None] + torch.cat([left, right[:, :1]], 1)


class Writes(nn.Module):
    """Parts written in place: of channels, and of tokens."""

    def forward(self, hidden_states: Tensor, encoder_hidden_states: Tensor) -> Tensor:
        text = encoder_hidden_states.shape[1]
        both = torch.cat([encoder_hidden_states, hidden_states.tanh()], 1).clone()
        both[:, text:] = both[:, text:] * 2
        both[:, :, 1:3] = both[:, :, 3:5].sin()
        return both[:, text:].exp()


class Times(nn.Module):
    """Sines and cosines of the timestep."""

    def forward(self, sample: Tensor, timestep: Tensor) -> Tensor:
        angles = timestep[:, None, None, None] * torch.ones(2, 1, 1)
        return sample * torch.cat([angles.sin(), angles.cos()], 1)


def test_joins_and_cuts_tokens() -> None:
    module = shared(Tokens)
    run = run_pass(narrow_joins, module, joint)
    assert run.rewrites == run.before["cat"] + run.before["slice"] + 1 == 4
    assert run.after["cat"] == 1
    assert run.after["split_with_sizes"] == 0
    assert run.after["slice"] == 3  # each part a range of rows
    check_values(module, joint)


def test_joins_and_cuts_features() -> None:
    module = shared(Features)
    run = run_pass(narrow_joins, module, timed)
    assert run.before["cat"] == 2
    assert run.rewrites >= 8
    for name in ("cat", "stack", "unbind"):
        assert run.after[name] == run.before[name]
    check_values(module, timed)


def test_cuts_out_a_fixed_number_of_tokens() -> None:
    module = shared(Registers)
    run = run_pass(narrow_joins, module, tokens)
    assert run.ctx.dense == {}
    assert run.after["select"] == 1  # of a part that was cut out already
    check_values(module, tokens)


def test_keeps_tokens_of_the_picture_that_are_selected() -> None:
    module = shared(Places)
    run = run_pass(narrow_joins, module, tokens)
    assert sorted(run.ctx.dense) == ["select", "select_1"]
    check_values(module, tokens, dense=2, oracle=False)  # the twin runs it on rows


def test_writes_parts() -> None:
    module = shared(Writes)
    run = run_pass(narrow_joins, module, joint)
    assert run.before["slice_scatter"] >= 2
    assert run.rewrites >= 5
    check_values(module, joint, oracle=False)  # the twin doesn't follow writes of joint tokens


class Interleaves(nn.Module):
    """Every other feature written into an empty value, as rotary embeddings do."""

    def forward(self, hidden_states: Tensor) -> Tensor:
        even, odd = hidden_states[..., 0::2].tanh(), hidden_states[..., 1::2].sigmoid()
        out = torch.empty_like(hidden_states)
        out[..., 0::2] = even - odd
        out[..., 1::2] = even * odd
        return out.exp()


def test_writes_every_other_feature() -> None:
    module = Interleaves()
    run = run_pass(narrow_joins, module, tokens)
    assert run.before["slice_scatter"] == run.after["slice_scatter"] == 2
    assert run.rewrites >= 4
    check_values(module, tokens)


def test_keeps_joins_without_sites() -> None:
    module = shared(Times)
    run = run_pass(narrow_joins, module, timed)
    assert run.before["cat"] == 1
    assert run.unchanged
    check_values(module, timed)


def test_cuts_through_the_picture_run_in_full() -> None:
    class Halves(nn.Module):
        def forward(self, sample: Tensor) -> Tensor:
            half = sample.shape[3] // 2
            return sample + sample[..., :half].tanh().mean((2, 3), keepdim=True)

    run = run_pass(narrow_joins, Halves(), picture)
    assert run.unchanged
    assert run.ctx.dense
    check_values(Halves(), picture, dense=len(run.ctx.dense), oracle=False)


class CutToOne(nn.Module):
    """A pad by less than nothing leaves one feature of two."""

    def forward(self, sample: Tensor) -> Tensor:
        pairs = torch.stack([sample.tanh(), sample.exp()], 4)
        return sample + F.pad(pairs, (0, -1))[..., 0] * F.pad(pairs, (-1, 0)).sum(-1)


def test_pads_that_leave_one_feature() -> None:
    module = CutToOne()
    run = run_pass(narrow_joins, module, picture)
    assert run.gained("constant_pad_nd") == 2
    check_values(module, picture, oracle=False)  # the twin doesn't follow pads


def test_second_run_rewrites_nothing() -> None:
    assert run_pass(narrow_joins, shared(Tokens), joint).second_run_is_idle()
    assert run_pass(narrow_joins, shared(Features), timed).second_run_is_idle()
