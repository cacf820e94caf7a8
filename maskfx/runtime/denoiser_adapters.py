"""DenoiserAdapters: what other parts ask a denoiser about the adapters of its members."""

from __future__ import annotations

from collections.abc import Collection

from maskfx.runtime.execution.executor import BatchExecutor
from maskfx.runtime.execution.twins import Terms
from maskfx.runtime.lora.adapter import Updates
from maskfx.runtime.lora.layers import AdapterSet, SetCache


class DenoiserAdapters:
    """Checks adapters, and knows what was made of them.

    Args:
        sets: The checked sets of adapters.
        executor: Keeps twins of programs, stacks and results with adapters.
    """

    def __init__(self, sets: SetCache, executor: BatchExecutor) -> None:
        self._sets, self._executor = sets, executor

    def check(self, adapters: Updates) -> None:
        """Raise InputError if adapters name layers that the module lacks, or don't fit them."""
        self._sets.of(adapters)

    def checked(self, adapters: Updates) -> AdapterSet | None:
        """Return checked adapters with the weights that they change; None if nothing acts."""
        return self._sets.of(adapters)

    def terms(self, code: str) -> Terms | None:
        """Return what another process makes a twin of; None for a program without adapters."""
        return self._executor.twins.terms_of(code)

    def drop(self, gone: Collection[int]) -> None:
        """Release all that was made of updates, given by the ids of their `Layers`."""
        self._sets.drop(gone)
        self._executor.drop_adapters(gone)
