"""Calls whose tokens are those of several pictures, one after another in one sequence."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import maskfx
from maskfx.runtime.validation.packed_pictures import PackedPictures
from tests.factories.own_denoisers import TEXT, WIDTH, built, embed
from tests.factories.zoo import Draw
from tests.runtime.test_oracle import assert_kept_outside, assert_near

Sides = list[tuple[int, int]]
CALLS: list[Sides] = [[(8, 10), (6, 8)], [(8, 8), (4, 6), (10, 6)], [(6, 8)], [(8, 8)] * 2]
PIXELS = 16


class Packed(nn.Module):
    """Pictures are convolved and attend to themselves and a text, each alone.

    Args:
        convolved: whether the sides are known.
        together: whether each picture sees the mean of all.
    """

    def __init__(self, convolved: bool = True, together: bool = False) -> None:
        super().__init__()
        self.first, self.last, self.text = (
            nn.Linear(a, b) for a, b in ((4, WIDTH), (WIDTH, 4), (TEXT, WIDTH))
        )
        self.conv = nn.Conv2d(WIDTH, WIDTH, 3, padding=1)
        self.time, self.qkv = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 3 * WIDTH)
        self.convolves, self.together = convolved, together

    def mixed(self, tokens: Tensor, timestep: Tensor, context: Tensor, sides: Sides) -> Tensor:
        x, text, done = self.first(tokens), self.text(context), []
        for i, part in enumerate(x.split([h * w for h, w in sides], 1)):
            own = part + self.time(embed(timestep))[:1, None]
            if self.convolves:
                picture = own.transpose(1, 2).unflatten(2, sides[i])
                own = own + F.silu(self.conv(picture)).flatten(2).transpose(1, 2)
            joint = torch.cat([own, text[i : i + 1] if len(text) > 1 else text], 1)
            q, k, v = self.qkv(joint).unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4)
            mixed = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
            done.append(own + mixed[:, : own.shape[1]])
        y = torch.cat(done, 1)
        out: Tensor = self.last(y + y.mean(1, keepdim=True) if self.together else y)
        return out


class Tuples(Packed):
    def forward(
        self, tokens: Tensor, timestep: Tensor, context: Tensor, img_shapes: Sides
    ) -> Tensor:
        return self.mixed(tokens, timestep, context, img_shapes)


class Pixels(Packed):
    def forward(self, tokens: Tensor, timestep: Tensor, context: Tensor, sizes: Sides) -> Tensor:
        sides = [(h // PIXELS, w // PIXELS) for h, w in sizes]
        return self.mixed(tokens, timestep, context, sides)


class Rows(Packed):
    def forward(
        self, tokens: Tensor, timestep: Tensor, context: Tensor, grid_thw: Tensor
    ) -> Tensor:
        sides = [(h, w) for _, h, w in grid_thw.tolist()]
        return self.mixed(tokens, timestep, context, sides)


class Ends(Packed):
    """Where pictures end is known, not their sides."""

    def forward(
        self, tokens: Tensor, timestep: Tensor, context: Tensor, cu_seqlens: Tensor
    ) -> Tensor:
        ends = cu_seqlens.tolist()
        counts = [(stop - start, 1) for start, stop in zip(ends, ends[1:], strict=False)]
        return self.mixed(tokens, timestep, context, counts)


def call(sides: Sides, seed: int, texts: int = 1, **more: Any) -> dict[str, Any]:
    draw, count = Draw(seed), sum(h * w for h, w in sides)
    tokens, context = draw.normal(1, count, 4), draw.normal(texts, 5, TEXT)
    return {"tokens": tokens, "timestep": draw.steps(1), "context": context, **more}


def tuples(sides: Sides, seed: int) -> dict[str, Any]:
    return call(sides, seed, img_shapes=sides)


def texts(sides: Sides, seed: int) -> dict[str, Any]:
    """A text for each picture."""
    return call(sides, seed, len(sides), img_shapes=sides)


def pixels(sides: Sides, seed: int) -> dict[str, Any]:
    return call(sides, seed, sizes=[(PIXELS * h, PIXELS * w) for h, w in sides])


def rows(sides: Sides, seed: int) -> dict[str, Any]:
    return call(sides, seed, grid_thw=torch.tensor([[1, h, w] for h, w in sides]))


def ends(sides: Sides, seed: int) -> dict[str, Any]:
    counts = torch.tensor([0, *(h * w for h, w in sides)])
    return call(sides, seed, cu_seqlens=counts.cumsum(0))


Form = tuple[Callable[[], nn.Module], Callable[[Sides, int], dict[str, Any]]]
FORMS: dict[str, Form] = {
    "tuples": (Tuples, tuples),
    "texts": (Tuples, texts),
    "pixels": (Pixels, pixels),
    "rows": (Rows, rows),
    "ends": (partial(Ends, convolved=False), ends),
}


def check(denoiser: maskfx.CompiledDenoiser, calls: Sequence[dict[str, Any]]) -> None:
    """A recording, an edit and a dense run of all calls in one step are the module's results."""
    recorded = denoiser.step([maskfx.RecordStep(one) for one in calls])
    draw = torch.Generator().manual_seed(0)
    masks = [torch.rand(denoiser.mask_shape(one), generator=draw) < 0.25 for one in calls]
    steps = [
        maskfx.EditStep(one, mask, kept)
        for one, mask, (_, kept) in zip(calls, masks, recorded, strict=True)
    ]
    for one, (output, _), *others in zip(
        calls, recorded, denoiser.edit(steps), denoiser.batch(calls), strict=True
    ):
        for found in (output, *others):
            assert_near(found, denoiser.module(**one))


@pytest.mark.parametrize("form", FORMS)
def test_pictures_run_on_rows(form: str) -> None:
    """One compilation serves all numbers and sizes of pictures; no site runs in full."""
    make, given = FORMS[form]
    denoiser = maskfx.compile(built(make))
    calls = [given(sides, seed) for seed, sides in enumerate(CALLS)]
    shapes = [denoiser.mask_shape(one) for one in calls]
    alone = (48,) if form == "ends" else (6, 8)
    assert shapes == [(8 * 10 + 6 * 8,), (8 * 8 + 4 * 6 + 10 * 6,), alone, (2 * 8 * 8,)]
    check(denoiser, calls)
    assert [one.reasons for one in denoiser.compilations] == [{}]


def test_a_picture_is_edited_as_alone() -> None:
    denoiser, sides = maskfx.compile(built(Tuples)), CALLS[0]
    before = tuples(sides, 0)
    after = {**tuples(sides, 1), "timestep": before["timestep"]}
    output, kept = denoiser.record(**before)
    mask = torch.rand(128) < 0.25
    found = denoiser.edit([maskfx.EditStep(after, mask, kept)])[0]
    start = 0
    for i, (h, w) in enumerate(sides):
        stop = start + h * w
        own, other = (
            {**one, "tokens": one["tokens"][:, start:stop], "img_shapes": sides[i : i + 1]}
            for one in (before, after)
        )
        alone = denoiser.record(**own)[1]
        part = mask[start:stop].view(h, w)
        wanted = denoiser.edit([maskfx.EditStep(other, part, alone)])[0]
        assert_near(found[:, start:stop], wanted)
        start = stop
    assert_kept_outside(mask, found, output)
    with pytest.raises(maskfx.CacheError, match="recorded with"):
        denoiser.edit([maskfx.EditStep({**after, "img_shapes": sides[::-1]}, mask, kept)])


def test_pictures_that_see_one_another_run_together() -> None:
    denoiser = maskfx.compile(built(partial(Tuples, together=True)))
    calls = [tuples(sides, seed) for seed, sides in enumerate(CALLS[:2])]
    check(denoiser, calls)
    assert not any(denoiser._validator.inputs(one).samples for one in calls)


def test_pictures_that_see_one_another_by_chance_of_the_first_call() -> None:
    """Calls of another length are compared with the module too."""

    class Chance(Tuples):
        def forward(
            self, tokens: Tensor, timestep: Tensor, context: Tensor, img_shapes: Sides
        ) -> Tensor:
            self.together = tokens.shape[1] == 148
            return super().forward(tokens, timestep, context, img_shapes)

    denoiser = maskfx.compile(built(Chance))
    for seed, sides in enumerate([CALLS[0], [(8, 10), (4, 17)]]):
        given = tuples(sides, seed)
        assert_near(denoiser.record(**given)[0], denoiser.module(**given))


@pytest.mark.parametrize(
    ("more", "counts"),
    [
        ({"sizes": [(4, 6), (2, 3)]}, [24, 6]),
        ({"sizes": ((4, 6), (2, 3))}, [24, 6]),
        ({"sizes": [[1, 4, 6], [1, 2, 3]]}, [24, 6]),
        ({"sizes": {"own": [(4, 6), (2, 3)]}}, [24, 6]),
        ({"sizes": [(8, 12), (4, 6)]}, [24, 6]),
        ({"lengths": [24, 6]}, [24, 6]),
        ({"lengths": torch.tensor([24, 6])}, [24, 6]),
        ({"ends": torch.tensor([0, 24, 30], dtype=torch.int32)}, [24, 6]),
        ({"sizes": [(4, 6), (2, 4)]}, []),
        ({"sizes": [(5, 6)]}, []),
        ({"sizes": [(4, 6), (2, 3.0)]}, []),
        ({"kept": torch.ones(30, dtype=torch.bool)}, []),
        ({"levels": torch.tensor([24.0, 6.0])}, []),
    ],
)
def test_counts_of_tokens(more: dict[str, Any], counts: list[int]) -> None:
    assert PackedPictures({"tokens": torch.zeros(1, 30, 4), **more}).counts == counts


def test_what_belongs_to_each_picture() -> None:
    given = {
        "tokens": torch.arange(30.0).view(1, 30, 1),
        "ends": torch.tensor([0, 24, 30]),
        "text": torch.arange(7.0).view(1, 7, 1),
        "text_ends": torch.tensor([0, 5, 7]),
        "level": torch.tensor([3.0, 4.0]),
        "names": ["one", "other"],
        "longest": 24,
        "table": torch.zeros(5, 3),
    }

    def cut(value: Tensor, cuts: tuple[tuple[int, int, int], ...], *, less: int = 0) -> Tensor:
        [(axis, start, length)] = cuts
        return value.narrow(axis, start, length) - less

    one, other = PackedPictures(given).calls(cut)
    lists = {name: v.flatten().tolist() for name, v in other.items() if isinstance(v, Tensor)}
    assert lists["tokens"] == list(range(24, 30))
    assert (lists["ends"], lists["text_ends"]) == ([0, 6], [0, 2])
    assert (lists["text"], lists["level"], lists["table"]) == ([5, 6], [4], [0] * 15)
    assert (other["names"], other["longest"], one["longest"]) == (["other"], 6, 24)
