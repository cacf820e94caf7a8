"""ModuleChanges: what a denoiser forgets when its module's weights, device or settings change."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Protocol

from torch import nn

from maskfx.runtime.execution.executor import BatchExecutor
from maskfx.runtime.hardware.offload import bring
from maskfx.runtime.in_place import InPlace
from maskfx.runtime.load_choice import LoadChoice
from maskfx.runtime.programs.program_cache import ProgramCache
from maskfx.runtime.settings_watch import SettingsWatch
from maskfx.runtime.validation.validator import Validator
from maskfx.runtime.weights import WeightChange, Weights


class Forgets(Protocol):
    """A part that keeps what depends on captures."""

    def forget(self) -> None:
        """Drop it."""


class ModuleChanges:
    """Compares a module with what its programs were captured from.

    Args:
        others: Parts with captures beside those of the programs.
        lock: Held while a step runs.
    """

    def __init__(
        self,
        module: nn.Module,
        weights: Weights,
        loads: LoadChoice,
        programs: ProgramCache,
        executor: BatchExecutor,
        validator: Validator,
        others: Sequence[Forgets],
        lock: AbstractContextManager[object],
    ) -> None:
        self._module, self._weights, self._loads = module, weights, loads
        self._programs, self._executor, self._validator = programs, executor, validator
        self._others = others
        self.in_place = InPlace(
            module,
            weights,
            programs,
            executor,
            validator.adapters,
            lock,
            lambda: loads.settings,
            self.follow,
        )
        executor.own_weights = lambda: not self.in_place.written
        weights.numbers = programs.numbers.digest
        self._lock = lock
        self._watch: SettingsWatch | None = None
        self._ran: object = None

    def watch_settings(self) -> None:
        """Compare the module's plain values before each step too, which a pipeline does itself."""
        self._watch = SettingsWatch(self._module)

    def follow(self) -> None:
        """Bring the module to its device, and forget what a change of its weights invalidates."""
        bring(self._module)
        self.in_place.leave()
        self.choose()
        if self._watch is not None and self._watch.changed():
            self.follow_settings()
        change = self._weights.change()
        if change is WeightChange.TENSORS:  # captured graphs hold the old tensors
            self.forget()
        if change is WeightChange.MOVED:
            self._executor.graphs.stop_replays()
        elif change is not WeightChange.NONE:
            self.weights_changed()

    def follow_settings(self) -> None:
        """Drop all captures, or what was computed with numbers that captures read as tensors."""
        with self._lock:
            if self._programs.numbers.follow(self._programs.every):
                self.weights_changed()
            else:
                self.forget()

    def settle(self) -> None:
        """Accept what the module's own run changed in it."""
        self._weights.settle()
        if self._watch is not None:
            self._watch.end_step()

    def end_step(self) -> None:
        """End a step: drop its inputs, and accept what it changed in the module."""
        self._validator.end_step()
        ran = self._weights.runs, self._programs.facts()  # both grow if the module itself ran
        if self._watch is not None and ran != self._ran:
            self._watch.end_step()
        self._ran = ran

    def choose(self) -> None:
        """Choose, by the device of the module, whether rows are loaded ahead and by plans."""
        chosen = self._loads.choose()
        if chosen is not None:
            settings, loader = chosen
            self._programs.settings = self._executor.graphs.settings = settings
            self._executor.graphs.loads.loader = loader

    def forget(self) -> None:
        """Drop all captures."""
        parts: list[Forgets] = [self._programs, self._executor, self._validator, *self._others]
        for part in parts:
            part.forget()
        self._weights.restart()
        self._loads.forget()
        self.choose()

    def weights_changed(self) -> None:
        """Invalidate what was computed from weights, and code compiled with pre-packed weights."""
        self.in_place.leave()
        self._weights.forget()
        self._validator.forget()
        self._programs.doubt()
        self._executor.forget_weights()
