"""Light runs: which products are left out, what Python sees, and what a module keeps of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import maskfx
from maskfx.compiler.capture.arguments.infer_roles import infer
from maskfx.compiler.capture.tracing import branches
from maskfx.compiler.capture.tracing.branches import full_run, plain_run
from maskfx.compiler.capture.tracing.light_run import (
    LightProducts,
    NotLight,
    convolved_elements,
    tensors_in,
)
from maskfx.compiler.capture.tracing.twin import NoTwin, Twin
from tests.passes.tools import TOLERANCE, error, numbers


class Blocks(nn.Module):
    """Convolutions, a norm, attention and a linear, at sizes whose products are left out."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(4, 64, 3, padding=1), nn.GroupNorm(8, 64)
        self.mix, self.last = nn.Linear(64, 64), nn.Conv2d(64, 4, 3, padding=1, stride=2)

    def forward(self, sample: Tensor) -> Tensor:
        sample = self.norm(self.first(sample))
        tokens = self.mix(sample.flatten(2).transpose(1, 2))[:, None]
        tokens = nn.functional.scaled_dot_product_attention(tokens, tokens, tokens)[:, 0]
        tokens += 1
        sample = sample + tokens.transpose(1, 2).unflatten(2, sample.shape[2:])
        return self.after(self.last(sample))

    def after(self, sample: Tensor) -> Tensor:
        return sample


SAMPLE = numbers(2, 4, 48, 32, seed=0)


def computed(module: nn.Module, sample: Tensor) -> tuple[Tensor, list[str]]:
    """The result of a light run, and the operators that were computed in it."""
    seen: list[str] = []

    class Spied(LightProducts):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            found = super().__torch_dispatch__(func, types, args, kwargs)
            if not any(map(self.is_left_out, tensors_in(found))):
                seen.append(func.__name__)
            return found

    twin = Twin(module)
    with torch.no_grad(), Spied(twin):
        return twin.module(sample), seen


@pytest.mark.parametrize("inference", [False, True])
def test_nothing_is_computed_from_a_large_product_on(inference: bool) -> None:
    with torch.inference_mode(inference):
        found, seen = computed(Blocks().eval(), SAMPLE)
    assert found.shape == (2, 4, 24, 16)
    assert set(seen) <= {"t.default", "detach.default"}  # of weights


def test_small_products_and_products_of_inputs_are_computed() -> None:
    class Tables(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.small = nn.Linear(4, 4)

        def forward(self, sample: Tensor) -> Tensor:
            return self.small(sample) + sample @ sample.mT @ sample

    module, sample = Tables().eval(), numbers(2, 512, 4, seed=0)
    found, seen = computed(module, sample)
    assert found.equal(module(sample))
    assert "addmm.default" in seen


def runs(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Of each run, whether it was a full one."""
    seen: list[bool] = []

    def spied(*given: Any) -> Any:
        seen.append(torch._C._len_torch_dispatch_stack() == 0)
        return full_run(*given)

    monkeypatch.setattr(branches, "full_run", spied)
    return seen


def plain(module: nn.Module) -> Any:
    inputs = {"sample": SAMPLE}
    return plain_run(module, inputs, infer(module, inputs, None))


class Holder:
    """An object that a module calls, such as an attention processor."""

    def __init__(self) -> None:
        self.seen: Tensor | None = None

    def __call__(self, sample: Tensor) -> None:
        self.seen = sample


class Keeps(Blocks):
    """Keeps what it computed."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.where, self.most = where, 0
        self.known: dict[Any, Any] = {"inside": {}}
        self.last_sample: Tensor | None = None
        self.holder = Holder()
        self.table = torch.zeros(())
        self.mean = nn.Buffer(torch.zeros(()))

    def after(self, sample: Tensor) -> Tensor:
        if self.where == "attribute and number" and self.most < sample.shape[2]:
            self.last_sample, self.most = sample, sample.shape[2]
        elif self.where == "dict":
            self.known[sample.shape] = sample
        elif self.where == "inner dict":
            self.known["inside"][sample.shape] = sample
        elif self.where == "object":
            self.holder(sample)
        elif self.where == "buffer":
            self.mean.mul_(0.5).add_(sample.mean())
        elif self.where == "tensor":
            self.table.copy_(sample.mean())
        return sample


KEPT: dict[str, Callable[[Keeps], Any]] = {
    "attribute and number": lambda module: module.last_sample,
    "dict": lambda module: next(v for v in module.known.values() if isinstance(v, Tensor)),
    "inner dict": lambda module: next(iter(module.known["inside"].values())),
    "object": lambda module: module.holder.seen,
    "buffer": lambda module: module.mean,
    "tensor": lambda module: module.table,
}


@pytest.mark.parametrize("where", KEPT)
def test_a_module_keeps_what_a_full_run_computed(
    where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    module, seen = Keeps(where).eval(), runs(monkeypatch)
    plain(module)
    assert seen == [False, True]
    other = Keeps(where).eval()
    other.load_state_dict(module.state_dict())
    other.mean.zero_()
    with torch.no_grad():
        other(SAMPLE)
    assert torch.equal(KEPT[where](module), KEPT[where](other))


def test_a_module_that_keeps_nothing_runs_lightly_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    module, seen = Keeps("nowhere").eval(), runs(monkeypatch)
    assert plain(module).light
    assert seen == [False]


class Branches(Blocks):
    """Goes by what Python sees of a value that isn't computed in a light run."""

    def __init__(self, sees: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.sees = sees

    def after(self, sample: Tensor) -> Tensor:
        return sample if self.sees(sample) else -sample


@pytest.mark.parametrize(
    ("sees", "light"),
    [
        (lambda x: x.is_contiguous(), True),
        (lambda x: x.abs().max() > 0, False),
        (lambda x: (x > 0).any().item(), False),
        (lambda x: float(x.max()) > 0, False),
        (lambda x: torch.equal(x, x), False),
        (lambda x: x[x > 0].numel(), False),
    ],
)
def test_what_python_sees_takes_a_full_run(
    sees: Callable[[Tensor], Any], light: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = runs(monkeypatch)
    plain(Branches(sees).eval())
    assert seen == ([False] if light else [False, True])


def test_a_module_with_hooks_takes_a_full_run(monkeypatch: pytest.MonkeyPatch) -> None:
    module = Blocks().eval()
    module.mix.register_forward_hook(lambda *_: None)
    seen = runs(monkeypatch)
    plain(module)
    assert seen == [True]


def test_a_function_in_place_of_a_method_takes_a_full_run(monkeypatch: pytest.MonkeyPatch) -> None:
    module = Keeps("attribute and number").eval()
    own = module.mix.forward
    module.mix.forward = lambda x: own(x)  # type: ignore[assignment]
    with pytest.raises(NoTwin, match="calls the Linear itself"):
        Twin(module)
    seen = runs(monkeypatch)
    plain(module)
    assert seen == [True]


def test_a_twin_of_a_compiled_module_runs_what_its_stand_in_replaced() -> None:
    module = Keeps("attribute and number").eval()
    module.forward = module.forward  # type: ignore[method-assign]
    twin = Twin(module)
    twin.module(SAMPLE)
    assert module.last_sample is None
    assert twin.keeps_tensors()
    assert all(a is b for a, b in zip(twin.module.parameters(), module.parameters(), strict=True))


def test_a_table_that_grows_serves_larger_pictures_later() -> None:
    """As tables of positions do, which remember how long they are."""

    class Grows(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.wide, self.narrow = nn.Conv2d(4, 64, 3, padding=1), nn.Conv2d(64, 4, 1)
            self.most, self.table = 0, torch.zeros(0)

        def forward(self, sample: Tensor, timestep: Tensor) -> Tensor:
            side = sample.shape[-1]
            if side > self.most:
                self.table, self.most = torch.arange(side) / side, side
            return self.narrow(self.wide(sample) + self.table[:side])

    module = Grows().eval()
    denoiser: maskfx.CompiledDenoiser = maskfx.compile(module)
    for side in (24, 32, 64):
        inputs = {"sample": numbers(1, 4, side, side, seed=0), "timestep": torch.ones(1)}
        assert error(denoiser.record(**inputs)[0], module(**inputs)) < TOLERANCE


def test_convolutions_are_counted_without_a_run() -> None:
    module = Keeps("attribute and number").eval()
    assert convolved_elements(module, {"sample": SAMPLE}) == 2 * (4 + 64) * 48 * 32
    assert module.last_sample is None
    assert module.most == 0
    module.mix.register_forward_hook(lambda *_: None)
    assert convolved_elements(module, {"sample": SAMPLE}) == 0


def test_writes_to_the_modules_own_tensors_end_a_light_run() -> None:
    twin = Twin(Keeps("buffer").eval())
    with torch.no_grad(), LightProducts(twin), pytest.raises(NotLight, match="of the module"):
        twin.module(SAMPLE)


def test_what_a_module_compiles_is_still_compiled_after_a_light_run() -> None:
    torch.compiler.reset()
    graphs = []

    def backend(graph: Any, example: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    class Compiling(Blocks):
        def after(self, sample: Tensor) -> Tensor:
            return torch.compile(after, backend=backend, fullgraph=True)(sample)

    def after(sample: Tensor) -> Tensor:
        return sample.sin() + 1

    module = Compiling().eval()
    twin = Twin(module)
    with torch.no_grad(), LightProducts(twin):
        twin.module(SAMPLE)
    assert not graphs
    with torch.no_grad():
        module(SAMPLE)
    assert len(graphs) == 1
