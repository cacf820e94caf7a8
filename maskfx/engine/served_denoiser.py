"""ServedDenoiser: the process's side of a `StepProcess`; computes the steps of one denoiser."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace

from torch import Tensor, nn

from maskfx.config import Settings
from maskfx.errors import CacheError
from maskfx.runtime.cache.step_cache import StepCache, with_tensors
from maskfx.runtime.denoiser import CompiledDenoiser
from maskfx.runtime.lora.adapter import Layers, Updates
from maskfx.runtime.step_executor import compute_steps
from maskfx.runtime.steps import AnyStep, EditStep, RecordStep
from maskfx.runtime.transport.sendable import bare
from maskfx.runtime.transport.sent_cache import received
from maskfx.runtime.transport.shared_tensors import PackedMessage, TensorHolder


@dataclass
class SentLayers:
    """An adapter's updates by their number, with their contents when they are sent first."""

    number: int
    contents: Layers | None


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

    def __reduce__(self) -> tuple[type[ServedDenoiser], tuple[object, Settings, int]]:
        return ServedDenoiser, (
            bare(self.denoiser.module, hooks=False),
            self.denoiser.settings,
            self.name,
        )

    def compute(self, message: PackedMessage, dropped: Dropped) -> PackedMessage:
        """Compute steps; return results whose edits are the computed rows only.

        The rows of recordings stay here, because edits of them follow.
        """
        for number in dropped.contents:
            self.caches.pop(number, None)
            self.layers.pop(number, None)
        self.tensors.drop(dropped.tensors)
        sent: Sequence[AnyStep] = self.tensors.unpack(message)
        steps = [replace(step, adapters=self._with_layers(step.adapters)) for step in sent]
        steps = [received(step, self.caches) for step in steps]
        steps = [replace(step, rows=True) if isinstance(step, EditStep) else step for step in steps]
        results = compute_steps(self.denoiser, steps)
        recorded: set[int] = set()
        for step, result in zip(steps, results, strict=True):
            if isinstance(step, RecordStep):
                assert isinstance(result, tuple), "an output and a recording"
                recorded |= tensor_ids(result[1])
        return self.tensors.pack(list(results), recorded)

    def _with_layers(self, adapters: Updates) -> Updates:
        found = []
        for one in adapters:
            sent: object = one.layers
            assert isinstance(sent, SentLayers)
            if sent.contents is not None:
                self.layers[sent.number] = sent.contents
            if sent.number not in self.layers:
                raise CacheError(f"adapter {sent.number} isn't in this process; send it again")
            found.append(replace(one, layers=self.layers[sent.number]))
        return tuple(found)


def tensor_ids(cache: StepCache) -> set[int]:
    """Return the ids of a recording's tensors."""
    found: set[int] = set()

    def note(value: Tensor) -> Tensor:
        found.add(id(value))
        return value

    with_tensors(cache, note)
    return found
