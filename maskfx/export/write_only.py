"""A denoiser that is compiled to be written, and neither run nor compared.

What its captures and programs compute isn't compared with the module: for a large model on a CPU
that costs far more than its export. Guards of the export decide which sizes a capture serves.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn
from torch.utils import _pytree as pytree

from maskfx.compiler.capture.arguments.roles import Roles
from maskfx.compiler.capture.tracing.light_run import fills_tables
from maskfx.compiler.compile import Compilation
from maskfx.config import Settings
from maskfx.runtime.denoiser import CompiledDenoiser
from maskfx.runtime.programs.program_cache import ProgramCache


class UncomparedDenoiser(CompiledDenoiser):
    """Compiles a denoiser for its export.

    Args:
        module: the denoiser.
        example_inputs: arguments of a call, from which the graphs are made.
        layouts: whether weights in another layout are computed; without, they have shapes alone.
    """

    def __init__(
        self, module: nn.Module, example_inputs: Mapping[str, object], layouts: bool
    ) -> None:
        self._layouts = layouts
        super().__init__(module, Settings(), None, example_inputs)

    def _find_programs(self, roles: Mapping[str, Roles] | None) -> ProgramCache:
        found = UncomparedPrograms(
            self.module, self.settings, roles, self._executor, self._weights.fingerprint
        )
        found.layouts = self._layouts
        return found


class UncomparedPrograms(ProgramCache):
    """Compiles for each call, and compares nothing with the module."""

    compares = False

    def _shares(self, values: list[object]) -> bool:
        return False  # to take another module's program is to compare it

    def _warm_tables(self, inputs: dict[str, object], values: list[object]) -> None:
        if not self.every and fills_tables(self.module, inputs):
            super()._warm_tables(inputs, values)

    def _proven(
        self, compilation: Compilation, values: list[object], spec: pytree.TreeSpec
    ) -> Compilation:
        return compilation
