"""Lengths: a number that Python reads from a mask and that is a text's length, is symbolic."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from maskfx.compiler.capture.arguments import roles as roles_
from maskfx.compiler.capture.capture import capture
from maskfx.compiler.capture.captured import Capture
from tests.passes.tools import numbers

Inputs = dict[str, Any]


def by_list(mask: Tensor) -> Any:
    lengths = mask.sum(1).tolist()
    assert len(set(lengths)) == 1
    return max(lengths)


def by_item(mask: Tensor) -> Any:
    return mask.sum(1).max().item()


def by_int(mask: Tensor) -> Any:
    return int(mask.sum())


class Cuts(nn.Module):
    """The mean of a text up to its length, and the length, added to every image token."""

    def __init__(self, length: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.length = length

    def forward(
        self, hidden_states: Tensor, encoder_hidden_states: Tensor, text_mask: Tensor
    ) -> Tensor:
        length = self.length(text_mask)
        out = hidden_states.new_zeros(1, length, 8)
        out[:, :length] = encoder_hidden_states[:, :length]
        return hidden_states + out.mean(1, keepdim=True) / length


def make(text: int, kept: int | None = None, tokens: int = 20, seed: int = 0) -> Inputs:
    mask = torch.arange(text)[None] < (text if kept is None else kept)
    return {
        "hidden_states": numbers(1, tokens, 8, seed=seed),
        "encoder_hidden_states": numbers(1, text, 8, seed=seed + 50),
        "text_mask": mask.long(),
    }


def serves(found: Capture, module: nn.Module, inputs: Inputs) -> bool:
    values, spec = pytree.tree_flatten(inputs)
    return found.serves(module, spec, values, roles_.observed_sizes(found.leaves, values))


@pytest.mark.parametrize("length", [by_list, by_item, by_int])
def test_one_capture_serves_texts_of_any_length(length: Callable[[Tensor], Any]) -> None:
    module = Cuts(length).eval()
    with torch.no_grad():
        found = capture(module, make(7), single=True)
    assert found.module is not None, found.notes
    assert found.frozen is None
    for inputs in (make(7), make(11, seed=1), make(4, tokens=34, seed=2)):
        assert serves(found, module, inputs)


def test_another_number_needs_another_capture() -> None:
    """The mask keeps fewer tokens than there are: the graph would read all of them."""
    module = Cuts(by_list).eval()
    with torch.no_grad():
        found = capture(module, make(7), single=True)
    assert not serves(found, module, make(7, kept=5))
    assert serves(found, module, make(7, seed=3))


class TwoTexts(nn.Module):
    """Two texts as one, cut at a number that a tensor holds."""

    def forward(
        self,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor,
        encoder_hidden_states_2: Tensor,
        text_mask: Tensor,
    ) -> Tensor:
        both = torch.cat([encoder_hidden_states_2, encoder_hidden_states], 1)
        count = text_mask.sum() + encoder_hidden_states_2.shape[1]
        return hidden_states + both[:, :count].mean(1, keepdim=True)


def test_a_bound_of_a_slice_is_the_length_of_two_texts() -> None:
    module = TwoTexts().eval()

    def inputs(text: int, other: int, kept: int) -> Inputs:
        return {**make(text, kept), "encoder_hidden_states_2": numbers(1, other, 8, seed=7)}

    with torch.no_grad():
        found = capture(module, inputs(7, 4, 7), single=True)
    assert found.module is not None, found.notes
    assert found.frozen is None
    assert serves(found, module, inputs(9, 3, 9))
    assert not serves(found, module, inputs(9, 3, 8))


class Counts(nn.Module):
    """A number that is no length: how many tokens are the first ones."""

    def forward(
        self, hidden_states: Tensor, encoder_hidden_states: Tensor, text_mask: Tensor
    ) -> Tensor:
        first = text_mask[:, :2].sum().item()
        return hidden_states * first + encoder_hidden_states.mean(1, keepdim=True)


def test_other_numbers_are_read_as_before() -> None:
    module = Counts().eval()
    with torch.no_grad():
        found = capture(module, make(7), single=True)
    assert found.decisions is None
    if found.module is not None:
        assert serves(found, module, make(7, kept=1))


def test_tensors_read_their_numbers_again_afterwards() -> None:
    before = torch.Tensor.tolist, torch.Tensor.item
    test_another_number_needs_another_capture()
    assert (torch.Tensor.tolist, torch.Tensor.item) == before
    assert torch.arange(3).tolist() == [0, 1, 2]
