"""narrow_linear: linear layers and 1x1 convolutions run on rows."""

import pytest
from torch import Tensor, nn

from maskfx.passes.narrow.linear import narrow_linear
from tests.passes.tools import (
    Inputs,
    check_values,
    numbers,
    picture,
    run_pass,
    shared,
    token_numbers,
    tokens,
)


class Layers(nn.Module):
    """Linear layers, one of them down to a single feature and up again."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8, bias=False)
        self.narrow, self.wide = nn.Linear(8, 1), nn.Linear(1, 8)

    def forward(self, hidden_states: Tensor) -> Tensor:
        return self.wide(self.narrow(self.first(hidden_states)).tanh())


class Pointwise(nn.Module):
    """1x1 convolutions, one of them down to a single channel and up again."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(4, 6, 1, bias=False)
        self.narrow, self.wide = nn.Conv2d(6, 1, 1), nn.Conv2d(1, 4, 1)

    def forward(self, sample: Tensor) -> Tensor:
        return self.wide(self.narrow(self.first(sample)).tanh())


class Level(nn.Module):
    """A linear layer of the step's noise level, which has no sites."""

    def __init__(self) -> None:
        super().__init__()
        self.level = nn.Linear(8, 8)

    def forward(self, hidden_states: Tensor, noise_level: Tensor) -> Tensor:
        return hidden_states * self.level(noise_level)


def noisy(seed: int = 0, wide: bool = False) -> Inputs:
    return {**tokens(seed, wide), "noise_level": numbers(2, 1, 8, seed=seed + 9)}


def test_narrows_linear_layers() -> None:
    module = shared(Layers)
    run = run_pass(narrow_linear, module, tokens)
    assert run.rewrites == run.before["linear"] == run.after["linear"] == 3
    check_values(module, tokens)


def test_narrows_convolutions_of_one_site() -> None:
    module = shared(Pointwise)
    run = run_pass(narrow_linear, module, picture)
    assert run.rewrites == run.before["conv2d"] == run.gained("linear") == 3
    assert run.after["conv2d"] == 0
    assert [d.shape for d in run.ctx.interface.derived] == [(6, 4), (1, 6), (4, 1)]
    check_values(module, picture)


class Numbers(nn.Module):
    """Token numbers looked up in a table, mixed and scored."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.table, self.mix = nn.Embedding(6, size), nn.Conv2d(size, 6, 3, padding=1)

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.mix(self.table(input_ids).permute(0, 3, 1, 2).tanh()).exp()


@pytest.mark.parametrize("size", [8, 1])
def test_looks_up_rows(size: int) -> None:
    module = Numbers(size)
    run = run_pass(narrow_linear, module, token_numbers)
    assert run.rewrites == run.before["embedding"] == run.after["embedding"] == 1
    check_values(module, token_numbers)


def unnamed(seed: int = 0, wide: bool = False) -> Inputs:
    return {"input": picture(seed, wide)["sample"]}


@pytest.mark.parametrize(
    "layer",
    [
        nn.Conv2d(4, 4, 3, padding=1),
        nn.Conv2d(4, 4, 1, groups=2),
        nn.Conv2d(4, 4, 1, stride=2),
        nn.Conv2d(4, 4, 1, padding=1),
    ],
    ids=["3x3", "groups", "stride", "padding"],
)
def test_keeps_larger_strided_or_grouped_convolutions(layer: nn.Module) -> None:
    run = run_pass(narrow_linear, nn.Sequential(layer), unnamed)
    assert run.before["conv2d"] == 1
    assert run.unchanged


def test_keeps_a_layer_without_sites() -> None:
    module = shared(Level)
    run = run_pass(narrow_linear, module, noisy)
    assert run.before["linear"] == 1
    assert run.unchanged
    check_values(module, noisy)


def test_second_run_rewrites_nothing() -> None:
    assert run_pass(narrow_linear, shared(Layers), tokens).second_run_is_idle()
    assert run_pass(narrow_linear, shared(Pointwise), picture).second_run_is_idle()
