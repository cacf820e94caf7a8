"""Parts of a module that read an argument alone: computed once per request, and never wrongly."""

from __future__ import annotations

import gc
from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import maskfx
from maskfx import DenseStep
from maskfx.runtime.execution import constant_parts
from maskfx.runtime.execution.constant_parts import ConstantParts
from tests.factories.lora import merged, update_of
from tests.passes.tools import error

CALLS = Counter[int]()  # by layer; a count within the layer would be a state of it


class Counted(nn.Linear):
    """A layer whose calls are counted, with a factor that is no weight."""

    def __init__(self, wide: int, narrow: int) -> None:
        super().__init__(wide, narrow)
        self.scaling = {"style": 1.0}
        CALLS[id(self)] = 0

    def forward(self, value: Tensor) -> Tensor:
        CALLS[id(self)] += 1
        return super().forward(value) * self.scaling["style"]


class Net(nn.Module):
    """A network with a hint that belongs to the request, and latents that change."""

    def __init__(self, writes: float | None = None) -> None:
        super().__init__()
        self.embed = nn.Sequential(Counted(3, 4), nn.SiLU())
        self.into, self.out, self.writes = Counted(4, 4), nn.Linear(4, 4), writes

    def forward(self, sample: Tensor, timestep: Tensor, hint: Tensor) -> Tensor:
        known = self.embed(hint)
        if self.writes is not None:
            known += self.writes * timestep.view(-1, 1, 1)
        return self.out(self.into(sample) + known * timestep.view(-1, 1, 1))


def counts(net: Any) -> tuple[int, int]:
    return CALLS[id(net.embed[0])], CALLS[id(net.into)]


def call(seed: int, hint: Tensor) -> dict[str, Any]:
    torch.manual_seed(seed)
    return {"sample": torch.randn(1, 5, 4), "timestep": torch.full((1,), 1.0 + seed), "hint": hint}


@torch.no_grad()
def run(parts: ConstantParts, net: nn.Module, given: dict[str, Any]) -> Tensor:
    with parts.over("kind", {id(v): [v] for v in given.values()}):
        found: Tensor = net(**given)
    return found


def test_what_belongs_to_the_request_is_computed_once_more_for_a_proof() -> None:
    net = Net().eval()
    parts, hint = ConstantParts(net), torch.randn(1, 5, 3)
    for number in range(6):
        given = call(number, hint)
        with torch.no_grad():
            wanted = net(**given)
        before = counts(net)
        assert torch.equal(run(parts, net, given), wanted)
        embedded, other = counts(net)
        assert embedded - before[0] == (number < 4)  # noted, kept and proved; `number` 0 finds it
        assert other == before[1] + 1
    other_hint = torch.randn(1, 5, 3)
    run(parts, net, call(9, other_hint))
    before = counts(net)
    found = run(parts, net, call(9, other_hint))
    assert counts(net)[0] == before[0] + 1, "another request's"
    with torch.no_grad():
        assert torch.equal(found, net(**call(9, other_hint)))


def test_changed_attributes_are_computed() -> None:
    """Such as the weight of an adapter that PEFT put into a layer."""
    net: Any = Net().eval()
    parts, hint = ConstantParts(net), torch.randn(1, 5, 3)
    for number in range(8):
        if number == 5:
            net.embed[0].scaling["style"] = 3.0
        given = call(number, hint)
        with torch.no_grad():
            wanted = net(**given)
        assert torch.equal(run(parts, net, given), wanted)
    assert parts.reused == 3
    net.embed[0].inner = object()  # may change without notice
    run(parts, net, call(9, hint))
    assert parts.reused == 3


def test_changed_weights_and_arguments_are_computed() -> None:
    net = Net().eval()
    parts, hint = ConstantParts(net), torch.randn(1, 5, 3)
    for number in range(5):
        run(parts, net, call(number, hint))
    assert parts.reused
    with torch.no_grad():
        for change in (net.embed[0].weight, hint):
            change.mul_(2)  # type: ignore[operator]
            assert torch.equal(run(parts, net, call(1, hint)), net(**call(1, hint)))


@pytest.mark.parametrize("writes", [1.0, 0.0])
def test_a_result_that_the_module_writes_into_isnt_kept(writes: float) -> None:
    net = Net(writes).eval()
    parts, hint = ConstantParts(net), torch.randn(1, 5, 3)
    for number in range(5):
        found = run(parts, net, call(number, hint))
        with torch.no_grad():
            assert torch.equal(found, net(**call(number, hint)))
    assert not parts.reused


def test_results_end_with_their_argument_and_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    net = Net().eval()
    parts, hints = ConstantParts(net), [torch.randn(1, 5, 3) for _ in range(2)]
    for number in range(4):
        for hint in hints:
            run(parts, net, call(number, hint))
    assert parts.nbytes == 2 * 5 * 4 * 4
    hints.pop()
    del hint
    gc.collect()
    assert parts.nbytes == 5 * 4 * 4
    monkeypatch.setattr(constant_parts, "MOST", 0)
    other = ConstantParts(net)
    for number in range(4):
        run(other, net, call(number, hints[0]))
    assert not other.nbytes
    assert not other.reused


@pytest.mark.parametrize("adapted", [False, True])
def test_requests_that_share_calls_have_their_own(adapted: bool) -> None:
    net = Net().eval()
    denoiser = maskfx.compile(net, mode="dense")
    own = (update_of(net, 2, 1),) if adapted else ()
    hints = [torch.randn(1, 5, 3) for _ in range(3)]
    for number in range(6):
        calls = [call(10 * number + i, hint) for i, hint in enumerate(hints)]
        for group in denoiser.alike(calls, [own] * 3):
            if len(group.numbers) > 1:
                results = denoiser.plain_together(group)
            else:
                results = [denoiser.plain_step(DenseStep(calls[n], own)) for n in group.numbers]
            with torch.no_grad():
                wanted = [merged(net, own)(**calls[n]) for n in group.numbers]
            assert error(results, wanted) < 1e-5
    assert bool(denoiser._batcher.constants.reused) is not adapted
    assert "forward" not in vars(net.embed)
