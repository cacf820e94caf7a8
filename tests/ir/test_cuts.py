"""Cuts: parts of sequences of tokens, and the sizes that they have in a call."""

from __future__ import annotations

import pytest

from maskfx.ir.geometry.cuts import Cut, Cuts, piece_of

SIZES = {"tokens": 70, "text:0": 7, "number:count": 10}


def test_parts_follow_from_sizes() -> None:
    cuts = Cuts()
    assert cuts.parts("image") == ("image",)
    assert cuts.add("image", Cut("tokens", 1, 1, 2), SIZES)
    assert cuts.add("image", Cut("number:count", 1), SIZES)
    assert cuts.places["image"][0].role == "number:count"
    for tokens, count in ((70, 10), (33, 4)):
        sizes = {**SIZES, "tokens": tokens, "number:count": count}
        spans = [cuts.span(part, sizes) for part in cuts.parts("image")]
        half = (tokens + 1) // 2
        assert spans == [(0, count), (count, half), (half, tokens)]
        assert cuts.size("image#1@3", sizes) == half - count
        assert cuts.disorder(sizes) == ""
    assert cuts.numbers() == {"number:count"}


@pytest.mark.parametrize("count", [0, 35, 40])
def test_each_part_has_a_token(count: int) -> None:
    cuts = Cuts({"image": (Cut("number:count", 1), Cut("tokens", 1, 0, 2))})
    found = cuts.disorder({**SIZES, "number:count": count})
    assert found == f"the tokens of image are cut at [{count}, 35] of 70"


def test_known_cuts_and_single_tokens_add_nothing() -> None:
    """The axis of one token of the picture would be taken for an axis of size one."""
    cuts = Cuts()
    assert cuts.add("image", Cut(more=10), SIZES)
    assert not cuts.add("image", Cut(more=10), SIZES)
    for place in (Cut(), Cut(more=1), Cut(more=11), Cut("tokens", 1, -1), Cut("tokens", 1)):
        assert not cuts.add("image", place, SIZES)
    assert cuts.parts("image") == ("image#0", "image#1")


def test_a_fixed_part_of_a_text_is_a_fixed_segment() -> None:
    cuts = Cuts()
    assert cuts.add("text:0", Cut(more=1), SIZES)
    assert cuts.add("text:0", Cut("text:0", 1, -2), SIZES)
    assert cuts.parts("text:0") == ("fixed1", "text:0#1", "fixed2")


def test_a_text_may_be_cut_down_to_single_tokens() -> None:
    cuts = Cuts()
    sizes = {**SIZES, "text:0": 3}
    assert cuts.add("text:0", Cut(more=1), sizes)
    assert cuts.add("text:0", Cut(more=2), sizes)
    assert not cuts.add("text:0", Cut(more=3), sizes)
    assert cuts.parts("text:0") == ("fixed1", "fixed1", "text:0#2")
    assert cuts.size("text:0#2", sizes) == 1


def test_names_of_other_segments_are_no_parts() -> None:
    assert piece_of("text:0#12@3") == ("text:0", 12)
    for name in ("image", "image@2", "grid1", "fixed3", "fill8_image#0", "fill8_text:0#1+fixed1"):
        assert piece_of(name) is None
