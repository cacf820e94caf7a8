"""canonicalize_writes: a value filled part after part is a concatenation."""

import pytest
from torch import Tensor, nn

from maskfx.passes.canonicalize.writes import canonicalize_writes
from tests.passes.tools import check_values, joint, run_pass, shared


class Fills(nn.Module):
    """Text and image written into zeros, the image first."""

    def forward(self, hidden_states: Tensor, encoder_hidden_states: Tensor) -> Tensor:
        text, image = encoder_hidden_states.shape[1], hidden_states.shape[1]
        both = hidden_states.new_zeros(hidden_states.shape[0], text + image, 8)
        both[:, text : text + image] = hidden_states.tanh()
        both[:, :text] = encoder_hidden_states
        return both.sin()[:, text:]


class Chosen(nn.Module):
    """The first and the last place of an axis written by their numbers, the others as a slice."""

    def forward(self, hidden_states: Tensor, encoder_hidden_states: Tensor) -> Tensor:
        batch, image, _ = hidden_states.shape
        both = hidden_states.new_zeros(batch, image + 2, 8)
        both[:, 0], both[:, -1] = encoder_hidden_states[:, 1], encoder_hidden_states[:, 2]
        both[:, 1:-1] = hidden_states.tanh()
        return both.sin()[:, 1:-1]


class Parts(nn.Module):
    """Parts that don't make up the whole.

    Args:
        case: how they differ from it: "gap", "overlap", "stride" or "type".
    """

    def __init__(self, case: str) -> None:
        super().__init__()
        self.case = case

    def forward(self, hidden_states: Tensor, encoder_hidden_states: Tensor) -> Tensor:
        text, image = encoder_hidden_states.shape[1], hidden_states.shape[1]
        first, second = encoder_hidden_states, hidden_states.tanh()
        both = hidden_states.new_zeros(hidden_states.shape[0], text + image, 8)
        if self.case == "gap":
            both[:, 1:text] = first[:, 1:]
            both[:, text:] = second
        elif self.case == "overlap":
            both[:, :text] = first
            both[:, text - 1 : -1] = second
        elif self.case == "stride":
            both[:, :text] = first
            both[:, text::2] = second[:, ::2]
        else:
            both[:, :text] = first.double()
            both[:, text:] = second.double()
        return both.sin()[:, text:]


def test_spells_writes_as_a_concatenation() -> None:
    module = shared(Fills)
    run = run_pass(canonicalize_writes, module, joint)
    assert run.gained("cat") == 1
    assert run.before["slice_scatter"] == 4  # two of them write all requests
    assert run.rewrites == 3
    assert run.after["slice_scatter"] == run.after["new_zeros"] == 0
    check_values(module, joint, text_first=True)


def test_spells_writes_to_one_place_as_a_concatenation() -> None:
    module = shared(Chosen)
    run = run_pass(canonicalize_writes, module, joint)
    assert run.before["select_scatter"] == 2
    assert run.after["select_scatter"] == run.after["slice_scatter"] == 0
    assert run.gained("cat") == 1
    check_values(module, joint)


@pytest.mark.parametrize("case", ["gap", "overlap", "stride", "type"])
def test_keeps_parts_that_are_not_the_whole(case: str) -> None:
    run = run_pass(canonicalize_writes, Parts(case), joint)
    assert run.after["slice_scatter"] == 2
    assert run.after["cat"] == 0


def test_second_run_rewrites_nothing() -> None:
    assert run_pass(canonicalize_writes, shared(Fills), joint).second_run_is_idle()
