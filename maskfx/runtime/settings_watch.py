"""SettingsWatch: notices when the plain values that a module computes with change between steps.

A captured graph holds scales of adapters, switches and the hooks of parts as constants. Pipelines
compare them before each run; a denoiser without a pipeline does it here, before each step.
"""

from __future__ import annotations

import logging

from torch import nn

from maskfx.ir.modules.module_settings import KnownSettings

log = logging.getLogger(__name__)

OWN_CHANGES = 3  # steps that change the module's values themselves, before it isn't watched anymore


class SettingsWatch:
    """Compares the values of one module with those of its captures.

    Values that the module changes while it runs, such as a counter, are no change of settings.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._known: KnownSettings | None = KnownSettings(module)
        self._digest = self._known.digest()
        self._own_changes = 0

    def changed(self) -> bool:
        """Return True if other code changed a value since the last step."""
        if self._known is None:
            return False
        before, self._digest = self._digest, self._known.digest()
        return before != self._digest

    def end_step(self) -> None:
        """Accept what the module itself changed in a step."""
        if not self.changed():
            return
        self._own_changes += 1
        if self._own_changes == OWN_CHANGES:
            self._known = None
            log.warning(
                "%s changes its own attributes in each step, so changes of its settings by other "
                "code aren't noticed; call forget() after such a change",
                type(self._module).__name__,
            )
