"""CompiledDenoiser beyond the oracles: what it follows, what it gives up, what it keeps."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import maskfx
from maskfx import DenseStep, EditStep, compilations
from tests.passes.test_cut_keys import Block, block_inputs
from tests.passes.tools import error
from tests.test_inductor import Stack, inputs

MASK = torch.arange(64).view(8, 8) % 5 == 0


def edited(denoiser: maskfx.CompiledDenoiser, arguments: dict[str, Tensor]) -> Tensor:
    _, cache = denoiser.record(**arguments)
    output: Tensor = denoiser.edit([EditStep(arguments, MASK, cache)])[0]
    return output


class Wrapped(nn.Module):
    """A layer with something beside it, as adapters are put in."""

    def __init__(self, inner: nn.Linear) -> None:
        super().__init__()
        self.inner, self.beside = inner, nn.Linear(inner.in_features, inner.out_features)

    def forward(self, value: Tensor) -> Tensor:
        output: Tensor = self.inner(value) + self.beside(value)
        return output


def replace(module: Stack) -> None:
    module.out = nn.Conv2d(8, 4, 3, padding=1)


def wrap(module: Stack) -> None:
    block = module.blocks[0]
    assert isinstance(block, Block)
    block.q = Wrapped(block.q)  # type: ignore[assignment]


@pytest.mark.parametrize("change", [replace, wrap], ids=["replaced", "wrapped"])
def test_follows_layers_that_are_replaced(change: object) -> None:
    module = Stack(1).eval()
    denoiser = maskfx.compile(module)
    arguments = inputs(1, 8, 8)
    before = edited(denoiser, arguments)
    assert callable(change)
    change(module)
    assert error(edited(denoiser, arguments), module(**arguments)) < 1e-5
    assert error(before, module(**arguments)) > 1e-3


def test_refuses_caches_of_before_a_replacement() -> None:
    module = Stack(1).eval()
    denoiser = maskfx.compile(module)
    arguments = inputs(1, 8, 8)
    _, cache = denoiser.record(**arguments)
    replace(module)
    with pytest.raises(maskfx.CacheError):
        denoiser.edit([EditStep(arguments, MASK, cache)])


def test_a_program_that_was_given_up_is_not_used_again(monkeypatch: pytest.MonkeyPatch) -> None:
    module = Stack(1).eval()
    denoiser = maskfx.compile(module)
    monkeypatch.setattr(compilations, "same_values", lambda a, b: False)
    arguments = inputs(1, 8, 8)
    assert error(edited(denoiser, arguments), module(**arguments)) < 1e-6
    monkeypatch.undo()
    denoiser.compilations.clear()  # the same program is captured again
    assert error(edited(denoiser, arguments), module(**arguments)) < 1e-6
    assert not denoiser.programs
    assert not denoiser.regions
    [compilation] = denoiser.compilations
    assert compilation.program is None
    assert "another result" in compilation.reasons["program"]


def test_a_recording_holds_no_argument() -> None:
    class Thin(nn.Module):
        """Its first convolution reads the picture itself."""

        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(1, 1, 3, padding=1)

        def forward(self, sample: Tensor, timestep: Tensor) -> Tensor:
            output: Tensor = self.conv(sample) * torch.cos(timestep).view(-1, 1, 1, 1)
            return output

    module = Thin().eval()
    denoiser = maskfx.compile(module)
    sample, timestep = torch.randn(1, 1, 8, 8), torch.tensor([1.0])
    kept, wanted = sample.clone(), module(sample, timestep)
    _, cache = denoiser.record(sample=sample, timestep=timestep)
    sample.mul_(7.0)
    timestep.add_(1.0)
    step = EditStep({"sample": kept, "timestep": torch.tensor([1.0])}, MASK, cache)
    assert error(denoiser.edit([step])[0], wanted) < 1e-5


def test_an_empty_mask_on_a_module_that_runs_dense_gives_the_record() -> None:
    class Reads(nn.Module):
        def forward(self, sample: Tensor) -> Tensor:
            return sample * float(sample.numpy().mean())

    denoiser = maskfx.compile(Reads())
    sample = torch.randn(1, 2, 8, 8)
    output, cache = denoiser.record(sample=sample)
    assert denoiser.compilations[0].program is None
    step = EditStep({"sample": sample + 1}, torch.zeros(8, 8, dtype=torch.bool), cache)
    assert torch.equal(denoiser.edit([step])[0], output)


def test_mode_dense_leaves_the_module() -> None:
    module = Stack(1).eval()
    denoiser = maskfx.compile(module, mode="dense")
    arguments = inputs(1, 8, 8)
    assert error(edited(denoiser, arguments), module(**arguments)) == 0
    assert not denoiser.programs
    assert 'mode="dense"' in denoiser.explain()


def test_mode_patch_batch_batches_and_keeps_nothing() -> None:
    module = Stack(1).eval()
    denoiser = maskfx.compile(module, mode="patch_batch")
    members = [inputs(1, 8, 8), inputs(2, 6, 10)]
    for found, arguments in zip(denoiser.batch(members), members, strict=True):
        assert error(found, module(**arguments)) < 1e-5
    assert error(denoiser.step([DenseStep(members[0])])[0], module(**members[0])) < 1e-5
    with pytest.raises(maskfx.InputError, match="patch_batch"):
        denoiser.record(**members[0])


def test_the_proof_leaves_nothing_behind() -> None:
    denoiser = maskfx.compile(Block(), example_inputs=block_inputs())
    assert not denoiser._ragged.frames
    assert not denoiser._ragged.sides.kept


def test_sums_of_half_precision_do_not_overflow() -> None:
    class Mean(nn.Module):
        def forward(self, sample: Tensor) -> Tensor:
            return sample - F.relu(sample).mean((2, 3), keepdim=True)

    denoiser = maskfx.compile(Mean())
    sample = torch.full((1, 2, 160, 160), 5.0, dtype=torch.float16)
    _, cache = denoiser.record(sample=sample)
    mask = torch.zeros(160, 160, dtype=torch.bool)
    mask[:2] = True
    assert torch.equal(denoiser.edit([EditStep({"sample": sample}, mask, cache)])[0], sample * 0)


def test_nothing_is_forgotten_while_a_step_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """A request's thread may see changed settings while the engine's loop steps."""
    denoiser = maskfx.compile(Stack(1).eval())
    arguments = inputs(1, 8, 8)
    wanted = denoiser.batch([arguments])[0]
    original, waited = denoiser._ragged.run, []

    def run(program: Any, calls: Any) -> Any:
        forgetting = threading.Thread(target=denoiser.forget)
        forgetting.start()
        forgetting.join(0.2)
        waited.append(forgetting)
        assert forgetting.is_alive()
        return original(program, calls)

    monkeypatch.setattr(denoiser._ragged, "run", run)
    found = denoiser.batch([arguments])[0]
    waited[0].join(5)
    assert not denoiser.programs, "forgotten once the step was over"
    assert torch.equal(found, wanted)
