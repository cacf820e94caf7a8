"""Alterations: whether a pipeline's call changes settings of its modules while it runs.

Some pipelines give their denoiser other attention processors during a call and restore them at
its end. Such calls must not overlap with others over the same modules.
"""

from __future__ import annotations

import dis
import inspect
from collections.abc import Iterator
from functools import cache
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

from torch.nn import Module

from maskfx.pipelines.parts.guiders import hooks_models
from maskfx.pipelines.parts.modular import blocks_within
from maskfx.pipelines.parts.pipeline import attributes_of, nested_pipelines

SETTERS = frozenset({"set_attn_processor", "set_processor", "enable_fuser"})
ATTRIBUTES = frozenset({"processor", "attn_processor"})


def alters_modules(pipe: object) -> bool:
    """Return True if a call of a pipeline, or of one that it runs, sets attention processors.

    Also for a modular pipeline whose guidance puts hooks on its denoiser for one of the branches.
    """
    several = nested_pipelines(pipe)
    if any(hooks_models(part) for one in several for part in attributes_of(one).values()):
        return True
    kinds: list[object] = [type(one) for one in several]
    kinds += [type(block) for one in several for block in blocks_within(one)]
    return any(call_alters(getattr(kind, "maskfx_original", kind)) for kind in kinds)


@cache
def call_alters(pipeline: Any) -> bool:
    """Return True if the code of a class's call, or what it calls, sets attention processors.

    Follows methods of the class and its bases, functions of modules, and helper classes, which
    are constructed and called. The class's own constructor has run before.
    """
    open_, seen = [(function_of(pipeline.__call__), pipeline)], set[tuple[CodeType, type]]()
    while open_:
        function, kind = open_.pop()
        if function is None or (function.__code__, kind) in seen:
            continue
        seen.add((function.__code__, kind))
        codes = [*codes_in(function.__code__)]
        if any(SETTERS & {*code.co_names} or sets_attribute(code) for code in codes):
            return True
        names = {name for code in codes for name in code.co_names} - {"__init__"}
        open_ += referenced(names, function.__globals__, kind)
    return False


def referenced(
    names: set[str], variables: dict[str, object], kind: type
) -> Iterator[tuple[FunctionType | None, type]]:
    """Yield the functions that names in a method of a class may refer to, with the class of each.

    A name refers to every definition in the class and its bases (for `super`), to the global
    variable, and to the attribute of each module among the global variables named. A class that is
    no torch module stands for its constructor and its call.
    """
    found = [vars(base)[name] for base in kind.__mro__ for name in names & vars(base).keys()]
    named = [variables[name] for name in names & variables.keys()]
    modules = [value for value in named if isinstance(value, ModuleType)]
    for module in modules:
        named += [vars(module)[name] for name in names & vars(module).keys()]
    for value in found + named:
        if not isinstance(value, type):
            yield function_of(value), kind
        elif value not in kind.__mro__ and Module not in value.__mro__:
            for base in value.__mro__:
                for name in ("__init__", "__call__"):
                    yield function_of(vars(base).get(name)), value


def function_of(value: object) -> FunctionType | None:
    """Return the Python function of a function or method, without its decorators."""
    if isinstance(value, MethodType | staticmethod | classmethod):
        value = value.__func__
    value = inspect.unwrap(value) if callable(value) else None
    return value if isinstance(value, FunctionType) else None


def codes_in(code: CodeType) -> Iterator[CodeType]:
    """Yield a function's code and that of functions inside it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from codes_in(constant)


def sets_attribute(code: CodeType) -> bool:
    return not ATTRIBUTES.isdisjoint(code.co_names) and any(
        one.opname == "STORE_ATTR" and one.argval in ATTRIBUTES
        for one in dis.get_instructions(code)
    )
