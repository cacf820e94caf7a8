"""What a callable computes with, as lines: its name and, of a Python function, code and values."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Iterator, Mapping
from types import CellType, CodeType, FunctionType, MethodType

from torch import Tensor, nn

from maskfx.ir.values import octets

DEPTH = 4  # of functions that refer to functions
HOOKS = ("_forward_pre_hooks", "_forward_hooks")  # of PyTorch, which run around `forward`


def is_called(value: object) -> bool:
    return callable(value) and not isinstance(value, (nn.Module, type))


def hooks_of(part: nn.Module) -> list[dict[int, object]]:
    """Return the tables of what a module calls before and after its `forward`."""
    return [vars(part).get(kind, {}) for kind in HOOKS]


def name_of(called: object) -> str:
    """Return the qualified name of a function, or of an object's class."""
    named = called if hasattr(called, "__qualname__") else type(called)
    return f"{named.__module__}.{named.__qualname__}"


def lines_of(called: object, depth: int = DEPTH) -> Iterator[str]:
    """Yield lines that differ for callables that compute differently.

    Functions of one name, such as two lambdas of one line, differ by their code, their defaults and
    what their code refers to outside of itself, except containers, in which functions often note
    their calls; objects by the callables they hold. Modules among that are known by their own
    settings.
    """
    yield name_of(called)
    if isinstance(called, functools.partial):
        held: list[object] = [called.func, *called.args, *called.keywords.items()]
    elif isinstance(called, MethodType):
        held = [called.__func__]
    elif isinstance(called, FunctionType):
        yield code_digest(called.__code__)
        held = [*(called.__defaults__ or ()), *(called.__kwdefaults__ or {}).items()]
        found = map(content_of, called.__closure__ or ())
        held += [value for value in found if not isinstance(value, (list, dict, set))]
    else:  # an object, such as an attention processor around another one
        held = [value for value in getattr(called, "__dict__", {}).values() if is_called(value)]
    for value in held:
        if is_plain(value):
            yield repr(value)
        elif is_called(value) and depth:
            yield from lines_of(value, depth - 1)
        elif isinstance(value, Tensor):
            yield tensor_digest(value)


def content_of(cell: CellType) -> object:
    try:
        return cell.cell_contents
    except ValueError:  # a variable that isn't set yet
        return None


def code_digest(code: CodeType) -> str:
    """Return a digest of a function's code, the same in every process of one Python version."""
    found = hashlib.sha256(code.co_code)
    found.update(repr((code.co_names, code.co_freevars)).encode())
    for value in code.co_consts:
        if isinstance(value, CodeType):
            found.update(code_digest(value).encode())
        else:  # the order of a set's elements differs from process to process
            parts = sorted(map(repr, value)) if isinstance(value, frozenset) else [repr(value)]
            found.update("".join(parts).encode())
    return found.hexdigest()


def tensor_digest(value: Tensor) -> str:
    if value.is_meta:
        return f"{value.dtype} {tuple(value.shape)}"
    content = octets(value.cpu()).numpy().data
    return f"{value.dtype} {tuple(value.shape)} {hashlib.sha256(content).hexdigest()}"


def is_plain(value: object) -> bool:
    if isinstance(value, Mapping):
        return all(map(is_plain, value.values()))
    if isinstance(value, (list, tuple)):
        return all(map(is_plain, value))
    return isinstance(value, (bool, int, float, str, type(None)))
