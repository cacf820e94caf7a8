"""narrow_views: rows stay where they are, only their features are regrouped."""

import pytest
import torch
from torch import Tensor, nn

import maskfx
from maskfx.ir.programs.sources import Neighbours, Subsites
from maskfx.passes.narrow.views import narrow_views
from tests.passes.tools import (
    TOLERANCE,
    Inputs,
    check_values,
    denoiser_of,
    error,
    joint,
    nodes_of,
    picture,
    run_pass,
    shared,
    timed,
    tokens,
)


class Heads(nn.Module):
    """Tokens with heads, moved about."""

    def forward(self, hidden_states: Tensor) -> Tensor:
        heads = hidden_states.view(hidden_states.shape[0], -1, 2, 4).permute(0, 2, 1, 3)
        turned = heads.tanh().transpose(1, 3).transpose(2, 1).flatten(2)
        return turned.exp() + hidden_states.unsqueeze(1).sin().squeeze(1)


class Flat(nn.Module):
    """A picture as tokens and back."""

    def forward(self, sample: Tensor) -> Tensor:
        flat = sample.flatten(2).transpose(1, 2).tanh()
        return flat.transpose(1, 2).reshape(sample.shape).exp()


class Patches(nn.Module):
    """2 x 2 sites as one token, and taken apart again."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(16, 16)

    def forward(self, sample: Tensor) -> Tensor:
        b, c, h, w = sample.shape
        wide = sample.view(b, c, h // 2, 2, w // 2, 2).permute(0, 2, 4, 1, 3, 5)
        mixed = self.mix(wide.reshape(b, (h // 2) * (w // 2), c * 4))
        back = mixed.view(b, h // 2, w // 2, c, 2, 2).permute(0, 3, 1, 4, 2, 5)
        return back.reshape(b, c, h, w)


class Rotary(nn.Module):
    """Pairs of features as complex numbers, turned by a table."""

    def forward(self, hidden_states: Tensor) -> Tensor:
        pairs = torch.view_as_complex(hidden_states.reshape(*hidden_states.shape[:2], 4, 2))
        angles = torch.arange(hidden_states.shape[1])[:, None] * torch.ones(4)
        turned = pairs * torch.polar(torch.ones_like(angles), angles)
        return torch.view_as_real(turned).flatten(2)


class Times(nn.Module):
    def forward(self, sample: Tensor, timestep: Tensor) -> Tensor:
        table = (timestep[:, None] * torch.arange(4.0)).sin().view(-1, 4, 1, 1)
        return sample * table


def test_regroups_features() -> None:
    module = shared(Heads)
    run = run_pass(narrow_views, module, tokens)
    assert run.rewrites >= 7
    assert run.after["view"] == run.after["transpose"] == 0
    assert run.after["unflatten"] == 1
    assert run.after["permute"] <= 1
    check_values(module, tokens)


def test_views_of_sites_vanish() -> None:
    module = shared(Flat)
    run = run_pass(narrow_views, module, picture)
    assert run.rewrites == 4
    assert run.after.keys() == {"to_rows", "from_rows", "tanh", "exp"}
    check_values(module, picture)


def test_patches_are_windows() -> None:
    module = shared(Patches)
    run = run_pass(narrow_views, module, picture)
    assert run.gained("gather") == run.gained("index_select") == 1
    sources = [type(s) for s in run.ctx.interface.inputs.values()]
    assert sources.count(Neighbours) == sources.count(Subsites) == 1
    check_values(module, picture, oracle=False)  # the twin doesn't know this module's patches


def test_complex_pairs() -> None:
    module = shared(Rotary)
    run = run_pass(narrow_views, module, tokens)
    assert run.after["view_as_complex"] == run.after["view_as_real"] == 1
    assert run.after["reshape"] == 0
    check_values(module, tokens)


class Repeats(nn.Module):
    """Heads, each of them as often as there are queries to it; and features end to end."""

    def forward(self, hidden_states: Tensor) -> Tensor:
        heads = torch.tanh(hidden_states).unflatten(-1, (2, 4))
        groups = heads.unsqueeze(3).repeat(1, 1, 1, 3, 1).flatten(2, 3)
        scales = torch.linspace(-1, 1, 24).view(6, 4)
        return (groups * scales).flatten(2).repeat(1, 1, 2)


def test_repeats_features() -> None:
    module = Repeats()
    run = run_pass(narrow_views, module, tokens)
    assert run.before["repeat"] == run.after["repeat"] == 2
    for node in nodes_of(run.graph, "repeat"):
        times = node.args[1]
        assert isinstance(times, list | tuple)
        assert times[0] == 1
        assert len(times) < 5
    check_values(module, tokens)


class Shared(nn.Module):
    """Heads that several queries have in common, as a view of more than there is."""

    def forward(self, hidden_states: Tensor) -> Tensor:
        b, n, _ = hidden_states.shape
        heads = hidden_states.tanh().view(b, n, 2, 4).transpose(1, 2)
        groups = heads[:, :, None].expand(b, 2, 3, n, 4).reshape(b, 6, n, 4)
        return (groups * torch.arange(24.0).view(6, 1, 4)).sum(1).repeat(1, 1, 2)


def test_expands_features() -> None:
    module = Shared()
    run = run_pass(narrow_views, module, tokens)
    assert run.before["expand"] == run.after["expand"] == 1
    check_values(module, tokens)


class Spread(nn.Module):
    """A request's values spread along text and image together; tokens stand before the batch."""

    def __init__(self, late: bool) -> None:
        super().__init__()
        self.late = late  # is the axis joined only after its size was used?

    def forward(self, hidden_states: Tensor, encoder_hidden_states: Tensor, t: Tensor) -> Tensor:
        length = hidden_states.shape[1] + encoder_hidden_states.shape[1]
        level = torch.outer(t, torch.arange(8.0)).sin()

        def spread(value: Tensor) -> Tensor:
            return value.unsqueeze(0).expand(length, -1, -1)

        first = spread(level) if self.late else None
        both = torch.cat([encoder_hidden_states, hidden_states.tanh()], 1).transpose(0, 1)
        first = spread(level) if first is None else first
        image = torch.arange(length)[:, None, None] >= encoder_hidden_states.shape[1]
        mixed = both * torch.where(image, first, spread(level.cos()))
        return mixed.transpose(0, 1)[:, encoder_hidden_states.shape[1] :].exp()


def leveled(seed: int = 0, wide: bool = False) -> Inputs:
    return {**joint(seed, wide), "t": torch.tensor([0.3, 0.7]) + seed}


@pytest.mark.parametrize("late", [False, True])
def test_spreads_values_along_joint_tokens(late: bool) -> None:
    module = Spread(late)
    run = run_pass(narrow_views, module, leveled)
    assert run.before["expand"] == 2
    assert run.after["expand"] == 0
    check_values(module, leveled, oracle=False)  # the twin wants attention over joint tokens


def test_keeps_views_without_sites() -> None:
    module = shared(Times)
    run = run_pass(narrow_views, module, timed)
    assert run.before["reshape"] >= 1
    assert run.unchanged
    check_values(module, timed)


def test_an_edit_of_one_site_keeps_the_rest_of_its_patch() -> None:
    module = shared(Patches)
    denoiser, first = denoiser_of(module, picture), picture(0)
    mask = torch.zeros(8, 12, dtype=torch.bool)
    mask[5, 6] = True
    output, kept = denoiser.record(**first)
    changed = {"sample": torch.where(mask, first["sample"] * 3, first["sample"])}
    found = denoiser.edit([maskfx.EditStep(changed, mask, kept)])[0]
    assert error(found, torch.where(mask, module(**changed), output)) < TOLERANCE
    assert error(found, output) > TOLERANCE


def test_second_run_rewrites_nothing() -> None:
    assert run_pass(narrow_views, shared(Patches), picture).second_run_is_idle()
    assert run_pass(narrow_views, shared(Heads), tokens).second_run_is_idle()
