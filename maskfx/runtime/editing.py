"""editing(): a context manager that sets the mask and the cache for calls of denoisers."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor

from maskfx.errors import InputError
from maskfx.ir.argument_checks import check_type
from maskfx.runtime.cache.step_cache import StepCache
from maskfx.runtime.steps import EditStep


class Editable(Protocol):
    """The methods of a compiled denoiser that this file calls."""

    def edit(self, steps: Sequence[EditStep]) -> list[Any]: ...

    def record(self, **inputs: object) -> tuple[Any, StepCache]: ...


@dataclass
class Editing:
    """The state of one `with maskfx.editing(...)`: edits with a mask, records without one."""

    mask: Tensor | None
    caches: tuple[StepCache, ...] = ()
    recorded: list[StepCache] = field(default_factory=list)

    def run(
        self, denoiser: Editable, inputs: Mapping[str, object], own: set[str] | None = None
    ) -> Any:
        """Record, or edit with the first cache whose program is in `own`, else the first cache."""
        if self.mask is not None:
            fitting = [c for c in self.caches if c.program in (own or ())] or list(self.caches)
            return denoiser.edit([EditStep(inputs, self.mask, fitting[0])])[0]
        output, cache = denoiser.record(**inputs)
        self.recorded.append(cache)
        return output


_EDITING: ContextVar[Editing | None] = ContextVar("maskfx_editing", default=None)


def current_editing() -> Editing | None:
    """Return the state of the innermost `with maskfx.editing(...)`, or None outside of one."""
    return _EDITING.get()


@contextlib.contextmanager
def editing(
    mask: Tensor | None = None, cache: StepCache | Sequence[StepCache] | None = None
) -> Iterator[Editing]:
    """Make calls of compiled denoisers edit (with `mask` and `cache`) or record (with neither).

    Applies to `torch.compile(module, backend="maskfx")` and to a CompiledDenoiser. Recording calls
    append their caches to `.recorded`. A module that Dynamo splits into several graphs records
    several caches: pass them as a list.
    """
    if (mask is None) != (cache is None):
        given, absent = ("cache", "mask") if mask is None else ("mask", "cache")
        raise InputError(
            f"editing(): {given}= without {absent}=; pass both to edit, or neither to record"
        )
    if mask is not None:
        check_type("editing()", "mask", mask, Tensor, "a boolean tensor, as of an EditStep")
    if cache is not None:
        wanted = "what was recorded: a StepCache, or a list of them"
        check_type("editing()", "cache", cache, (StepCache, Sequence), wanted)
    caches = () if cache is None else (cache,) if isinstance(cache, StepCache) else tuple(cache)
    if mask is not None and not caches:
        raise InputError("editing(): cache= is empty; record first, and pass what was recorded")
    token = _EDITING.set(Editing(mask, caches))
    try:
        value = _EDITING.get()
        assert value is not None
        yield value
    finally:
        _EDITING.reset(token)
