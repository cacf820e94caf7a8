"""ServedDenoiser: the process's side of a `StepProcess`; computes the steps of one denoiser.

Adapters that all members of a step share are written into the weights where that takes less time,
as in the engine's process: this one gets copies of its own of the weights that change.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace

from torch import Tensor, nn

from maskfx.config import Settings
from maskfx.runtime.cache.step_cache import StepCache, with_tensors
from maskfx.runtime.denoiser import CompiledDenoiser
from maskfx.runtime.lora.adapter import Layers
from maskfx.runtime.lora.in_place_costs import Elsewhere
from maskfx.runtime.lora.sent import received_layers
from maskfx.runtime.step_executor import compute_steps
from maskfx.runtime.steps import AnyStep, EditStep, RecordStep
from maskfx.runtime.transport.sendable import bare
from maskfx.runtime.transport.sent_cache import received
from maskfx.runtime.transport.shared_tensors import PackedMessage, TensorHolder


@dataclass(frozen=True)
class Computed:
    """The results of a step, and what was chosen so far for adapters that members share."""

    results: PackedMessage
    in_place: Elsewhere


@dataclass
class Dropped:
    """Numbers of recordings and adapters, and of tensors, that are not sent any more."""

    contents: Sequence[int]
    tensors: Sequence[Hashable]


class ServedDenoiser:
    """A denoiser in its process; pickled as its module and settings, and compiled there.

    Args:
        module: The denoiser's module.
        settings: How it is compiled.
        name: Distinguishes its tensors' numbers from those of earlier processes.
    """

    def __init__(self, module: nn.Module, settings: Settings, name: int = 0) -> None:
        self.denoiser, self.name = CompiledDenoiser(module, settings), name
        self.caches: dict[int, StepCache] = {}
        self.layers: dict[int, Layers] = {}
        self.tensors = TensorHolder(name)
        self.denoiser.in_place.private = True

    def __reduce__(self) -> tuple[type[ServedDenoiser], tuple[object, Settings, int]]:
        return ServedDenoiser, (
            bare(self.denoiser.module, hooks=False),
            self.denoiser.settings,
            self.name,
        )

    def compute(
        self, message: PackedMessage, dropped: Dropped, shared: tuple[int, int] = (0, 0)
    ) -> Computed:
        """Compute steps; return results whose edits are the computed rows only.

        The rows of recordings stay here, because edits of them follow.

        Args:
            message: The steps.
            dropped: What isn't sent any more.
            shared: Where all members have the same adapters, and recordings with these, the sites
                that they compute, and the steps that are left with these adapters.
        """
        for number in dropped.contents:
            self.caches.pop(number, None)
            self.layers.pop(number, None)
        self.tensors.drop(dropped.tensors)
        sent: Sequence[AnyStep] = self.tensors.unpack(message)
        steps = [
            replace(step, adapters=received_layers(step.adapters, self.layers)) for step in sent
        ]
        steps = [received(step, self.caches) for step in steps]
        steps = [replace(step, rows=True) if isinstance(step, EditStep) else step for step in steps]
        in_place = self.denoiser.in_place
        with in_place.step(steps[0].adapters if shared[1] else (), len(steps), *shared) as written:
            results = compute_steps(self.denoiser, steps)
        recorded: set[int] = set()
        for step, result in zip(steps, results, strict=True):
            if isinstance(step, RecordStep):
                assert isinstance(result, tuple), "an output and a recording"
                recorded |= tensor_ids(result[1])
        chosen = Elsewhere(in_place.costs, in_place.refused, written)
        return Computed(self.tensors.pack(list(results), recorded), chosen)


def tensor_ids(cache: StepCache) -> set[int]:
    """Return the ids of a recording's tensors."""
    found: set[int] = set()

    def note(value: Tensor) -> Tensor:
        found.add(id(value))
        return value

    with_tensors(cache, note)
    return found
