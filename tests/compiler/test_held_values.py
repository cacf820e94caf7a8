"""Held values: a capture serves calls with equal masks where sizes depend on what these hold."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import maskfx
from maskfx.compiler.capture.arguments.value_reads import ValueReads, is_held
from maskfx.compiler.capture.capture import capture
from maskfx.export.exporter import export
from maskfx.runtime.programs.held_programs import MOST
from maskfx.runtime.programs.shared_programs import shared_programs
from tests.factories.own_cases import OWN
from tests.factories.own_held import AHEAD, slots
from tests.factories.zoo import Size
from tests.runtime.test_oracle import relative_error

SIZE = Size(1, 4, 6, 5)
MASK = torch.arange(24) % 5 == 1


@pytest.fixture(scope="module")
def denoiser() -> maskfx.CompiledDenoiser:
    return maskfx.compile(OWN["held-slots"].build())


def held(denoiser: maskfx.CompiledDenoiser) -> list[list[str]]:
    """The arguments that each capture holds."""
    return [[a.path for a in one.capture.leaves if a.held] for one in denoiser.compilations]


def near(found: Any, wanted: Any) -> bool:
    return relative_error(found, wanted) < 1e-4


def test_members_with_other_masks_share_a_step(denoiser: maskfx.CompiledDenoiser) -> None:
    calls = [slots(SIZE, 1), slots(SIZE, 2, ahead=0), slots(SIZE, 3, ahead=4)]
    wanted = [denoiser.module(**call) for call in calls]
    caches = [denoiser.record(**call)[1] for call in calls]
    steps = [maskfx.EditStep(c, MASK, kept) for c, kept in zip(calls, caches, strict=True)]
    dense = [maskfx.DenseStep(call) for call in calls]
    for found, expected in zip(denoiser.step([*steps, *dense]), wanted * 2, strict=True):
        assert near(found, expected)
    assert held(denoiser) == [["held"]] * 3
    assert all(one.program is not None for one in denoiser.compilations)


def test_a_mask_that_changes_needs_another_recording(denoiser: maskfx.CompiledDenoiser) -> None:
    _, kept = denoiser.record(**slots(SIZE, 1))
    step = maskfx.EditStep(slots(SIZE, 1, ahead=AHEAD + 1), MASK, kept)
    with pytest.raises(maskfx.CacheError, match="other values of a mask"):
        denoiser.edit([step])
    inputs = slots(SIZE, 1)
    step = maskfx.EditStep(inputs, MASK, kept)
    assert near(denoiser.edit([step])[0], denoiser.module(**inputs))
    inputs["held"] = inputs["held"].roll(1, 1)  # of the same call, between two steps
    with pytest.raises(maskfx.CacheError, match="other values of a mask"):
        denoiser.edit([step])


def test_a_mask_that_is_written_is_compared_again(denoiser: maskfx.CompiledDenoiser) -> None:
    inputs = slots(SIZE, 1)
    assert near(denoiser.batch([inputs])[0], denoiser.module(**inputs))
    inputs["held"].copy_(slots(SIZE, 1, ahead=0)["held"])
    assert near(denoiser.batch([inputs])[0], denoiser.module(**inputs))


def test_a_capture_serves_samples_that_all_have_its_values(
    denoiser: maskfx.CompiledDenoiser,
) -> None:
    inputs = slots(Size(2, 4, 6, 5), 1)
    assert near(denoiser.batch([inputs])[0], denoiser.module(**inputs))
    mixed = torch.cat([inputs["held"][:1], slots(SIZE, 1, ahead=0)["held"]])
    served = {True: 0, False: 0}
    for captured in (one.capture for one in denoiser.compilations):
        for index, leaf in enumerate(captured.leaves):
            if leaf.held:
                served[True] += is_held(leaf, captured.constants[index], inputs["held"])
                served[False] += is_held(leaf, captured.constants[index], mixed)
    assert served == {True: 1, False: 0}
    assert near(denoiser.batch([{**inputs, "held": mixed}])[0], denoiser.module(**inputs))


@pytest.mark.slow
def test_the_captures_used_last_are_kept() -> None:
    case = OWN["held-count"]
    denoiser = maskfx.compile(case.build())
    size = Size(1, 4, 6, MOST + 3)
    for left_out in (*range(1, MOST + 2), 1):
        inputs = {**case.inputs(size, 0), "held": torch.tensor([size.text - left_out])}
        _, kept = denoiser.record(**inputs)
        found = denoiser.edit([maskfx.EditStep(inputs, MASK, kept)])[0]
        assert near(found, denoiser.module(**inputs))
        assert len(denoiser.compilations) <= MOST
    assert len(denoiser.programs) <= MOST
    assert "for these values of held, which sizes depend on" in denoiser.explain()


def test_saved_programs_serve_equal_values_only(tmp_path: Path) -> None:
    calls = [slots(SIZE, 1), slots(SIZE, 1, ahead=0)]
    for _ in range(2):
        shared_programs().clear()
        denoiser = maskfx.compile(OWN["held-slots"].build(), programs=tmp_path)
        for call in calls:
            _, kept = denoiser.record(**call)
            found = denoiser.edit([maskfx.EditStep(call, MASK, kept)])[0]
            assert near(found, denoiser.module(**call))
        assert len(list(tmp_path.rglob("*.program"))) == 2  # the second denoiser wrote none
        assert len(denoiser.compilations) == 2


def test_graphs_of_certain_values_are_not_exported(tmp_path: Path) -> None:
    with pytest.raises(maskfx.InputError, match="depend on the values of held"):
        export(OWN["held-slots"].build(), tmp_path / "graphs", example_inputs=slots(SIZE, 1))


class ReadsSteps(nn.Module):
    """The text up to a number that the step decides."""

    def forward(self, sample: Tensor, timestep: Tensor, context: Tensor) -> Tensor:
        count = int(timestep.max()) % 3 + 1
        return sample + context[:, :count].sum(1, keepdim=True)


def test_steps_are_never_held() -> None:
    def inputs(step: int) -> dict[str, Tensor]:
        return {
            "sample": torch.ones(1, 24, 4),
            "timestep": torch.tensor([step]),
            "context": torch.ones(1, 5, 4),
        }

    found = capture(ReadsSteps(), inputs(1), held=True)
    assert found.module is None
    assert not found.constants
    denoiser = maskfx.compile(ReadsSteps())
    for step in (1, 2, 3):
        assert near(denoiser.batch([inputs(step)])[0], denoiser.module(**inputs(step)))


class Repeats(nn.Module):
    """As many times as a mask has places, which data decides at every picture size."""

    def forward(self, sample: Tensor, timestep: Tensor, kept: Tensor) -> Tensor:
        for _ in range(int(kept.sum())):
            sample = sample * 1.1 + timestep[:, None, None, None]
        return sample


def test_no_other_picture_size_is_tried_where_data_decides_a_size() -> None:
    inputs = {
        "sample": torch.ones(1, 4, 16, 16),
        "timestep": torch.ones(1),
        "kept": torch.tensor([1, 1, 0]),
    }
    found = capture(Repeats(), inputs)
    assert found.reads
    # a batch of three, of two, and of two with fixed sizes
    assert [note.split("{")[0] for note in found.notes] == [
        "export with symbolic sizes ",
        "export with symbolic sizes ",
        "export with fixed sizes ",
    ]


@pytest.mark.parametrize(
    ("function", "read"),
    [
        (lambda a, b: a[b.bool()], {1}),
        (lambda a, b: a[: b.sum()], {1}),
        (lambda a, b: (a + b).nonzero(), {0, 1}),
        (lambda a, b: a.repeat_interleave(b), {1}),
        (lambda a, b: [n for n in (b * 2).tolist()], {1}),
        (lambda a, b: torch.where(b > 1), {1}),
        (lambda a, b: torch.where(b > 1, a, b), set()),
        (lambda a, b: a[b.long()] + a.masked_fill(b > 1, 0), set()),
    ],
)
def test_notes_what_decides_sizes(function: Any, read: set[int]) -> None:
    a, b = torch.arange(3), torch.tensor([0, 1, 2])
    with ValueReads({0: a, 1: b}) as reads:
        function(a, b)
    assert reads.read == read


@pytest.mark.parametrize(("name", "text"), [("packed-earlier", 9), ("held-earlier", 5)])
def test_one_picture_size_where_symbolic_ones_run_mostly_in_full(name: str, text: int) -> None:
    """Texts of any length share a capture, unless a mask of them is held; pictures have their own.

    The second denoiser needs both: its mask held, and the picture's sizes as numbers.
    """
    case = OWN[name]
    denoiser = maskfx.compile(case.build())
    for size in (Size(1, 8, 12, 5), Size(2, 8, 12, text), Size(1, 12, 8, 5)):
        inputs = case.inputs(size, 0)
        _, kept = denoiser.record(**inputs)
        mask = torch.arange(size.height * size.width).reshape(size.height, size.width) % 7 == 2
        found = denoiser.edit([maskfx.EditStep(inputs, mask, kept)])[0]
        assert near(found, denoiser.module(**inputs))
    assert held(denoiser) == [["held"] if name == "held-earlier" else []] * 2
    for one in denoiser.compilations:
        assert one.capture.leaves[0].held_sizes
        assert one.program is not None
        assert not one.reasons
