"""Alterations: whether a pipeline's call changes settings of its modules while it runs.

Some pipelines give their denoiser other attention processors during a call and restore them at
its end. Such calls must not overlap with others over the same modules.
"""

from __future__ import annotations

import dis
import inspect
from collections.abc import Iterator
from functools import cache
from types import CodeType, FunctionType
from typing import Any

from maskfx.pipelines.pipeline import nested_pipelines

SETTERS = frozenset({"set_attn_processor", "set_processor", "enable_fuser"})
ATTRIBUTES = frozenset({"processor", "attn_processor"})


def alters_modules(pipe: object) -> bool:
    """Return True if a call of a pipeline, or of one that it runs, sets attention processors."""
    kinds: list[Any] = [type(one) for one in nested_pipelines(pipe)]
    return any(call_alters(getattr(kind, "maskfx_original", kind)) for kind in kinds)


@cache
def call_alters(pipeline: Any) -> bool:
    """Return True if the code of a class's call, or what it calls, sets attention processors.

    Follows methods of the class and functions of the modules that define them.
    """
    open_, seen = [function_of(pipeline.__call__)], set[CodeType]()
    while open_:
        function = open_.pop()
        if function is None or function.__code__ in seen:
            continue
        seen.add(function.__code__)
        for code in codes_in(function.__code__):
            if SETTERS & {*code.co_names} or sets_attribute(code):
                return True
            for name in code.co_names:
                found = getattr(pipeline, name, function.__globals__.get(name))
                open_.append(function_of(found))
    return False


def function_of(value: object) -> FunctionType | None:
    """Return the Python function of a function or method, without its decorators."""
    value = inspect.unwrap(getattr(value, "__func__", value)) if callable(value) else None
    return value if isinstance(value, FunctionType) else None


def codes_in(code: CodeType) -> Iterator[CodeType]:
    """Yield a function's code and that of functions inside it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from codes_in(constant)


def sets_attribute(code: CodeType) -> bool:
    return any(
        one.opname == "STORE_ATTR" and one.argval in ATTRIBUTES
        for one in dis.get_instructions(code)
    )
