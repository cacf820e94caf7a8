"""Dense calls of equal shapes are one call of the module."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

import maskfx
from maskfx.pipelines.compile import pipeline_state_of
from maskfx.runtime.execution.dense_batch import TRIES, CallGroup, DenseBatcher
from tests.factories.pipelines import PIPES, call_of, compiled, plain
from tests.factories.zoo import ZOO, Case, Size
from tests.runtime.test_oracle import TOLERANCE

Array = np.ndarray[Any, Any]
TEXT = "StableDiffusionPipeline"


def listed(case: Case) -> bool:
    """Is its picture a list of samples?"""
    return any(isinstance(value, list) for value in case.inputs(Size(), 0).values())


CASES = [
    pytest.param(case, id=name)
    for name, case in ZOO.items()
    if not listed(case) and name != "UNetMotionModel"  # its texts are one for each frame
]


def apart(found: Any, wanted: Any) -> float:
    """The largest relative distance of two results' tensors."""
    pairs = zip(tree_leaves(found), tree_leaves(wanted), strict=True)
    return max(float((a - b).norm() / b.norm()) for a, b in pairs)


class Small(nn.Module):
    """A denoiser that counts its calls; `peeks`: it sees but the first timestep of a batch."""

    def __init__(self, peeks: bool = False, shift: float = 0.0) -> None:
        super().__init__()
        self.line, self.peeks, self.shift, self.calls = nn.Linear(3, 3), peeks, shift, 0

    @torch.no_grad()
    def forward(
        self,
        sample: Tensor,
        timestep: Tensor,
        ids: Tensor | None = None,
        scale: float | Array = 1.0,
    ) -> tuple[Tensor]:
        self.calls += 1
        times = (timestep[:1] if self.peeks else timestep) + self.shift
        found: Tensor = self.line(sample) * times.view(-1, 1, 1) * float(np.sum(scale))
        return (found if ids is None else found + ids,)


def numbers(groups: list[CallGroup]) -> list[list[int]]:
    return [group.numbers for group in groups]


def sample(seed: int, rows: int = 5, **more: Any) -> dict[str, Any]:
    noise = torch.Generator().manual_seed(seed)
    return {
        "sample": torch.randn(2, rows, 3, generator=noise),
        "timestep": torch.full((2,), 3.0 + seed),
        **more,
    }


@pytest.mark.parametrize("case", CASES)
def test_calls_of_one_shape_get_in_one_what_they_get_alone(case: Case) -> None:
    denoiser = maskfx.compile(case.build())
    for size in (case.sizes[0], case.sizes[-1]):
        calls = [case.inputs(size, seed) for seed in range(3)]
        alone = [denoiser.module(**case.inputs(size, seed)) for seed in range(3)]
        groups = denoiser.alike(calls)
        assert [group.numbers for group in groups] == [[0, 1, 2]]
        for found, wanted in zip(denoiser.plain_together(groups[0]), alone, strict=True):
            assert apart(found, wanted) < TOLERANCE


@pytest.mark.parametrize("name", ["UNet2DConditionModel", "FluxTransformer2DModel"])
def test_one_call_of_the_module_answers_all(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    case = next(case for key, case in ZOO.items() if type(case.build()).__name__ == name)
    denoiser = maskfx.compile(case.build())
    calls = [case.inputs(case.sizes[0], seed) for seed in range(4)]
    (group,) = denoiser.alike(calls)
    counted = count(monkeypatch, denoiser.module)
    assert len(denoiser.plain_together(group)) == 4
    assert counted() == 1


def count(monkeypatch: pytest.MonkeyPatch, module: nn.Module) -> Callable[[], int]:
    """How often a module is called from now on."""
    calls, original = [0], module.forward

    def forward(*args: Any, **inputs: Any) -> Any:
        calls[0] += 1
        return original(*args, **inputs)

    monkeypatch.setattr(module, "forward", forward)
    return lambda: calls[0]


def test_other_shapes_and_other_constants_are_other_calls() -> None:
    ids, moved = torch.ones(5, 3), torch.full((5, 3), 2.0)
    calls = [
        sample(0),
        sample(1, rows=7),
        sample(2, scale=2.0),
        sample(3),
        sample(4, ids=ids),
        sample(5, ids=moved),
        sample(6, ids=ids.clone()),
        sample(7, scale=2.0),
    ]
    batcher = DenseBatcher(Small(), None)
    groups = batcher.groups(calls)
    assert numbers(groups) == [[0, 3], [1], [2, 7], [4, 6], [5]]
    assert apart(batcher.run(groups[3])[1], batcher.module(**calls[6])) < 1e-6


def test_arrays_are_the_same_if_they_are_one() -> None:
    one, other = np.ones(2), np.ones(2)
    calls = [sample(0, scale=one), sample(1, scale=other), sample(2, scale=one)]
    assert numbers(DenseBatcher(Small(), None).groups(calls)) == [[0, 2], [1]]


def test_a_module_whose_requests_see_each_other_is_called_for_each() -> None:
    alike = [sample(0), sample(0)]  # even where these very numbers would do
    peeking = DenseBatcher(Small(peeks=True), None)
    assert numbers(peeking.groups(alike)) == [[0], [1]]
    assert list(peeking.refused.values()) == ["calls get other results in one than alone"]
    assert numbers(DenseBatcher(Small(), None).groups(alike)) == [[0, 1]]


def test_explain_says_what_stays_alone() -> None:
    denoiser = maskfx.compile(Small(peeks=True))
    assert numbers(denoiser.alike([sample(0), sample(1)])) == [[0], [1]]
    assert "don't share calls of the module: calls get other" in maskfx.explain(denoiser)


def test_whole_numbers_are_told_apart_too() -> None:
    """A first step's timestep is often zero."""
    alike = [sample(0, timestep=torch.zeros(2, dtype=torch.long)) for _ in range(2)]
    assert numbers(DenseBatcher(Small(peeks=True, shift=1.0), None).groups(alike)) == [[0], [1]]


def test_a_proof_without_numbers_is_tried_again_a_few_times() -> None:
    module = Small()
    batcher = DenseBatcher(module, None)
    poisoned = [sample(0, ids=torch.full((5, 3), float("inf"))) for _ in range(2)]
    assert numbers(batcher.groups(poisoned)) == [[0], [1]]
    assert not batcher.refused
    sane = [sample(n, ids=torch.ones(5, 3)) for n in range(2)]
    assert numbers(batcher.groups(sane)) == [[0, 1]]
    batcher.forget()
    for _ in range(TRIES + 1):
        batcher.groups(poisoned)
    calls = module.calls
    batcher.groups(poisoned)
    assert module.calls == calls
    assert "finite" in next(iter(batcher.refused.values()))


def test_a_kind_is_proved_once() -> None:
    module = Small()
    batcher = DenseBatcher(module, None)
    batcher.groups([sample(0), sample(1)])
    assert module.calls == 3  # two alone, both in one
    batcher.groups([sample(2, rows=9), sample(3, rows=9)])
    assert module.calls == 3
    batcher.forget()
    batcher.groups([sample(0), sample(1)])
    assert module.calls == 6


def test_requests_without_a_mask_share_calls_in_the_engine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pipe, kind = compiled(TEXT), PIPES[TEXT]
    wanted = [plain(TEXT)(**call_of(kind, seed, output_type="np")).images for seed in range(3)]
    unet = pipeline_state_of(pipe).denoisers["unet"]
    calls = count(monkeypatch, unet.module.get_submodule("conv_in"))
    with maskfx.Engine(maskfx.BatchPolicy(batch=3, patience=5.0)) as engine:
        tickets = [
            engine.submit(pipe, **call_of(kind, seed, output_type="np")) for seed in range(3)
        ]
        for ticket in tickets:  # what is first seen is proved
            ticket.result(60)
        proved = calls()
        tickets = [
            engine.submit(pipe, **call_of(kind, seed, output_type="np")) for seed in range(3)
        ]
        found = [ticket.result(60).images for ticket in tickets]
    steps = call_of(kind)["num_inference_steps"]
    assert steps <= calls() - proved <= steps + 2, (
        "who comes a little later shares the steps after that"
    )
    for one, other in zip(found, wanted, strict=True):
        assert abs(one - other).max() < 1e-4


def test_who_makes_a_shared_call_fail_fails_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    pipe, kind = compiled(TEXT), PIPES[TEXT]
    unet = pipeline_state_of(pipe).denoisers["unet"]
    wanted = plain(TEXT)(**call_of(kind, 0, output_type="np")).images
    original, shared = unet.plain_step, []

    def full(group: CallGroup) -> Any:
        shared.append(len(group.numbers))
        raise torch.OutOfMemoryError("no room for two")

    def strict(step: Any) -> Any:
        if step.inputs["sample"].isnan().any():
            raise ValueError("numbers")
        return original(step)

    def poison(pipe: Any, step: int, time: Any, tensors: dict[str, Any]) -> dict[str, Any]:
        return {"latents": tensors["latents"] * float("nan")}

    monkeypatch.setattr(unet, "plain_together", full)
    monkeypatch.setattr(unet, "plain_step", strict)
    with maskfx.Engine(maskfx.BatchPolicy(batch=2, patience=5.0)) as engine:
        good = engine.submit(pipe, **call_of(kind, 0, output_type="np"))
        bad = engine.submit(pipe, **call_of(kind, 1, output_type="np"), callback_on_step_end=poison)
        assert abs(good.result(60).images - wanted).max() < 1e-4
        with pytest.raises(Exception, match="numbers"):
            bad.result(60)
    assert set(shared) == {2}


def test_where_it_cant_be_tried_whether_calls_are_alike_each_is_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pipe, kind = compiled(TEXT), PIPES[TEXT]
    unet = pipeline_state_of(pipe).denoisers["unet"]
    wanted = [plain(TEXT)(**call_of(kind, seed, output_type="np")).images for seed in range(2)]
    tried = []

    def full(calls: Any, adapters: Any) -> Any:
        tried.append(len(calls))
        raise torch.OutOfMemoryError("no room to try")

    monkeypatch.setattr(unet, "alike", full)
    with maskfx.Engine(maskfx.BatchPolicy(batch=2, patience=5.0)) as engine:
        tickets = [
            engine.submit(pipe, **call_of(kind, seed, output_type="np")) for seed in range(2)
        ]
        for ticket, one in zip(tickets, wanted, strict=True):
            assert abs(ticket.result(60).images - one).max() < 1e-4
    assert 2 in tried
