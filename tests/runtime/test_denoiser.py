"""CompiledDenoiser beyond the oracles: what it follows, what it gives up, what it keeps."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import maskfx
from bench.harness import count_flops
from maskfx import DenseStep, EditStep
from maskfx.runtime.programs import program_cache, proof
from tests.passes.test_cut_keys import Block, block_inputs
from tests.passes.tools import error
from tests.runtime.backends.test_inductor import Stack, inputs

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


@pytest.mark.wrong_program
def test_a_program_that_is_wrong_at_a_size_runs_dense_at_that_size(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    module = Stack(1).eval()
    denoiser = maskfx.compile(module)
    monkeypatch.setattr(program_cache, "same_values", lambda *given: False)
    arguments, others = inputs(1, 8, 8), inputs(1, 8, 12)
    assert error(edited(denoiser, arguments), module(**arguments)) < 1e-6
    monkeypatch.undo()
    [compilation] = denoiser.compilations
    assert compilation.program is None
    assert "another result" in compilation.reasons["program"]
    denoiser._known.every.clear()  # the same program is captured again
    assert error(edited(denoiser, arguments), module(**arguments)) < 1e-6
    assert "No program" in denoiser.explain()
    mask = torch.zeros(8, 12, dtype=torch.bool)
    mask[2:4, 3:5] = True
    output, cache = denoiser.record(**others)
    step = EditStep(others, mask, cache)
    assert error(denoiser.edit([step])[0], output) < 1e-5
    assert denoiser.compilations[0].program is not None
    ran = count_flops(lambda: denoiser.edit([step]))["total"]
    assert 0 < ran < 0.7 * count_flops(lambda: module(**others))["total"]


def test_a_program_proved_under_empty_weights_is_proved_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    module = Stack(1).eval()
    full = {name: value.clone() for name, value in module.state_dict().items()}
    weights = [p for p in module.parameters() if p.ndim > 1]
    torch.nn.init.zeros_(weights[-1])
    denoiser = maskfx.compile(module)
    arguments = inputs(1, 8, 8)
    edited(denoiser, arguments)
    proofs: list[object] = []
    prove = program_cache.ProgramCache._prove

    def proving(*args: Any) -> str:
        proofs.append(args)
        return prove(*args)

    monkeypatch.setattr(program_cache.ProgramCache, "_prove", proving)
    edited(denoiser, arguments)
    assert not proofs
    module.load_state_dict(full)
    edited(denoiser, arguments)
    assert len(proofs) == 1
    module.load_state_dict(full)
    edited(denoiser, arguments)
    assert len(proofs) == 1


def test_memory_that_runs_out_in_a_proof_says_nothing_about_the_program(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    module = Stack(1).eval()
    denoiser = maskfx.compile(module)
    arguments = inputs(1, 8, 8)

    def full(*args: object) -> None:
        raise torch.OutOfMemoryError("no memory")

    monkeypatch.setattr(denoiser._executor, "run", full)
    with pytest.raises(torch.OutOfMemoryError):
        denoiser.record(**arguments)
    monkeypatch.undo()
    edited(denoiser, arguments)
    assert [one.program is None for one in denoiser.compilations] == [False]


def test_captures_with_other_tables_have_other_programs() -> None:
    class Tabled(nn.Module):
        def forward(self, sample: Tensor, strong: bool = False) -> Tensor:
            table = torch.tensor([[3.0, 1.0], [1.0, 0.0]] if strong else [[0.5, 2.0], [0.0, 1.0]])
            return (torch.tanh(sample).movedim(1, -1) @ table).movedim(-1, 1)

    module = Tabled()
    denoiser = maskfx.compile(module)
    sample = torch.randn(1, 2, 8, 8)
    for strong in (False, True):
        arguments: dict[str, Any] = {"sample": sample, "strong": strong}
        assert error(edited(denoiser, arguments), module(**arguments)) < 1e-5
    assert len(denoiser.programs) == 2


def test_captures_with_other_cuts_have_other_programs() -> None:
    """Their graphs differ in nothing but where tokens are cut."""

    class Halved(nn.Module):
        def forward(self, sample: Tensor, late: bool = False) -> Tensor:
            count = 24 if late else 8
            parts = sample[:, :count], sample[:, count:]
            each = [F.scaled_dot_product_attention(part, part, part) for part in parts]
            return sample + torch.cat(each, 1)

    module = Halved()
    denoiser, sample = maskfx.compile(module), torch.randn(2, 32, 8)
    for late in (False, True):
        arguments: dict[str, Any] = {"sample": sample, "late": late}
        _, kept = denoiser.record(**arguments)
        found = denoiser.edit([EditStep(arguments, torch.arange(32) % 5 == 0, kept)])[0]
        assert error(found, module(**arguments)) < 1e-5
    assert len(denoiser.programs) == 2


@pytest.mark.parametrize("shape", [(8, 8), (16, 24), (1, 1), (5,), (64,)])
def test_a_proof_leaves_a_rest_at_coarse_levels(shape: tuple[int, ...]) -> None:
    mask = proof.uneven_mask(shape)
    assert mask.any()
    assert mask.numel() == 1 or not mask.all()
    if shape[0] > 8 and len(shape) == 2:
        coarse = torch.nn.functional.max_pool2d(mask[None].float(), 8)
        assert 0 < coarse.mean() < 1


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
    assert not denoiser._executor.frames
    assert not denoiser._executor.sides.kept


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
    original, waited = denoiser._executor.run, []

    def run(program: Any, calls: Any, *split: Any) -> Any:
        forgetting = threading.Thread(target=denoiser.forget)
        forgetting.start()
        forgetting.join(0.2)
        waited.append(forgetting)
        assert forgetting.is_alive()
        return original(program, calls, *split)

    monkeypatch.setattr(denoiser._executor, "run", run)
    found = denoiser.batch([arguments])[0]
    waited[0].join(5)
    assert not denoiser.programs, "forgotten once the step was over"
    assert torch.equal(found, wanted)


class Drawing(nn.Module):
    """Draws the same numbers in each call, which a captured graph draws anew."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner, self.outer = nn.Conv2d(4, 8, 1), nn.Conv2d(8, 4, 1)

    def forward(self, sample: Tensor) -> Tensor:
        table = torch.randn(8, 8, generator=torch.Generator().manual_seed(0))
        found: Tensor = self.outer(torch.einsum("bchw,cd->bdhw", self.inner(sample), table))
        return found


@pytest.mark.wrong_program
def test_a_graph_that_differs_from_its_module_is_not_run() -> None:
    module = Drawing().eval()
    denoiser = maskfx.compile(module)
    given = {"sample": torch.randn(2, 4, 8, 12)}
    wanted = module(**given)
    output, cache = denoiser.record(**given)
    mask = torch.zeros(8, 12, dtype=torch.bool)
    mask[2:5, 3:7] = True
    for _ in range(2):
        (found,) = denoiser.edit([EditStep(given, mask, cache)])
        assert torch.equal(found, wanted)
    assert torch.equal(output, wanted)
    assert "another result than the module" in denoiser.explain()
