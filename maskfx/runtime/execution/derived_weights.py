"""DerivedWeights: weights that programs hold in another layout, which follow their origins."""

from __future__ import annotations

import weakref

from torch import Tensor

from maskfx.ir.programs.program import Derived, Program, derive


class DerivedWeights:
    """Remembers from which values of the origins the derived weights were computed."""

    def __init__(self) -> None:
        self._known: dict[str, tuple[weakref.ref[Tensor], int]] = {}

    def follow(self, program: Program) -> None:
        """Compute those of a program again whose origin was changed in place."""
        for item in program.interface.derived:
            origin = program.origins[item.origin]
            key = f"{id(program)}:{item.name}"
            version = 0 if origin.is_inference() else origin._version
            known = self._known.get(key)
            if known is None or known[0]() is not origin or known[1] != version:
                if known is not None:
                    compute(program, item)
                self._known[key] = (weakref.ref(origin), version)

    def compute(self, program: Program) -> None:
        """Compute all derived weights of a program again."""
        for item in program.interface.derived:
            compute(program, item)


def compute(program: Program, item: Derived) -> None:
    """Compute a derived weight again; a view of its origin follows by itself."""
    origin, held = program.origins[item.origin], getattr(program.module, item.name)
    if held.untyped_storage().data_ptr() != origin.untyped_storage().data_ptr():
        held.copy_(derive(origin, item.order, item.shape))
