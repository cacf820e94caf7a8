"""Denoisers that take lists of samples without a batch: one sample narrows, several are right."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from diffusers.models.modeling_outputs import Transformer2DModelOutput
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

import maskfx
from maskfx.compiler.capture.capture import capture
from maskfx.runtime.programs.shared_programs import shared_programs
from maskfx.runtime.validation.sample_arguments import join_results
from tests.passes.tools import TOLERANCE, error, numbers

Inputs = dict[str, Any]
MULTIPLE = 8


class Samples(nn.Module):
    """Image and text tokens of each sample, filled up to a multiple and attending to each other."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.image, self.text, self.level = nn.Linear(16, 8), nn.Linear(6, 8), nn.Linear(1, 8)
        self.filling = nn.Parameter(torch.randn(1, 8))
        self.q, self.k, self.v = (nn.Linear(8, 8) for _ in range(3))
        self.out = nn.Linear(8, 16)

    def filled(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """The rows up to a multiple, and which of them fill."""
        missing = -len(rows) % MULTIPLE
        if not missing:
            return rows, torch.zeros(len(rows), 1, dtype=torch.bool)
        fills = [torch.zeros(len(rows), 1).bool(), torch.ones(missing, 1).bool()]
        return torch.cat([rows, rows[-1:].repeat(missing, 1)]), torch.cat(fills)

    def forward(
        self, x: list[Tensor], t: Tensor, cap_feats: list[Tensor], return_dict: bool = True
    ) -> tuple[list[Tensor]]:
        level = self.level(t[:, None] / 1000).tanh()
        joint, lengths = [], []
        for picture, caption in zip(x, cap_feats, strict=True):
            channels, frames, height, width = picture.shape
            parts = picture.view(channels, frames, height // 2, 2, width // 2, 2)
            rows = parts.permute(1, 2, 4, 3, 5, 0).reshape(-1, 4 * channels)
            (image, empty), (text, blank) = self.filled(rows), self.filled(caption)
            image = torch.where(empty, self.filling, self.image(image))
            joint.append(torch.cat([image, torch.where(blank, self.filling, self.text(text))]))
            lengths.append(len(rows))
        padded = pad_sequence(joint, batch_first=True)
        tokens = padded * (1 + level[:, None])
        q, k, v = (
            f(tokens).unflatten(-1, (2, 4)).transpose(1, 2) for f in (self.q, self.k, self.v)
        )
        sizes = [len(one) for one in joint]
        mask = None
        if any(size != max(sizes) for size in sizes):
            mask = torch.arange(max(sizes)) < torch.tensor(sizes)[:, None]
            mask = mask[:, None, None]
        mixed = F.scaled_dot_product_attention(q, k, v, mask).transpose(1, 2).flatten(2)
        rows = self.out(tokens + mixed)
        out = []
        for picture, own, count in zip(x, rows.unbind(0), lengths, strict=True):
            channels, frames, height, width = picture.shape
            parts = own[:count].view(frames, height // 2, width // 2, 2, 2, channels)
            out.append(parts.permute(5, 0, 1, 3, 2, 4).reshape(channels, frames, height, width))
        return (out,)


def make(height: int, width: int, text: int, seed: int = 0, samples: int = 1) -> Inputs:
    return {
        "x": [numbers(4, 1, height, width, seed=seed + i) for i in range(samples)],
        "t": torch.full((samples,), 7.0),
        "cap_feats": [numbers(text + i, 6, seed=seed + 50 + i) for i in range(samples)],
        "return_dict": False,
    }


@cache
def denoiser() -> maskfx.CompiledDenoiser:
    return maskfx.compile(Samples().eval())


def a_mask(height: int, width: int) -> Tensor:
    mask = torch.zeros(height, width, dtype=torch.bool)
    mask[1:3, 2:5] = mask[-1, -1] = True
    return mask


SIZES = [(8, 10, 5), (8, 8, 16), (12, 6, 3)]  # the second fills nothing up


@pytest.mark.parametrize("size", SIZES)
def test_one_sample_narrows(size: tuple[int, int, int]) -> None:
    inputs, found = make(*size), denoiser()
    wanted = found.module(**inputs)
    output, kept = found.record(**inputs)
    assert error(output, wanted) < TOLERANCE
    again = found.edit([maskfx.EditStep(inputs, a_mask(*size[:2]), kept)])[0]
    assert error(again, wanted) < TOLERANCE
    for compilation in found.compilations:
        assert compilation.program is not None, compilation.reasons


def test_an_edit_means_what_it_says() -> None:
    """Active tokens attend to themselves as they are and to the rest as recorded.

    At a size that fills nothing up: filled rows run dense and read the current inputs.
    """
    shared_programs().clear()  # no capture of another size serves this one
    own = maskfx.compile(Samples().eval())
    height, width, text = 8, 8, 16
    before, after = make(height, width, text), make(height, width, text, seed=9)
    after["cap_feats"] = before["cap_feats"]
    mask = torch.zeros(height, width, dtype=torch.bool)
    mask[2:6, 4:8] = True
    mixed = {**after, "x": [torch.where(mask, after["x"][0], before["x"][0])]}
    output, kept = own.record(**before)
    found = own.edit([maskfx.EditStep(after, mask, kept)])[0]
    # one layer: what the rest puts into the mix depends on the rest alone
    wanted = torch.where(mask, own.module(**mixed)[0][0], output[0][0])
    assert error(found[0][0], wanted) < TOLERANCE
    assert error(found[0][0], output[0][0]) > TOLERANCE


def test_requests_of_all_sizes_in_one_batch() -> None:
    steps, wanted = [], []
    for seed, size in enumerate(SIZES):
        inputs = make(*size, seed=seed)
        output, kept = denoiser().record(**inputs)
        steps.append(maskfx.EditStep(inputs, a_mask(*size[:2]), kept))
        wanted.append(output)
    for one, two in zip(denoiser().edit(steps), wanted, strict=True):
        assert error(one, two) < TOLERANCE


class Scalar(Samples):
    """Its level is one number without an axis."""

    def forward(
        self, x: list[Tensor], t: Tensor, cap_feats: list[Tensor], return_dict: bool = True
    ) -> tuple[list[Tensor]]:
        (out,) = super().forward(x, t, cap_feats, return_dict)
        return ([one * (t[0] / 10).cos() + cap_feats[0].mean() for one in out],)


def test_numbers_without_an_axis_are_never_shared() -> None:
    """Requests of one batch with other levels and texts: right, even if it takes a dense run."""
    denoiser = maskfx.compile(Scalar().eval())
    steps, wanted = [], []
    for seed in range(2):
        inputs = {**make(8, 10, 5, seed=seed), "t": torch.tensor([7.0 + 5 * seed])}
        output, kept = denoiser.record(**inputs)
        assert error(output, denoiser.module(**inputs)) < TOLERANCE
        steps.append(maskfx.EditStep(inputs, a_mask(8, 10), kept))
        wanted.append(output)
    for one, two in zip(denoiser.edit(steps), wanted, strict=True):
        assert error(one, two) < TOLERANCE


@pytest.mark.parametrize("samples", [2, 3])
def test_several_samples_narrow(samples: int) -> None:
    """Texts of unequal lengths, which the module pads; the call is as many members of the batch."""
    inputs = make(8, 12, 5, samples=samples)
    assert capture(denoiser().module, inputs).module is None
    wanted = denoiser().module(**inputs)
    output, kept = denoiser().record(**inputs)
    assert error(output, wanted) < TOLERANCE
    assert kept.sizes["batch"] == samples
    again = denoiser().edit([maskfx.EditStep(inputs, a_mask(8, 12), kept)])[0]
    assert error(again, wanted) < TOLERANCE
    assert all(one.program is not None for one in denoiser().compilations)


def test_a_sample_of_a_list_is_edited_as_alone() -> None:
    before, after = make(8, 12, 5, samples=2), make(8, 12, 5, seed=9, samples=2)
    found, mask = denoiser(), a_mask(8, 12)
    kept = found.record(**before)[1]
    together = found.edit([maskfx.EditStep(after, mask, kept)])[0][0]
    for i, one in enumerate(together):
        own, other = (
            {"x": v["x"][i : i + 1], "t": v["t"][i : i + 1], "cap_feats": v["cap_feats"][i : i + 1],
             "return_dict": False}
            for v in (before, after)
        )  # fmt: skip
        alone_kept = found.record(**own)[1]
        alone = found.edit([maskfx.EditStep(other, mask, alone_kept)])[0][0][0]
        assert error(one, alone) < TOLERANCE
        assert torch.equal(one[..., ~mask], found.record(**own)[0][0][0][..., ~mask])


def test_a_list_of_another_length_needs_its_own_recording() -> None:
    kept = denoiser().record(**make(8, 12, 5, samples=2))[1]
    step = maskfx.EditStep(make(8, 12, 5, samples=3), a_mask(8, 12), kept)
    with pytest.raises(maskfx.CacheError, match="batch=2"):
        denoiser().edit([step])


def test_results_in_a_mapping_are_joined_whatever_its_keys() -> None:
    """A ControlNet returns residuals by the number of the block, or in an output of diffusers."""
    one, other = torch.randn(1, 3), torch.randn(1, 3)
    joined = join_results([{0: one, 5: one}, {0: other, 5: other}])
    assert list(joined) == [0, 5]
    assert torch.equal(joined[5], torch.cat([one, other]))
    named = join_results([Transformer2DModelOutput(one), Transformer2DModelOutput(other)])
    assert type(named) is Transformer2DModelOutput
    assert torch.equal(named.sample, torch.cat([one, other]))


class Crossed(Samples):
    """Every sample sees the mean of all."""

    def forward(
        self, x: list[Tensor], t: Tensor, cap_feats: list[Tensor], return_dict: bool = True
    ) -> tuple[list[Tensor]]:
        (out,) = super().forward(x, t, cap_feats, return_dict)
        return ([one + torch.stack(out).mean(0) for one in out],)


def test_samples_that_depend_on_each_other_run_dense() -> None:
    found, inputs = maskfx.compile(Crossed().eval()), make(8, 12, 5, samples=2)
    wanted = found.module(**inputs)
    output, kept = found.record(**inputs)
    assert error(output, wanted) < TOLERANCE
    again = found.edit([maskfx.EditStep(inputs, a_mask(8, 12), kept)])[0]
    assert error(again, wanted) < TOLERANCE
    reasons = " ".join(r for c in found.compilations for r in c.reasons.values())
    assert "2 samples in a list" in reasons
    assert "other results one by one" in reasons
    assert "other results one by one" in found.explain()


class Conditions(nn.Module):
    """A dictionary, and lists of pictures and of a picture's scales, none of which are samples."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.coarse = nn.Conv2d(6, 8, 3, padding=1), nn.Conv2d(1, 8, 1)
        self.down, self.up = nn.Conv2d(8, 8, 2, 2), nn.ConvTranspose2d(8, 4, 2, 2)

    def forward(self, given: Any, t: Tensor) -> Tensor:
        x, (fine, coarse) = (given["x"], given["hints"]) if isinstance(given, dict) else given
        high = self.first(torch.cat([x, fine], 1)) + t[:, None, None, None] / 1000
        return self.up(F.silu(self.down(high) + self.coarse(coarse)))


@pytest.mark.parametrize("named", [True, False])
def test_lists_of_other_things_are_no_samples(named: bool) -> None:
    shapes = (2, 4, 8, 6), (2, 2, 8, 6), (2, 1, 4, 3)
    x, fine, coarse = (numbers(*shape, seed=i) for i, shape in enumerate(shapes))
    given = {"x": x, "hints": [fine, coarse]} if named else [x, [fine, coarse]]
    inputs, module = {"given": given, "t": torch.tensor([3.0, 5.0])}, Conditions().eval()
    compiled = maskfx.compile(module)
    _, kept = compiled.record(**inputs)
    [found] = compiled.edit([maskfx.EditStep(inputs, torch.rand(8, 6) < 0.3, kept)])
    assert error(found, module(**inputs)) < TOLERANCE
    assert not compiled.compilations[-1].reasons
