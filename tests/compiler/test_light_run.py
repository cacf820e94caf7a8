"""Light runs: which products are left out, and what a module keeps of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from maskfx.compiler.capture import branches, light_run
from maskfx.compiler.capture.branches import full_run, plain_run
from maskfx.compiler.capture.light_run import LightProducts
from maskfx.compiler.capture.roles import infer
from tests.passes.tools import numbers


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


def computed(module: nn.Module, sample: Tensor) -> tuple[Tensor, list[str]]:
    """The result of a light run, and the operators that were computed in it."""
    seen: list[str] = []

    class Spied(LightProducts):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            found = super().__torch_dispatch__(func, types, args, kwargs)
            if not self._follows((found,), {}):
                seen.append(func.__name__)
            return found

    with torch.no_grad(), Spied(module):
        return module(sample), seen


def test_nothing_is_computed_from_a_large_product_on() -> None:
    sample = numbers(2, 4, 48, 32, seed=0)
    found, seen = computed(Blocks().eval(), sample)
    assert found.shape == (2, 4, 24, 16)
    assert not found.any()
    assert seen == ["t.default"]  # of the linear's weights


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


class Keeps(Blocks):
    """Keeps what it computed, in an attribute, a dict or a buffer."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.where = where
        self.known: dict[Any, Tensor] = {}
        self.last_sample: Tensor | None = None
        self.mean = nn.Buffer(torch.zeros(()))

    def after(self, sample: Tensor) -> Tensor:
        if self.where == "attribute":
            self.last_sample = sample
        elif self.where == "dict":
            self.known[sample.shape] = sample
        elif self.where == "buffer":
            self.mean.copy_(sample.mean())
        return sample


def runs(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Of each run, whether it was a full one."""
    seen: list[bool] = []

    def spied(*given: Any) -> Any:
        seen.append(torch._C._len_torch_dispatch_stack() == 0)
        return full_run(*given)

    monkeypatch.setattr(branches, "full_run", spied)
    return seen


@pytest.mark.parametrize("where", ["nowhere", "attribute", "dict", "buffer"])
def test_a_module_keeps_nothing_of_a_light_run(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module = Keeps(where).eval()
    inputs = {"sample": numbers(2, 4, 48, 32, seed=0)}
    seen = runs(monkeypatch)
    plain_run(module, inputs, infer(module, inputs, None))
    assert seen == ([False] if where == "nowhere" else [False, True])
    wanted = module(**inputs)
    kept = {
        "attribute": lambda: module.last_sample is not None and module.last_sample.equal(wanted),
        "dict": lambda: [v.equal(wanted) for v in module.known.values()] == [True],
        "buffer": lambda: torch.equal(module.mean, wanted.mean()),
        "nowhere": lambda: module.last_sample is None,
    }
    assert kept[where]()


def test_attributes_are_as_before_a_light_run() -> None:
    module = Keeps("attribute").eval()
    module.last_sample = before = torch.ones(3)
    module.known["a"] = value = torch.ones(2)
    with light_run.keeping_nothing(module) as changed:
        module.last_sample = torch.zeros(3)
        module.known.update(a=torch.zeros(2), b=torch.zeros(2))
        module.where = "buffer"
    assert sorted(changed) == ["known", "last_sample"]
    assert module.last_sample is before
    assert module.known == {"a": value}
    assert module.where == "buffer"  # no tensor


def test_what_python_asks_takes_a_full_run(monkeypatch: pytest.MonkeyPatch) -> None:
    class Asks(Blocks):
        def after(self, sample: Tensor) -> Tensor:
            return sample if sample.abs().max() > 0 else -sample

    module, inputs = Asks().eval(), {"sample": numbers(2, 4, 48, 32, seed=0)}
    seen = runs(monkeypatch)
    assert plain_run(module, inputs, infer(module, inputs, None)).answers == [True]
    assert seen == [False, True]


def test_a_module_with_hooks_takes_a_full_run(monkeypatch: pytest.MonkeyPatch) -> None:
    module, inputs = Blocks().eval(), {"sample": numbers(2, 4, 48, 32, seed=0)}
    module.mix.register_forward_hook(lambda *_: None)
    seen = runs(monkeypatch)
    plain_run(module, inputs, infer(module, inputs, None))
    assert seen == [True]
