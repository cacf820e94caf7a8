"""Sides of the picture in tensors: one capture serves any size, and other numbers are no sides."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import maskfx
from maskfx.compiler.capture.arguments.tensor_sides import roles_in
from maskfx.export.exporter import export
from maskfx.runtime.programs import program_cache
from maskfx.runtime.programs.proof import fails
from maskfx.runtime.programs.shared_programs import shared_programs
from tests.factories.masks import MASKS
from tests.factories.own_cases import OWN
from tests.factories.own_denoisers import built
from tests.factories.own_sides import SidesOfTokens, listed, rows, sides, turned
from tests.factories.zoo import Draw, Size
from tests.runtime.test_oracle import assert_kept_outside, assert_near

SQUARE, TALL, WIDE = Size(1, 6, 6, 5), Size(2, 10, 6, 7), Size(1, 4, 12, 5)
TOKENS = OWN["sides-of-tokens"]


@pytest.fixture(scope="module")
def of_tokens() -> maskfx.CompiledDenoiser:
    return maskfx.compile(TOKENS.build())


def check(denoiser: maskfx.CompiledDenoiser, *calls: dict[str, Any]) -> None:
    """Edits of all calls, each with a mask of its own, are the module's results."""
    module = denoiser.module
    for seed, call in enumerate(calls):
        output, kept = denoiser.record(**call)
        wanted = module(**call)
        assert_near(output, wanted)
        mask = MASKS["random"](denoiser.mask_shape(call), seed)
        found = denoiser.edit([maskfx.EditStep(call, mask, kept)])[0]
        assert_near(found, wanted)
        assert_kept_outside(mask, found, output)


def narrowed(denoiser: maskfx.CompiledDenoiser) -> list[bool]:
    return [one.program is not None and not one.reasons for one in denoiser.compilations]


def roles(denoiser: maskfx.CompiledDenoiser) -> list[tuple[str, ...]]:
    captured = [one.capture for one in denoiser.compilations]
    return [leaf.sides for one in captured for leaf in one.leaves if leaf.sides]


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("sides-of-tokens", ("y", "x")),
        ("sides-of-patches", ("y/2", "x/2")),
        pytest.param("sides-in-pixels", ("y*16", "x*16"), marks=pytest.mark.slow),
        pytest.param("sides-in-one-row", ("y", "x"), marks=pytest.mark.slow),
        pytest.param("sides-turned", ("x", "y"), marks=pytest.mark.slow),
        pytest.param("sides-of-a-video", ("frames", "y", "x"), marks=pytest.mark.slow),
        pytest.param("sides-counted", ("tokens",), marks=pytest.mark.slow),
    ],
)
def test_one_capture_serves_every_size(name: str, found: tuple[str, ...]) -> None:
    case = OWN[name]
    denoiser = maskfx.compile(case.build())
    check(denoiser, *(case.inputs(size, 3) for size in (SQUARE, TALL, WIDE, Size(3, 6, 10, 3))))
    assert roles(denoiser) == [found]
    assert narrowed(denoiser) == [True]
    assert "for pictures whose sides are the numbers in img_" in denoiser.explain()


def test_pictures_of_other_sizes_share_a_step(of_tokens: maskfx.CompiledDenoiser) -> None:
    calls = [TOKENS.inputs(size, 3) for size in (SQUARE, TALL, WIDE)]
    steps = []
    for seed, call in enumerate(calls):
        mask = MASKS["random"](of_tokens.mask_shape(call), seed)
        steps.append(maskfx.EditStep(call, mask, of_tokens.record(**call)[1]))
    for found, call in zip(of_tokens.edit(steps), calls, strict=True):
        assert_near(found, of_tokens.module(**call))
    assert len(of_tokens.programs) == 1


def test_one_picture_size_where_sums_of_sides_are_unknown() -> None:
    case = OWN["sides-cumulated"]
    denoiser = maskfx.compile(case.build())
    check(denoiser, case.inputs(SQUARE, 3), case.inputs(WIDE, 3))
    assert narrowed(denoiser) == [True, True]
    assert "for these values of img_sizes" in denoiser.explain()


class OtherSides(SidesOfTokens):
    """A picture whose own sides are integers; a tensor has those of another one."""

    def forward(  # type: ignore[override]
        self, sample: Tensor, timestep: Tensor, context: Tensor, img_sizes: Tensor
    ) -> Tensor:
        h, w = self.read(img_sizes)
        grown = sample.repeat_interleave(h, 2).repeat_interleave(w, 3)
        picture = grown[:, :, : sample.shape[2], : sample.shape[3]]
        x = self.first(picture.permute(0, 2, 3, 1)).flatten(1, 2)
        return self.mixed(x, timestep, context).transpose(1, 2).unflatten(2, sample.shape[2:])


def test_numbers_that_are_the_sides_by_chance(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first call's numbers are its picture's sides, those of later calls are not.

    Whether the module takes other numbers is known from the first such call, without a run more.
    """

    def call(size: Size, *numbers: int) -> dict[str, Any]:
        sample = Draw(1).normal(size.batch, 4, size.height, size.width)
        return {**sides(size, 1), "sample": sample, "img_sizes": rows(size, *numbers)}

    asked: list[bool] = []

    def counted(*given: Any) -> bool:
        asked.append(fails(*given))
        return asked[-1]

    monkeypatch.setattr(program_cache, "fails", counted)
    denoiser = maskfx.compile(built(partial(OtherSides, listed)))
    own, other = call(SQUARE, 6, 6), call(SQUARE, 2, 3)
    check(denoiser, own, other)
    assert asked == [False]
    check(denoiser, other, own, other)
    assert asked == [False]
    check(denoiser, call(WIDE, 6, 6), call(TALL, 6, 10))


def test_sides_that_are_not_the_tokens(of_tokens: maskfx.CompiledDenoiser) -> None:
    """No capture takes numbers that don't make the picture, and the module fails with them."""
    check(of_tokens, TOKENS.inputs(SQUARE, 3))
    with pytest.raises(maskfx.InputError, match="img_sizes: its picture is 42, but sample has 36"):
        of_tokens.record(**{**TOKENS.inputs(SQUARE, 3), "img_sizes": rows(SQUARE, 6, 7)})


def test_sides_that_change_between_recording_and_edit(of_tokens: maskfx.CompiledDenoiser) -> None:
    inputs = TOKENS.inputs(WIDE, 3)
    _, kept = of_tokens.record(**inputs)
    inputs["img_sizes"].copy_(rows(WIDE, 12, 4))
    mask = MASKS["random"](of_tokens.mask_shape(inputs), 0)
    assert mask.shape == (12, 4)
    with pytest.raises(maskfx.CacheError, match="recorded at y=4"):
        of_tokens.edit([maskfx.EditStep(inputs, mask, kept)])
    check(of_tokens, inputs)


def test_samples_with_sides_of_their_own() -> None:
    """A row per sample, of which a padded sequence is cut: samples run one by one."""
    case = OWN["sides-of-each"]
    denoiser = maskfx.compile(case.build())
    check(denoiser, case.inputs(TALL, 3), case.inputs(SQUARE, 3))
    assert all(narrowed(denoiser))


@pytest.mark.parametrize("sample", [0, -1])
def test_samples_whose_sides_differ(sample: int) -> None:
    """Both pictures have as many tokens; the module convolves all as one of them has its rows."""
    read = partial(row_of, sample)
    denoiser = maskfx.compile(built(partial(SidesOfTokens, read)))
    alike = TOKENS.inputs(Size(2, 6, 4, 5), 3)
    check(denoiser, alike)
    for numbers in ([[6, 4], [3, 8]], [[3, 8], [6, 4]]):
        mixed = {**alike, "img_sizes": torch.tensor(numbers)}
        assert_near(denoiser.batch([mixed])[0], denoiser.module(**mixed))


def row_of(sample: int, img_sizes: Tensor) -> tuple[int, ...]:
    return tuple(img_sizes[sample].tolist())


def test_a_square_picture_shows_the_order_by_what_is_computed() -> None:
    """Width may stand first; another order fits a square as well, and leaves views in full."""

    def width_first(size: Size) -> dict[str, Any]:
        return {**sides(size, 3), "img_sizes": rows(size, size.width, size.height)}

    denoiser = maskfx.compile(built(partial(SidesOfTokens, turned)))
    check(denoiser, *map(width_first, (SQUARE, TALL, WIDE)))
    assert denoiser.mask_shape(width_first(WIDE)) == (4, 12)
    assert roles(denoiser) == [("x", "y")]


def test_packed_tokens_keep_their_masks_where_the_order_of_sides_is_unclear() -> None:
    """The tokens are convolved as a picture of other sides: no order of the two fits."""
    denoiser = maskfx.compile(built(partial(SidesOfTokens, halved)))
    inputs = TOKENS.inputs(WIDE, 3)
    check(denoiser, inputs)
    assert denoiser.mask_shape(inputs) == (48,)


def halved(img_sizes: Tensor) -> tuple[int, ...]:
    h, w = img_sizes[0].tolist()
    return h * w // 2, 2


class Unread(SidesOfTokens):
    """Sides that are read, and equal numbers that are a place in a table."""

    def forward(  # type: ignore[override]
        self, sample: Tensor, timestep: Tensor, context: Tensor, img_sizes: Tensor, place: Tensor
    ) -> Tensor:
        table = torch.arange(400.0).sin().reshape(100, 4)
        return super().forward(sample + table[place][:, None], timestep, context, img_sizes)


def test_numbers_that_python_does_not_read_are_no_sides() -> None:
    denoiser = maskfx.compile(built(partial(Unread, listed)))
    for place in (36, 5):
        check(denoiser, {**TOKENS.inputs(SQUARE, 3), "place": torch.tensor([place])})
    assert narrowed(denoiser) == [True]


def test_a_mask_is_held_beside_sides() -> None:
    case = OWN["sides-and-mask"]
    denoiser = maskfx.compile(case.build())
    check(denoiser, *(case.inputs(size, 3) for size in (SQUARE, WIDE, Size(2, 10, 6, 5))))
    assert narrowed(denoiser) == [True]  # a text of another length needs another capture
    assert [leaf.path for leaf in denoiser.compilations[0].capture.leaves if leaf.held] == ["kept"]


def test_saved_programs_serve_every_size(tmp_path: Path) -> None:
    for sizes in ((SQUARE,), (SQUARE, WIDE)):
        shared_programs().clear()
        denoiser = maskfx.compile(TOKENS.build(), programs=tmp_path)
        check(denoiser, *(TOKENS.inputs(size, 3) for size in sizes))
        assert len(list(tmp_path.rglob("*.program"))) == 1
        assert narrowed(denoiser) == [True]


def test_graphs_for_one_size_are_not_exported(tmp_path: Path) -> None:
    case = OWN["sides-cumulated"]
    with pytest.raises(maskfx.InputError, match="depend on the values of img_sizes"):
        export(case.build(), tmp_path / "graphs", example_inputs=case.inputs(SQUARE, 3))


@pytest.mark.parametrize(
    ("numbers", "sizes", "found"),
    [
        ([[4, 6]], {"y": 4, "x": 6}, ("y", "x")),
        ([[6, 4]], {"y": 4, "x": 6}, ("x", "y")),
        ([[1, 64, 96]], {"y": 4, "x": 6}, ("", "y*16", "x*16")),
        ([[2, 3], [4, 6]], {"y": 8, "x": 12}, ("y/4", "x/4", "y/2", "x/2")),
        ([[4, 6, 3]], {"y": 4, "x": 6, "frames": 3}, ("y", "x", "")),
        ([[3, 4, 6]], {"y": 4, "x": 6, "frames": 3}, ("frames", "y", "x")),
        ([[72]], {"y": 4, "x": 6, "frames": 3}, ("tokens/1",)),
        ([[6]], {"y": 4, "x": 6}, ("tokens/4",)),
        ([[5, 6]], {"y": 4, "x": 6}, ("", "tokens/4")),
        ([[4], [6]], {"y": 4, "x": 6}, ("", "tokens/4")),
        ([[24]], {"tokens": 24}, ("tokens",)),
        ([[4, 7]], {"y": 4, "x": 6}, ()),
        ([[4, 6]], {"tokens": 24}, ()),
        ([[2, 2]], {"y": 5, "x": 5}, ()),
    ],
)
def test_roles_of_numbers(
    numbers: list[list[int]], sizes: dict[str, int], found: tuple[str, ...]
) -> None:
    flat = [n for line in numbers for n in line]
    assert roles_in(torch.tensor(numbers), flat, sizes) == found


def test_either_order_of_a_square() -> None:
    value = torch.tensor([[6, 6]])
    assert roles_in(value, [6, 6], {"y": 6, "x": 6}) == ("y", "x")
    assert roles_in(value, [6, 6], {"y": 6, "x": 6}, turned=True) == ("x", "y")
