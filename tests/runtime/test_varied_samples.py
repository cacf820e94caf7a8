"""Calls that list samples in any container, whose pictures may differ in size."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

import maskfx
from maskfx.runtime.cache.quantize import Encoding, Format
from maskfx.runtime.cache.serialize import decode, encode
from tests.factories.own_cases import OWN
from tests.factories.own_denoisers import built
from tests.factories.own_sides import SidesOfEach
from tests.factories.zoo import Size as Plain
from tests.passes.tools import TOLERANCE, error
from tests.runtime.test_samples import Crossed, Inputs, Samples, make

Size = tuple[int, int, int]  # height, width and tokens of the text
SIZES = [(8, 10, 5), (8, 8, 16), (12, 6, 3)]
CALLS = [SIZES, [SIZES[1], (16, 8, 3)], [SIZES[2]], [SIZES[1]] * 2]


def of_sizes(sizes: list[Size], seed: int = 0) -> Inputs:
    """The arguments of a call whose samples have these sizes."""
    each = [make(*size, seed=seed + 7 * i) for i, size in enumerate(sizes)]
    together = {name: [one[name][0] for one in each] for name in ("x", "cap_feats")}
    return {**together, "t": torch.full((len(each),), 7.0), "return_dict": False}


class Pairs(Samples):
    """Each sample is a list."""

    def forward(self, x: Any, t: Tensor, cap_feats: Any) -> Any:  # type: ignore[override]
        (out,) = super().forward([own for (own,) in x], t, [own for (own,) in cap_feats])
        return [[own] for own in out]


class Tuples(Samples):
    """Samples come and go in tuples."""

    def forward(self, x: Any, t: Tensor, cap_feats: Any) -> Any:  # type: ignore[override]
        return tuple(super().forward(x, t, cap_feats)[0])


class Named(Samples):
    """A mapping holds the lists."""

    def forward(self, given: Any, t: Tensor) -> Any:  # type: ignore[override]
        return {"sample": super().forward(given["x"], t, given["text"])[0]}


class Entries(Samples):
    """Each sample is a mapping."""

    def forward(self, samples: Any, t: Tensor) -> Any:  # type: ignore[override]
        return super().forward([one["x"] for one in samples], t, [one["text"] for one in samples])


class Together(Samples):
    """A tuple holds the lists."""

    def forward(self, given: Any, t: Tensor) -> Any:  # type: ignore[override]
        return super().forward(given[0], t, given[1])


def pairs(call: Inputs) -> Inputs:
    x, text = ([[own] for own in call[name]] for name in ("x", "cap_feats"))
    return {"x": x, "t": call["t"], "cap_feats": text}


def tuples(call: Inputs) -> Inputs:
    return {"x": tuple(call["x"]), "t": call["t"], "cap_feats": tuple(call["cap_feats"])}


def named(call: Inputs) -> Inputs:
    return {"given": {"x": call["x"], "text": call["cap_feats"]}, "t": call["t"]}


def entries(call: Inputs) -> Inputs:
    both = zip(call["x"], call["cap_feats"], strict=True)
    return {"samples": [{"x": x, "text": text} for x, text in both], "t": call["t"]}


def together(call: Inputs) -> Inputs:
    return {"given": (call["x"], call["cap_feats"]), "t": call["t"]}


def plain(call: Inputs) -> Inputs:
    return call


Form = tuple[type[Samples], Callable[[Inputs], Inputs]]
FORMS: dict[str, Form] = {
    "lists": (Samples, plain),
    "pairs": (Pairs, pairs),
    "tuples": (Tuples, tuples),
    "named": (Named, named),
    "entries": (Entries, entries),
    "together": (Together, together),
}


@cache
def compiled(form: str = "lists") -> maskfx.CompiledDenoiser:
    return maskfx.compile(FORMS[form][0]().eval())


def masked(denoiser: maskfx.CompiledDenoiser, call: Inputs, seed: int = 0) -> Tensor:
    draw = torch.Generator().manual_seed(seed)
    return torch.rand(denoiser.mask_shape(call), generator=draw) < 0.25


@pytest.mark.parametrize("form", FORMS)
def test_samples_narrow_in_any_container(form: str) -> None:
    """A recording, an edit and a dense run of all calls, in one step each."""
    kind, arranged = FORMS[form]
    denoiser, module = compiled(form), kind().eval()
    calls = [arranged(of_sizes(sizes, seed)) for seed, sizes in enumerate(CALLS)]
    if form == "together":  # as many lists as samples: which of them to divide isn't known
        calls = [calls[0], calls[2]]
    recorded = denoiser.step([maskfx.RecordStep(call) for call in calls])
    masks = [masked(denoiser, call, seed) for seed, call in enumerate(calls)]
    steps = [
        maskfx.EditStep(call, mask, kept)
        for call, mask, (_, kept) in zip(calls, masks, recorded, strict=True)
    ]
    for call, (output, _), edited, dense in zip(
        calls, recorded, denoiser.edit(steps), denoiser.batch(calls), strict=True
    ):
        wanted = module(**call)
        for found in (output, edited, dense):
            assert error(found, wanted) < TOLERANCE
        assert denoiser._validator.inputs(call).program is not None


def test_a_mask_has_the_sites_of_one_picture_after_another() -> None:
    denoiser = compiled()
    assert denoiser.mask_shape(of_sizes(SIZES)) == (8 * 10 + 8 * 8 + 12 * 6,)
    assert denoiser.mask_shape(of_sizes([SIZES[0]] * 2)) == (8, 10)


def test_a_sample_is_edited_as_alone() -> None:
    """Its part of the mask decides, and what it leaves out stays as recorded."""
    denoiser, before, after = compiled(), of_sizes(SIZES), of_sizes(SIZES, 9)
    output, kept = denoiser.record(**before)
    mask = masked(denoiser, before)
    found = denoiser.edit([maskfx.EditStep(after, mask, kept)])[0][0]
    parts = mask.split([height * width for height, width, _ in SIZES])
    for i, (part, (height, width, _)) in enumerate(zip(parts, SIZES, strict=True)):
        own, other = (
            {"x": [v["x"][i]], "t": v["t"][:1], "cap_feats": [v["cap_feats"][i]],
             "return_dict": False}
            for v in (before, after)
        )  # fmt: skip
        sites, alone = part.view(height, width), denoiser.record(**own)[1]
        wanted = denoiser.edit([maskfx.EditStep(other, sites, alone)])[0][0][0]
        assert error(found[i], wanted) < TOLERANCE
        assert error(found[i], output[0][i]) > TOLERANCE
        assert torch.equal(found[i][..., ~sites], output[0][i][..., ~sites])


def test_pictures_that_no_mask_touches() -> None:
    denoiser, before, after = compiled(), of_sizes(SIZES), of_sizes(SIZES, 9)
    output, kept = denoiser.record(**before)
    mask = torch.zeros(denoiser.mask_shape(before), dtype=torch.bool)
    found = denoiser.edit([maskfx.EditStep(after, mask, kept)])[0]
    assert error(found, output) == 0
    mask[:80] = True
    found = denoiser.edit([maskfx.EditStep(after, mask, kept)])[0]
    assert error(found[0][1:], output[0][1:]) == 0
    assert error(found[0][0], output[0][0]) > TOLERANCE


def test_one_compilation_serves_all_sizes() -> None:
    denoiser = maskfx.compile(Samples().eval())
    counts = []
    for seed, sizes in enumerate([SIZES, SIZES[::-1], [(16, 8, 4), SIZES[0], SIZES[2]]]):
        assert error(denoiser.record(**of_sizes(sizes, seed))[0], denoiser.module(
            **of_sizes(sizes, seed))) < TOLERANCE  # fmt: skip
        counts.append(len(denoiser._known.every))
    assert counts == [2, 2, 2]


def test_samples_that_depend_on_each_other_keep_what_was_recorded() -> None:
    """They run dense together; the mask keeps its shape."""
    denoiser = maskfx.compile(Means().eval())
    before, after = of_sizes(SIZES), of_sizes(SIZES, 9)
    output, kept = denoiser.record(**before)
    assert error(output, denoiser.module(**before)) < TOLERANCE
    mask = masked(denoiser, before)
    found = denoiser.edit([maskfx.EditStep(after, mask, kept)])[0][0]
    wanted = denoiser.module(**after)[0]
    parts = mask.split([height * width for height, width, _ in SIZES])
    for own, new, old, part in zip(found, wanted, output[0], parts, strict=True):
        assert torch.equal(own, torch.where(part.view(own.shape[-2:]), new, old))
    assert "other results one by one" in denoiser.explain()
    step = maskfx.EditStep(of_sizes([SIZES[0], SIZES[2], SIZES[1]]), mask, kept)
    with pytest.raises(maskfx.CacheError, match="recorded with"):
        denoiser.edit([step])


class Means(Crossed):
    """Every sample sees the mean of all, whatever their sizes."""

    def forward(
        self, x: list[Tensor], t: Tensor, cap_feats: list[Tensor], return_dict: bool = True
    ) -> tuple[list[Tensor]]:
        (out,) = Samples.forward(self, x, t, cap_feats, return_dict)
        mean = torch.stack([one.mean() for one in out]).mean()
        return ([one + mean for one in out],)


@pytest.mark.parametrize("changed", ["cast", "stored", "chosen"])
def test_recordings_of_several_sizes_are_kept_as_others(changed: str) -> None:
    denoiser, call = compiled(), of_sizes(SIZES)
    _, kept = denoiser.record(**call)
    assert kept.nbytes() == sum(one.nbytes() for one in kept.samples) > 0
    if changed == "cast":
        kept = kept.packed(Encoding(Format.BF16))
    elif changed == "stored":
        kept = decode(encode(kept))
    else:
        call = of_sizes(SIZES[::-1], 0)
        kept = denoiser.record(**call)[1].of_elements([0, 1, 2])
    found = denoiser.edit([maskfx.EditStep(call, masked(denoiser, call), kept)])[0]
    bound = 2e-2 if changed == "cast" else TOLERANCE
    assert error(found, denoiser.module(**call)) < bound


def test_other_recordings_and_masks_are_refused() -> None:
    denoiser, call = compiled(), of_sizes(SIZES[:2])
    _, kept = denoiser.record(**call)
    _, alike = denoiser.record(**of_sizes([SIZES[0]] * 2))
    mask = masked(denoiser, call)
    with pytest.raises(maskfx.CacheError, match="2 samples alike, the inputs have 2 whose"):
        denoiser.edit([maskfx.EditStep(call, mask, alike)])
    with pytest.raises(maskfx.CacheError, match="recorded with"):
        denoiser.edit([maskfx.EditStep(of_sizes(SIZES[1::-1]), mask, kept)])
    with pytest.raises(maskfx.MaskError, match=r"expected shape \(144,\), got \(8, 10\)"):
        denoiser.edit([maskfx.EditStep(call, torch.ones(8, 10).bool(), kept)])
    with pytest.raises(maskfx.CacheError):
        denoiser.edit([maskfx.EditStep(of_sizes([SIZES[0]] * 2), torch.ones(8, 10).bool(), kept)])


class Padded(SidesOfEach):
    """Tokens are padded to one length; the pictures that rows of a tensor cut out are listed."""

    def forward(  # type: ignore[override]
        self, sample: Tensor, timestep: Tensor, context: Tensor, img_sizes: Tensor
    ) -> list[Tensor]:
        x = self.mixed(self.first(sample), timestep, context)
        sides = enumerate(img_sizes.tolist())
        return [x[i, : h * w].reshape(h, w, -1).movedim(2, 0)[None] for i, (h, w) in sides]


def test_padded_tokens_of_pictures_of_different_sizes() -> None:
    denoiser = maskfx.compile(built(Padded))
    call = OWN["sides-of-each"].inputs(Plain(2, 6, 6, 5), 0)
    call["img_sizes"] = torch.tensor([[6, 6], [4, 8]])
    wanted = denoiser.module(**call)
    output, kept = denoiser.record(**call)
    assert denoiser.mask_shape(call) == (6 * 6 + 4 * 8,)
    edited = denoiser.edit([maskfx.EditStep(call, masked(denoiser, call), kept)])[0]
    for found in (output, edited):
        assert error(found, wanted) < TOLERANCE
    assert len(kept.samples) == 2
